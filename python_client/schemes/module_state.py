"""What of a torch module travels: its tensors by name, and the extra state of its submodules.

Extra state is what `get_extra_state()` returns: a tensor, which travels as `<path>._extra_state`,
or a mapping of tensors, nested or not, each of which travels as `<path>._extra_state.<key>`. A dot
within a key would look like nesting, so keys are written with `%2E` for a dot and `%25` for a
percent sign.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ...codecs.errors import StateError
from ...codecs.state import named_leaves
from ...codecs.torch_modules import parts_of

EXTRA_STATE = "_extra_state"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A module, taken apart.

    Attributes:
        tensors: Its parameters and buffers by name, tied ones under each name, sharing its memory.
        optional: Names of buffers that are not persistent, so that not every sender has them.
        parts: The modules with extra state, by the name of that state.
        faults: What stands in the way of writing into it.
    """

    tensors: Tensors
    optional: frozenset[str]
    parts: Mapping[str, nn.Module]
    faults: list[str] = field(default_factory=list[str])

    def part_of(self, name: str) -> str | None:
        """Return the name of the extra state that a tensor's name belongs to, if it does to any."""
        if name in self.parts:
            return name
        head, mark, _ = name.rpartition(f"{EXTRA_STATE}.")
        while mark:
            if head + EXTRA_STATE in self.parts:
                return head + EXTRA_STATE
            head, mark, _ = head.rpartition(f"{EXTRA_STATE}.")
        return None


def by_tensors(module: nn.Module) -> ModuleState:
    """Take a module apart by its parameters and buffers."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    tensors = {name: tensor.detach() for name, tensor in named}
    return ModuleState(tensors, frozenset(_passing_buffers(module)), _parts(module))


def by_state_dict(module: nn.Module) -> ModuleState:
    """Take a module apart by its `state_dict()`."""
    parts = parts_of(module)
    passing = frozenset(_passing_buffers(module))
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if n in passing}
    return ModuleState({**parts.tensors, **buffers}, passing, _parts(module), parts.faults)


def state_dict_of(module: nn.Module) -> Tensors:
    """Return the tensors of a module's `state_dict()`, its adapters merged if it has any (PEFT)."""
    merge = "merge_and_unload"
    if hasattr(module, merge):
        merged: nn.Module = getattr(copy.deepcopy(module), merge)()
        return state_dict_of(merged)
    parts = _parts(module)
    values: dict[str, Any] = module.state_dict()
    return named_tensors({k: v for k, v in values.items() if k not in parts}) | extra_of(parts)


def extra_of(parts: Mapping[str, nn.Module]) -> Tensors:
    """Return the extra state of modules as named tensors.

    Raises:
        StateError: Some of it is neither a tensor nor a mapping of tensors.
    """
    return {
        name: tensor
        for root, part in parts.items()
        for name, tensor in _flatten(root, part.get_extra_state())
    }


def put_extra(parts: Mapping[str, nn.Module], tensors: Tensors, state: ModuleState) -> None:
    """Give modules their extra state back; all of them, or none and an exception."""
    before = {name: value.clone() for name, value in extra_of(parts).items()}
    done: list[str] = []
    try:
        for root, part in parts.items():
            done.append(root)
            _put(part, root, {n: t for n, t in tensors.items() if state.part_of(n) == root})
    except BaseException:
        for root in done:
            _put(parts[root], root, {n: t for n, t in before.items() if state.part_of(n) == root})
        raise


def named_tensors(values: Mapping[str, object]) -> Tensors:
    """Check that everything in a flat mapping is a tensor, and detach it."""
    leaves = cast("Tensors", named_leaves(values))
    return {name: torch.as_tensor(leaf).detach() for name, leaf in leaves.items()}


def replace_tensors(module: nn.Module) -> None:
    """Give every parameter and buffer new memory with the same values, tied ones in common."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # tensors are hashed by identity
    for part in module.modules():
        slots = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, old in slots:
            if old not in made:
                new = old.detach().clone()
                is_parameter = isinstance(old, nn.Parameter)
                made[old] = nn.Parameter(new, old.requires_grad) if is_parameter else new
            setattr(part, name, made[old])


def take_out_of_shared_memory(module: nn.Module) -> None:
    """Give tensors in shared memory memory of their own, with the same values, tied ones in common.

    Parameters and buffers stay the same objects.
    """
    own: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "cpu" or not cast("Any", tensor).is_shared():
            continue
        shared = tensor.untyped_storage()
        if shared.data_ptr() not in own:
            whole = torch.empty(0, dtype=torch.uint8).set_(shared)
            own[shared.data_ptr()] = whole.clone()
        storage = own[shared.data_ptr()].untyped_storage()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    modules = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    return {
        f"{path}.{EXTRA_STATE}".lstrip("."): part
        for path, part in modules
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def _passing_buffers(module: nn.Module) -> Iterator[str]:
    modules = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    for path, part in modules:
        for name in part._non_persistent_buffers_set:  # noqa: SLF001  # pyright: ignore
            yield f"{path}.{name}".lstrip(".")


def _flatten(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping) or hasattr(value, "batch_size"):
        for key, inner in cast("Mapping[object, Any]", value).items():
            if not isinstance(key, str):
                raise StateError(f"{name}: the key {key!r} of extra state is not a string")
            yield from _flatten(f"{name}.{key.replace('%', '%25').replace('.', '%2E')}", inner)
    elif value is not None:
        raise StateError(
            f"{name}: extra state of type {type(value).__name__} cannot travel; return a tensor or "
            "a mapping of tensors from get_extra_state()"
        )


def _put(part: nn.Module, root: str, tensors: Tensors) -> None:
    """Call `set_extra_state` with what `_flatten` was given; with nothing, not at all."""
    if root in tensors:
        part.set_extra_state(tensors[root].clone())
    elif tensors:
        nested: dict[str, Any] = {}
        for name, tensor in tensors.items():
            *path, last = name[len(root) + 1 :].split(".")
            node = nested
            for key in path:
                node = node.setdefault(_key(key), {})
            node[_key(last)] = tensor.clone()
        part.set_extra_state(nested)


def _key(written: str) -> str:
    return written.replace("%2E", ".").replace("%25", "%")
