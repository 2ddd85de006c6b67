"""Finds the tensors of a model, and which part of each sharded tensor each rank has.

The object for a tensor's shards says which part of the whole tensor each rank has (`parts`), and
returns this rank's part (`mine`). Both follow from the placements alone, so rank 0 knows the other
ranks' parts without communication. Only `PlacedShards.gathered` communicates.

FSDP1 stores the parameters of a module as intervals of one flat parameter, of which each rank has
an equal part. The attributes used here are internal to torch, but FSDP1 is not developed further;
its own `state_dict()` would gather the whole model.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...codecs.errors import StateError
from ...codecs.leaves import Leaf
from ...codecs.parts import Box
from ...codecs.state import identity, is_module, named_leaves, signature
from ...codecs.torch_modules import EXTRA_STATE, shards_fault, with_extra
from ...codecs.torch_tensors import memory_fault

# The parts that wrappers add to the names of a module's tensors.
WRAPPERS = "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."


class Entry(NamedTuple):
    """One name of a model's `state_dict()`.

    Attributes:
        name: The name that the tensor has in the module without wrappers.
        tensor: The tensor, or its shards.
        same: A key that is equal for all names of one tensor; None: an empty tensor.
        buffer: Whether the tensor is a buffer of a module.
    """

    name: str
    tensor: "Leaf | Shards"
    same: Hashable | None
    buffer: bool = False


def entries(source: object) -> list[Entry]:
    """Return the entries of a module, or of another source that can be published.

    Raises:
        StateError: A part of `source` cannot be published; the text names it.
    """
    found = _entries_of_module(source) if is_module(source) else _entries_of_mapping(source)
    names = Counter(entry.name for entry in found)
    for name, count in names.items():
        if count > 1:
            raise StateError(f"{name}: without the names of wrappers, two tensors have this name")
    return found


def _entries_of_mapping(source: object) -> list[Entry]:
    return [_entry(name, leaf, None) for name, leaf in named_leaves(source).items()]


def _entries_of_module(source: nn.Module) -> list[Entry]:
    module = _unwrapped(source)
    if shards_fault(module):
        return [*_entries_of_flat(module)]
    leaves = named_leaves(module)  # FSDP2 now has its parameters as shards again
    same = {_clean(n): id(p) for n, p in module.named_parameters(remove_duplicate=False)}
    return [
        _entry(_clean(name), leaf, same.get(_clean(name)), buffer=_clean(name) not in same)
        for name, leaf in leaves.items()
    ]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of DistributedDataParallel and of compilers."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = cast("nn.Module", module.module)
        elif isinstance(inner := vars(module)["_modules"].get("_orig_mod"), nn.Module):
            module = inner
        else:
            return module


def _clean(name: str) -> str:
    """Return a name without the parts that wrappers add."""
    for part in WRAPPERS:
        name = f".{name}".replace(f".{part}", ".")[1:]
    return name


def _entry(name: str, leaf: Leaf, parameter: int | None, *, buffer: bool = False) -> Entry:
    if not isinstance(leaf, DTensor):
        signature(name, leaf)  # raises for a leaf that cannot be published
        if isinstance(leaf, torch.Tensor):
            _check_memory(name, leaf)
        return Entry(name, leaf, identity(leaf), buffer)
    shards = PlacedShards(leaf)
    _check_memory(name, shards.mine())
    # Without a module, tied names share the object. (An empty shard has no address to compare.)
    return Entry(name, shards, ("DTensor", parameter or id(leaf)), buffer)


def _check_memory(name: str, mine: torch.Tensor) -> None:
    if mine.is_meta:
        raise StateError(
            f"{name}: on the meta device, so it has no values to send; load the model first"
        )
    if mine.numel() and (fault := memory_fault(mine)):
        raise StateError(f"{name}: {fault}")


class PlacedShards:
    """The shards of a DTensor: of FSDP2, tensor parallelism, or both.

    Attributes:
        meta: The whole tensor, on the meta device.
        how: How the tensor is sharded, as a text that is the same on every rank.
        whole: Whether torch must gather the tensor, by `gathered`; else `parts` yields its parts.
        straight: Whether `parts` yields views of the whole tensor's memory.
        in_order: Whether the parts are in the order of the ranks. If not, torch may gather
            different values on different ranks.
    """

    straight = True

    def __init__(self, tensor: DTensor) -> None:
        self._tensor: Any = tensor.detach()
        self._placements = tensor.placements
        self.meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        mesh: Any = tensor.device_mesh
        self._mesh = _grid(mesh)
        self._order = _order(tensor)
        here: list[int] | None = mesh.get_coordinate()
        # `whole`: on a GPU, torch gathers over NCCL. And only torch knows placements of other
        # kinds, and the order of parts on a mesh whose ranks are not ascending.
        axes = range(self._mesh.ndim)
        self.in_order = all(bool((self._mesh.diff(dim=axis) > 0).all()) for axis in axes)
        self.whole = mesh.device_type != "cpu" or self._order is None or not self.in_order
        if not self.whole and here is not None:
            self.whole = self._part(self.meta, here).shape != self.mine().shape
        self.how = f"{tensor.placements} of {tuple(self._mesh.shape)}" + " gathered" * self.whole

    @property
    def ranks(self) -> Any:
        """The global ranks that have the parts, as nested lists in the shape of the mesh."""
        return cast("Any", self._mesh).tolist()

    def of_ranks(self, ranks: Any) -> None:
        """Let `parts` yield the parts of other ranks, such as those of rank 0's replica."""
        self._mesh = torch.tensor(ranks)

    def parts(self, whole: torch.Tensor, leader: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the global rank that sends a part, and that part as a view of `whole`.

        Each element is in one part. Where several ranks have copies, the copy of `leader` is used;
        if `leader` is not in the mesh, the first copy. The caller fills each part before the next.
        """
        own = (self._mesh == leader).nonzero()
        at: list[int] = own[0].tolist() if len(own) else [0] * self._mesh.ndim  # pyright: ignore
        copies = [type(placement) is Replicate for placement in self._placements]
        sizes = self._mesh.shape
        each = [[i] if c else range(n) for n, c, i in zip(sizes, copies, at, strict=True)]
        for coordinate in product(*each):
            yield int(self._mesh[coordinate]), self._part(whole, coordinate)

    def _part(self, whole: torch.Tensor, coordinate: Sequence[int]) -> torch.Tensor:
        """Return the part of a tensor that the rank at this coordinate of the mesh has."""
        part: torch.Tensor = whole
        for axis in self._order or ():
            dim, index = int(cast("Any", self._placements[axis]).dim), coordinate[axis]
            chunks: Sequence[torch.Tensor] = torch.chunk(part, int(self._mesh.shape[axis]), dim)
            empty: torch.Tensor = part.narrow(dim, 0, 0)
            part = chunks[index] if index < len(chunks) else empty
        return part

    def mine(self) -> torch.Tensor:
        """Return this rank's part of the tensor."""
        part: torch.Tensor = self._tensor.to_local()
        return part

    def box(self) -> Box | None:
        """Return which slice of the whole tensor this rank has; None if that is not known."""
        here: list[int] | None = self._tensor.device_mesh.get_coordinate()
        if self._order is None or here is None:
            return None
        part = self._part(self.meta, here)
        if part.shape != self.mine().shape:
            return None
        box, at = list[tuple[int, int]](), int(part.storage_offset())
        for step, size in zip(self.meta.stride(), part.shape, strict=True):
            begin, at = divmod(at, step) if step else (0, at)
            box.append((int(begin), int(begin) + size))
        return tuple(box)

    def gathered(self) -> torch.Tensor:
        """Return the whole tensor; every rank must call this."""
        whole: torch.Tensor = self._tensor.full_tensor()
        return whole


# A cache: torch computes `mesh.mesh` anew each time, which would take most of the time spent here.
_GRIDS: WeakKeyDictionary[object, torch.Tensor] = WeakKeyDictionary()


def _grid(mesh: Any) -> torch.Tensor:
    """Return the global ranks of a mesh, in its shape."""
    if mesh not in _GRIDS:
        _GRIDS[mesh] = mesh.mesh
    return _GRIDS[mesh]


def _order(tensor: DTensor) -> list[int] | None:
    """Return the axes of the mesh that shard a tensor, in the order in which they cut it.

    Return None if a placement is of an unknown kind. If FSDP2 shards a tensor that a later axis of
    the mesh shards already, FSDP2's axis cuts last, and its placement is strided.
    """
    first, last = list[int](), list[int]()
    sizes = _grid(tensor.device_mesh).shape
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            first.append(axis)
        elif type(placement).__name__ == "_StridedShard":
            strided: Any = placement
            later = [
                sizes[other]
                for other in range(axis + 1, len(sizes))
                if type(each := tensor.placements[other]) is Shard
                and cast("Any", each).dim == strided.dim
            ]
            if last or strided.split_factor != math.prod(later):
                return None
            last.append(axis)
        elif type(placement) is not Replicate:
            return None
    # Torch may also have an order that the placements do not show.
    shown = getattr(cast("Any", tensor)._spec, "shard_order", None) or ()  # noqa: SLF001
    if not last and any([*each.mesh_dims] != sorted(each.mesh_dims) for each in shown):
        return None
    return first + last


# FSDP1.


class FlatShards:
    """The shards of a parameter that is an interval of a flat parameter of FSDP1.

    Methods and attributes are those of `PlacedShards`.

    Args:
        flat: The flat parameter.
        ranks: The global ranks that have parts of it; empty: each rank has all of it.
        rank: The index of this rank in `ranks`.
        begin: Where the parameter begins in the flat parameter, in elements.
        shape, stride: The shape and stride of the parameter itself.
    """

    def __init__(
        self,
        flat: Any,
        ranks: list[int],
        rank: int,
        begin: int,
        shape: torch.Size,
        stride: tuple[int, ...],
    ) -> None:
        self._ranks, self._rank, self._begin = ranks, rank, begin
        # While FSDP1 has gathered the flat parameter, its data is whole, and this is the shard.
        shard: torch.Tensor = getattr(flat, "_local_shard", flat.data)
        self._shard = shard.detach()
        self._stride = stride
        self.meta = torch.empty(shape, dtype=flat.dtype, device="meta")
        self.straight = self.meta.stride() == stride
        self.how = f"FSDP1 over {len(ranks)}" if ranks else "FSDP1 without shards"

    @property
    def ranks(self) -> Any:
        return self._ranks

    def of_ranks(self, ranks: Any) -> None:
        self._ranks = ranks

    def parts(self, whole: torch.Tensor, leader: int) -> Iterator[tuple[int, torch.Tensor]]:
        in_order = self.meta.stride() == self._stride
        flat = whole.reshape(-1) if in_order else torch.empty_like(whole).reshape(-1)
        for index, rank in enumerate(self._ranks or [leader]):
            begin, end = self._interval(index)
            if begin < end:
                yield rank, flat[begin - self._begin : end - self._begin]
        if not in_order:
            whole.copy_(flat.as_strided(whole.shape, self._stride))

    def _interval(self, index: int) -> tuple[int, int]:
        """Return a rank's part of this parameter, as an interval of the flat parameter."""
        size = self._shard.numel()
        begin = max(self._begin, index * size)
        return begin, min(self._begin + self.meta.numel(), (index + 1) * size)

    def mine(self) -> torch.Tensor:
        begin, end = self._interval(self._rank)
        offset = self._rank * self._shard.numel()
        return self._shard[begin - offset : max(begin, end) - offset]


Shards: TypeAlias = PlacedShards | FlatShards


def _flat_of(module: nn.Module) -> Mapping[nn.Module, Mapping[str, FlatShards]]:
    """Return the parameters that FSDP1 has flattened: by submodule, shards by parameter name."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found: dict[nn.Module, dict[str, FlatShards]] = {}
    for part in module.modules():
        handle: Any = getattr(part, "_handle", None)
        if not isinstance(part, FullyShardedDataParallel) or handle is None:
            continue
        flat = handle.flat_param
        if any(extension is not None for extension in flat._param_extensions):  # noqa: SLF001
            raise StateError(
                "tensor parallelism inside of FullyShardedDataParallel cannot be gathered; shard "
                "the module with fully_shard()"
            )
        sharded = bool(handle.uses_sharded_strategy)
        group = handle.process_group
        ranks = dist.get_process_group_ranks(group) if sharded else []
        rank = dist.get_rank(group) if sharded else 0
        sizes = zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)  # noqa: SLF001
        begins, begin = list[int](), 0
        for size, padding in sizes:
            begins += [] if padding else [begin]
            begin += size
        about = zip(flat._param_infos, begins, flat._shapes, flat._strides, strict=True)  # noqa: SLF001
        for info, begin, shape, stride in about:
            shards = FlatShards(flat, ranks, rank, begin, shape, stride)
            found.setdefault(info.module, {})[info.param_name] = shards
        for tied in flat._shared_param_infos:  # noqa: SLF001
            first = found[tied.prim_module][tied.prim_param_name]
            found.setdefault(tied.module, {})[tied.param_name] = first
    return found


def _entries_of_flat(module: nn.Module) -> Iterator[Entry]:
    """Yield the entries of a module that has FSDP1 inside, without calling its `state_dict()`."""
    flat, extra = _flat_of(module), with_extra(module, "get_extra_state")
    parts = cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    for path, part in parts:
        prefix = _clean(f"{path}." if path else "")
        own = flat.get(part, {})
        for name, shards in own.items():
            _check_memory(prefix + name, shards.mine())
            yield Entry(prefix + name, shards, ("FSDP1", id(shards)))
        inside = vars(part)
        for name, tensor in inside["_parameters"].items():
            if tensor is not None and name not in own and not hasattr(tensor, "_param_infos"):
                yield _entry(prefix + name, tensor.detach(), id(tensor))
        for name, tensor in inside["_buffers"].items():
            if tensor is not None and name not in inside["_non_persistent_buffers_set"]:
                yield _entry(prefix + name, tensor.detach(), id(tensor), buffer=True)
        if (state := f"{path}.{EXTRA_STATE}".lstrip(".")) in extra:
            value: object = part.get_extra_state()
            if not isinstance(value, torch.Tensor):
                raise StateError(
                    f"{state}: extra state of type {type(value).__name__} cannot travel, only "
                    "tensors can; return a tensor from get_extra_state()"
                )
            yield _entry(prefix + EXTRA_STATE, value, None, buffer=True)
