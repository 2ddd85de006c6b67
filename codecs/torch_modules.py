"""Finds the tensors of a torch module: those to publish, and those that a version can write to.

Extra state is the value of `get_extra_state()`. TorchRL's weight-sync schemes send the extra state
of every submodule. Extra state that is a tensor has the name `<path>._extra_state`. If it is a
mapping, nested or not, each tensor in it has the name `<path>._extra_state.<key>`. A dot within a
key would look like nesting, so keys are written with `%2E` for a dot and `%25` for a percent sign.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn

from . import torch_params
from .errors import StateError
from .state import Outline, is_tensordict, outline_of
from .torch_loading import ADVICE, Loading, loading_of
from .torch_offloaded import (
    OFFLOADED,
    PUBLISH,
    gathered_fault,
    offload_faults,
    offloaded,
    quantised_fault,
)
from .torch_tensors import GATHER, is_one_block, memory_fault, placeholder_fault

_CONTENTS = ("_modules", "_parameters", "_buffers")
_OVERRIDDEN = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
_AFTER_LOADING, _BEFORE_LOADING = "_load_state_dict_post_hooks", "_load_state_dict_pre_hooks"
EXTRA_STATE = "_extra_state"  # the last part of the name of extra state

Format = Literal["tensordict", "state_dict"]  # all tensors, or only those in `state_dict()`
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """The parts of a module that a version can write to.

    Attributes:
        tensors: The module's tensors by name, in the module's memory. A tied tensor has several
            names.
        extra: The modules with extra state, by the name of that state.
        faults: Error lines that say why the module cannot be written to.
        optional: Names of non-persistent buffers, which a publisher may lack.
        loading: How to load the module if a copy into its tensors is not enough.
    """

    tensors: Tensors
    extra: Mapping[str, nn.Module]
    faults: list[str]
    optional: frozenset[str] = frozenset()
    loading: Loading | None = None

    def part_of(self, name: str) -> str | None:
        """Return the name of the extra state with the tensor `name`; None if there is none."""
        if name in self.extra:
            return name
        head, mark, _ = name.rpartition(f"{EXTRA_STATE}.")
        while mark:
            if head + EXTRA_STATE in self.extra:
                return head + EXTRA_STATE
            head, mark, _ = head.rpartition(f"{EXTRA_STATE}.")
        return None


# The parts that a version is written to.


def parts_of(module: nn.Module) -> ModuleParts:
    """Return the tensors of a module's `state_dict()` that can be written to, and the faults.

    Tensors that `state_dict()` makes on the fly are included if the module's own loading method
    loads them.
    """
    if fault := _unfit(module) or _unshaped(module):
        return ModuleParts({}, {}, [fault])
    loading = loading_of(module)
    if faults := offload_faults(module, loaded=loading is not None):
        return ModuleParts({}, {}, faults)
    found, _ = offloaded(module)
    extra = with_extra(module, "set_extra_state")
    owned = {_address(tensor) for _, _, tensor in _slots(module)} | {0}
    tensors: Tensors = {}
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
        elif name in found:
            tensors[name] = found[name]
        elif _address(value) in owned or (loading is not None and loading.makes(name)):
            tensors[name] = value
        else:
            faults.append(
                f"{name}: made by state_dict() on the fly, so it cannot be written to: {ADVICE}"
            )
    faults = _placeholders(module, tensors.values()) + faults + _left_on_meta(module, loading)
    return ModuleParts(tensors, extra, faults, loading=loading)


def parts_by(module: nn.Module, names: Format) -> ModuleParts:
    """Return the parts of a module that the schemes write, with all buffers and extra state."""
    if fault := _unfit(module):
        return ModuleParts({}, {}, [fault])
    loading = loading_of(module)
    if faults := offload_faults(module, loaded=loading is not None):
        return ModuleParts({}, {}, faults)
    found, _ = offloaded(module)
    optional = frozenset(
        f"{path}.{name}".lstrip(".")
        for path, part in _modules(module)
        for name in vars(part)["_non_persistent_buffers_set"]
    )
    everything, extra = _tensors(module) | found, with_extra(module, "get_extra_state")
    if names == "tensordict":
        faults = _placeholders(module, everything.values()) + _left_on_meta(module, loading)
        return ModuleParts(everything, extra, faults, optional, loading)
    parts = parts_of(module)
    tensors = parts.tensors | {name: everything[name] for name in optional & everything.keys()}
    return replace(parts, tensors=tensors, extra=extra, optional=optional)


def _unfit(module: nn.Module) -> str | None:
    """Return why a module would not use weights that are copied into its tensors, if so."""
    return shards_fault(module) or gathered_fault(module) or quantised_fault(module)


def put_extra(parts: ModuleParts, tensors: Tensors) -> None:
    """Set the extra state of all modules. If a module raises, restore all that were set."""
    before = {name: _cloned(name, value) for name, value in extra_of(parts.extra).items()}
    done: list[str] = []

    def put(root: str, values: Tensors) -> None:
        _put(parts.extra[root], root, {n: t for n, t in values.items() if parts.part_of(n) == root})

    try:
        for root in parts.extra:
            done.append(root)
            put(root, tensors)
    except BaseException:
        for root in done:
            put(root, before)
        raise


# What is published.


def leaves_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the entries of `state_dict()`; StateError if an entry is not a tensor."""
    for name, value in _state_dict(module).items():
        if not isinstance(value, torch.Tensor):
            raise StateError(
                f"{name}: extra state of type {type(value).__name__} cannot travel, only tensors "
                "can; return a tensor from get_extra_state(), or send it by another way"
            )
        yield name, value


def contents_of(module: nn.Module, names: Format) -> dict[str, Any]:
    """Return, by name, the entries of a module that TorchRL's schemes send.

    The entries share the module's memory, except after a merge. If `names` is "state_dict", PEFT
    adapters are merged in a copy of the module, and entries that are not tensors are included.

    Raises:
        StateError: This process does not have all of the module's tensors.
    """
    if fault := shards_fault(module):
        raise StateError(fault)
    if names == "state_dict" and hasattr(module, "merge_and_unload"):
        merged: Any = copy.deepcopy(module)
        return contents_of(merged.merge_and_unload(), names)
    extra = with_extra(module, "get_extra_state")
    if names == "tensordict":
        if fault := quantised_fault(module):
            raise StateError(fault)
        tensors = _tensors(module) | _offloaded(module)
        _check_placeholders(module, tensors.values())
        return {**tensors, **extra_of(extra)}
    own = {name: value for name, value in _state_dict(module).items() if name not in extra}
    return own | extra_of(extra)


def shards_fault(module: nn.Module) -> str | None:
    """Return an error text if the `state_dict()` of a submodule waits for all ranks; else None.

    If only one rank called `state_dict()`, it would block until the timeout of the ranks.
    """
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    sharded = getattr(home, "FullyShardedDataParallel", None)  # None during its import
    if sharded is None:
        return None
    path = next((path for path, part in _modules(module) if isinstance(part, sharded)), None)
    if path is None:
        return None
    return (
        f"{path or 'the module'}: sharded by FullyShardedDataParallel, so no rank has all of it: "
        f"{GATHER}. On a worker, pass a module that is not sharded, or a mapping"
    )


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """Return a module's `state_dict()`; StateError if this process lacks some of its tensors."""
    if fault := shards_fault(module) or _unshaped(module):
        raise StateError(fault)
    named = module.state_dict()
    named |= {name: tensor for name, tensor in _offloaded(module).items() if name in named}
    _check_placeholders(module, named.values())
    return named


def _offloaded(module: nn.Module) -> Tensors:
    """Return a module's offloaded tensors; StateError if some are not in memory."""
    found, gone = offloaded(module)
    if gone:
        raise StateError(f"{gone[0]}: {OFFLOADED}{PUBLISH}")
    return found


def parameters_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module computes with as its parameters, including offloaded ones."""
    found, _ = offloaded(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield found.get(name, parameter)


def _check_placeholders(module: nn.Module, tensors: Iterable[object]) -> None:
    for fault in _placeholders(module, tensors):
        raise StateError(fault)


def _placeholders(module: nn.Module, tensors: Iterable[object]) -> list[str]:
    """Return error texts for parameters that are placeholders of ZeRO 3, if some tensors are empty.

    The check needs the parameters, since the tensors of `state_dict()` lack DeepSpeed's attributes.
    """
    if all(each.numel() for each in tensors if type(each) is torch.Tensor):
        return []
    named = module.named_parameters(remove_duplicate=False)
    faults = ((name, placeholder_fault(each)) for name, each in named if not _is_lazy(each))
    return [f"{name}: {fault}" for name, fault in faults if fault]


def extra_of(parts: Mapping[str, nn.Module]) -> Tensors:
    """Return the extra state of modules as named tensors.

    Raises:
        StateError: A module's extra state is neither a tensor nor a mapping of tensors.
    """
    return {
        name: tensor
        for root, part in parts.items()
        for name, tensor in _flatten(root, part.get_extra_state())
    }


def outline(module: nn.Module) -> Outline | None:
    """Return a module's outline; None if `state_dict()` may return new tensors at each call."""
    key: list[object] = []
    leaves: list[torch.Tensor] = []
    for part in module.modules():
        if _has_own_state_dict(part):
            return None
        inside = vars(part)
        key += (part, *inside["_modules"], *inside["_modules"].values())
        key.append(len(inside["_non_persistent_buffers_set"]))
        # A new hook changes how the submodule is loaded (`torch_loading`).
        key += (len(inside[_AFTER_LOADING]), len(inside[_BEFORE_LOADING]))
        for name, tensor in (*inside["_parameters"].items(), *inside["_buffers"].items()):
            key += (name, tensor is None)
            if tensor is not None:
                leaves.append(tensor)
    return outline_of(key, leaves)


# New memory.


def on_meta(module: nn.Module) -> bool:
    """Return whether a module has meta parameters or buffers that are not offloaded."""
    if not any(tensor.is_meta for _, _, tensor in _slots(module)):
        return False
    return any(tensor.is_meta for tensor in (_tensors(module) | offloaded(module)[0]).values())


def materialise(module: nn.Module) -> None:
    """Give memory to every parameter and buffer on the meta device; tied tensors stay tied.

    `Module.to_empty` would untie tied weights, and discard the values of other tensors. The memory
    is on the device of the module's first tensor that is not on the meta device, if there is one,
    else on torch's default device.
    """
    real = (tensor.device for _, _, tensor in _slots(module) if not tensor.is_meta)
    device = next(real, torch.get_default_device())
    _exchange(module, lambda old, _: _with_memory(old, device) if old.is_meta else None)


def replace_tensors(module: nn.Module) -> None:
    """Give every parameter and buffer new memory with the same values; tied tensors stay tied."""

    def copied(old: torch.Tensor, name: str) -> torch.Tensor:
        new = _cloned(name, old.detach())
        return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new

    _exchange(module, copied)


def _exchange(module: nn.Module, new: Callable[[torch.Tensor, str], torch.Tensor | None]) -> None:
    """Replace each tensor for which `new` returns a tensor, under all of its names."""
    made: dict[torch.Tensor, torch.Tensor | None] = {}  # tensors are hashed by identity
    for part in module.modules():
        others: Tensors = {}
        for name, old in _own_tensors(part):
            if old not in made:
                made[old] = new(old, name)
            if (other := made[old]) is not None:
                others[name] = other
        if torch_params.is_params(part):
            torch_params.put(part, others)
        else:
            for name, other in others.items():
                setattr(part, name, other)


def take_out_of_shared_memory(module: nn.Module) -> None:
    """Move tensors out of shared memory into private memory, with the same values and ties.

    Parameters and buffers stay the same objects.
    """
    own: dict[int, torch.Tensor] = {}
    for _, _, tensor in _slots(module):
        if tensor.device.type != "cpu" or _is_lazy(tensor) or memory_fault(tensor):
            continue  # using its values raises a clear error
        if not cast("Any", tensor).is_shared():
            continue
        shared = tensor.untyped_storage()
        if shared.data_ptr() not in own:
            whole = torch.empty(0, dtype=torch.uint8).set_(shared)
            own[shared.data_ptr()] = whole.clone()
        storage = own[shared.data_ptr()].untyped_storage()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def _with_memory(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(old, device=device, requires_grad=False)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        vars(new).update(vars(old))  # attributes that frameworks set on parameters
    return new


# Helpers.


def _has_own_state_dict(part: nn.Module) -> bool:
    """Return whether a submodule changes `state_dict()`, or stores its tensors elsewhere."""
    kind, inside = type(part), vars(part)
    if not all(isinstance(inside.get(name), dict) for name in _CONTENTS):
        return True  # a ScriptModule stores them elsewhere
    hooks = inside["_state_dict_hooks"] or inside["_state_dict_pre_hooks"]
    return bool(hooks) or any(getattr(kind, n) is not getattr(nn.Module, n) for n in _OVERRIDDEN)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's elements; 0 if it has no memory."""
    if _is_lazy(tensor) or tensor.is_meta or not is_one_block(tensor) or memory_fault(tensor):
        return 0
    return tensor.data_ptr()


def _is_lazy(tensor: torch.Tensor) -> bool:
    return bool(nn.parameter.is_lazy(tensor))


def _cloned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; StateError if it has no memory, where torch would crash."""
    if fault := memory_fault(tensor):
        raise StateError(f"{name}: {fault}")
    return tensor.clone()


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return an iterator over (path, submodule), with a submodule once for each of its paths."""
    return cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield every parameter and buffer as (submodule, name there, tensor)."""
    for part in module.modules():
        yield from ((part, name, tensor) for name, tensor in _own_tensors(part))


def _own_tensors(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a submodule itself, without those of its children."""
    if torch_params.is_params(part):
        yield from torch_params.own_tensors(part)
    else:
        yield from part.named_parameters(recurse=False, remove_duplicate=False)
        yield from part.named_buffers(recurse=False, remove_duplicate=False)


def _tensors(module: nn.Module) -> Tensors:
    """Return every parameter and buffer by name; a tied tensor has several names."""
    return {
        f"{path}.{name}".lstrip("."): tensor if _is_lazy(tensor) else tensor.detach()
        for path, part in _modules(module)
        for name, tensor in _own_tensors(part)
    }


def _lost_buffers(module: nn.Module) -> Iterator[str]:
    """Yield the names of buffers on the meta device that are not in `state_dict()`."""
    for path, part in _modules(module):
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta and name not in part.state_dict():
                yield f"{path}.{name}".lstrip(".")


def _unshaped(module: nn.Module) -> str | None:
    """Return an error text if a tensor has no shape, so that `state_dict()` fails; else None."""
    for path, part in _modules(module):
        if torch_params.is_params(part):
            for name, tensor in torch_params.own_tensors(part):
                if _is_lazy(tensor):
                    return f"{path}.{name}: has no shape yet; run the module once to initialise it"
    return None


def _left_on_meta(module: nn.Module, loading: Loading | None) -> list[str]:
    """Return error texts for tensors in attributes that stay on the meta device after an apply.

    A module is not checked if loading code, extra state or a forward pre-hook may fill such a
    tensor, or if it contains TensorDictParams, since it then computes with other tensors.
    """
    parts = [*module.modules()]
    if loading is not None or not on_meta(module) or any(map(torch_params.is_params, parts)):
        return []
    carried = {id(tensor) for _, _, tensor in _slots(module)}
    return [
        f"{path}.{name}".lstrip(".") + ": a tensor on the meta device that is neither a parameter "
        "nor a buffer, so no version carries its value; register it as a buffer, or build the "
        "module on a real device"
        for path, part in _modules(module)
        if not (vars(part).get("_forward_pre_hooks") or _takes_extra(part))
        for name, value in vars(part).items()
        if any(tensor.is_meta and id(tensor) not in carried for tensor in _in_attribute(value))
    ]


def _takes_extra(part: nn.Module) -> bool:
    return type(part).set_extra_state is not nn.Module.set_extra_state


def _in_attribute(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict) or is_tensordict(value):
        inside = [*cast("Mapping[object, object]", value).values()]
    elif isinstance(value, list | tuple):
        inside = [*cast("Iterable[object]", value)]
    else:
        inside = [cast("object", value)]
    return [each for each in inside if isinstance(each, torch.Tensor)]


def with_extra(
    module: nn.Module, method: Literal["get_extra_state", "set_extra_state"]
) -> dict[str, nn.Module]:
    """Return the modules that override this method, by the name of their extra state."""
    return {
        f"{path}.{EXTRA_STATE}".lstrip("."): part
        for path, part in _modules(module)
        if getattr(type(part), method) is not getattr(nn.Module, method)
    }


def _flatten(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    # Yield (name, tensor) of the tensors in an extra state.
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
    """Call `set_extra_state` with the value that `_flatten` split into `tensors`, if not empty."""
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
