"""Torch modules as targets: which tensors a version is copied into, and what stands in its way."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from .outline import Outline, outline_of
from .torch_tensors import is_one_block

_CONTENTS = ("_modules", "_parameters", "_buffers")
_OVERRIDDEN = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
EXTRA_STATE = "_extra_state"  # the last part of its name in every state_dict()


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """What of a module a version can reach, by the names of its `state_dict()`."""

    tensors: dict[str, torch.Tensor]
    extra: Mapping[
        str, Callable[[torch.Tensor], None]
    ]  # the `set_extra_state` of each module with one
    faults: list[str]


def parts_of(module: nn.Module) -> ModuleParts:
    """Return the tensors of a module that can be written in place, and what cannot be."""
    extra: dict[str, Callable[[torch.Tensor], None]] = {
        f"{path}.{EXTRA_STATE}".lstrip("."): part.set_extra_state
        for path, part in _modules(module)
        if type(part).set_extra_state is not nn.Module.set_extra_state
    }
    owned = {_address(tensor) for tensor in (*module.parameters(), *module.buffers())}
    tensors: dict[str, torch.Tensor] = {}
    faults = [
        f"{name}: a buffer on the meta device that is not persistent, so no version carries its "
        "value; build the module on a real device, or register the buffer as persistent"
        for name in _lost_buffers(module)
    ]
    for name, value in module.state_dict().items():
        if name in extra:
            continue
        if not isinstance(value, torch.Tensor):
            faults.append(f"{name}: a {type(value).__name__} that only set_extra_state could take")
        elif (address := _address(value)) and address not in owned:
            faults.append(f"{name}: made by state_dict() on the fly, so it cannot be written to")
        else:
            tensors[name] = value
    return ModuleParts(tensors, extra, faults)


def outline(module: nn.Module) -> Outline | None:
    """Return a module's outline; None if its `state_dict()` may say something else every time."""
    key: list[object] = []
    leaves: list[torch.Tensor] = []
    for part in module.modules():
        if _has_a_mind_of_its_own(part):
            return None
        inside = vars(part)
        key += (part, *inside["_modules"], *inside["_modules"].values())
        key.append(len(inside["_non_persistent_buffers_set"]))
        for name, tensor in (*inside["_parameters"].items(), *inside["_buffers"].items()):
            key += (name, tensor is None)
            if tensor is not None:
                leaves.append(tensor)
    return outline_of(key, leaves)


def _has_a_mind_of_its_own(part: nn.Module) -> bool:
    kind, inside = type(part), vars(part)
    if not all(isinstance(inside.get(name), dict) for name in _CONTENTS):
        return True  # a script module keeps them elsewhere
    hooks = inside["_state_dict_hooks"] or inside["_state_dict_pre_hooks"]
    return bool(hooks) or any(getattr(kind, n) is not getattr(nn.Module, n) for n in _OVERRIDDEN)


def materialise(module: nn.Module) -> None:
    """Give every meta parameter and buffer of a module memory of its own, tied ones in common.

    `Module.to_empty` would untie tied weights and wipe the tensors that do have values. The device
    is that of the module's first real tensor, else torch's default.
    """
    everything = (*module.parameters(), *module.buffers())
    device = next((t.device for t in everything if not t.is_meta), torch.get_default_device())
    made: dict[torch.Tensor, torch.Tensor] = {}  # tensors are hashed by identity
    for part in module.modules():
        slots = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, old in slots:
            if old.is_meta:
                if old not in made:
                    made[old] = _with_memory(old, device)
                setattr(part, name, made[old])


def _with_memory(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(old, device=device, requires_grad=False)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        vars(new).update(vars(old))  # what frameworks pin to their parameters
    return new


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's elements lie; 0 if it has none."""
    lazy = nn.parameter.is_lazy(tensor)
    return 0 if lazy or tensor.is_meta or not is_one_block(tensor) else tensor.data_ptr()


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return every module within one, once for each of its paths."""
    return cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))


def _lost_buffers(module: nn.Module) -> Iterator[str]:
    for path, part in _modules(module):
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta and name not in part.state_dict():
                yield f"{path}.{name}".lstrip(".")
