"""`Part` is a target that receives only slices of the published tensors, such as one rank's."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from ...bus.worker.layouts import Boxes
from ...codecs.errors import LayoutError, StateError
from ...codecs.layout import NAME_SHOWN, Layout
from ...codecs.leaves import Leaf
from ...codecs.parts import Box
from ...codecs.words import printable

DimSlice = slice | tuple[int, int] | None  # the interval in one dimension; None: all of it
Slices = Mapping[str, DimSlice | Sequence[DimSlice]]


class Part:
    """A target for a part of each version: only this part is received and stored.

    Give it to `Subscriber` in place of the target, such as on a rank of a tensor-parallel engine:

        part = weightbus.Part(local, {"up.weight": slice(0, 512), "down.weight": (None, (0, 512))})
        weightbus.Subscriber(address, {"policy": part})

    A target whose tensors are `DTensor`s needs no `Part`: the worker finds the slices itself.

    Args:
        target: A target as for `Subscriber`. Each of its tensors has the shape of its slice.
        slices: Which slice of a published tensor to receive, by name: for each dimension a `slice`
            of step 1, a pair (begin, end), or None for all of it. You may leave out the last
            dimensions, if they are whole, and give a single `slice` or pair for the first. A
            module, TensorDict or mapping gets tensors without an entry whole; a function or a file
            gets only the named tensors.

    `Settings(resident=True)` has no effect on a part, which is copied. A worker that receives a
    part gets no patches, and cannot be verified from outside (`weightbus verify`). Its
    acknowledgement has the digest of the whole version.
    """

    __module__ = "weightbus"

    def __init__(self, target: object, slices: Slices) -> None:
        self.target = target
        self.slices = {name: _checked_slices(name, sides) for name, sides in slices.items()}

    def __repr__(self) -> str:
        return f"<Part of {len(self.slices)} tensors for a {type(self.target).__name__}>"


def _checked_slices(name: str, sides: DimSlice | Sequence[DimSlice]) -> tuple[DimSlice, ...]:
    """Return `sides` as a tuple, after the checks that need no shape."""
    is_pair = isinstance(sides, tuple) and len(sides) == 2 and all(type(x) is int for x in sides)
    given = (sides,) if sides is None or isinstance(sides, slice) or is_pair else (*sides,)
    for side in given:
        if side is None:
            continue
        if isinstance(side, slice):
            start, stop, step = cast("tuple[object, ...]", (side.start, side.stop, side.step))
            valid = step in (None, 1) and all(x is None or type(x) is int for x in (start, stop))
        else:
            valid = isinstance(side, tuple) and [type(x) for x in side] == [int, int]
        if not valid:
            raise ValueError(
                f"slices[{name!r}] has {side!r}; give a slice of step 1, a pair (begin, end), or "
                "None for each dimension"
            )
    return cast("tuple[DimSlice, ...]", given)


def boxes_of(
    slices: Mapping[str, tuple[DimSlice, ...]],
    names: Callable[[], Iterable[str]] | None,
    *,
    strict: bool,
) -> Boxes:
    """Return a function that returns, for a layout, the box of each tensor to receive.

    Args:
        slices: The slices by name, as `Part` has them.
        names: Returns the names of all tensors to receive; None: those of `slices`.
        strict: Whether the target must have every published tensor.

    The returned function raises a LayoutError if the slices do not fit the layout.
    """

    def boxes(layout: Layout) -> Mapping[str, Box | None]:
        wanted = {*slices} if names is None else {*names()}
        extra = sorted({*layout.names()} - wanted) if strict and names is not None else []
        if extra:
            shown = printable(extra[0], NAME_SHOWN)
            more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise LayoutError(f"{shown}{more}: published, not in the target")
        found = dict[str, Box | None]()
        for name in sorted(wanted):
            sides = slices.get(name)
            found[name] = None if sides is None else _box(layout, name, sides)
        return found

    return boxes


def _box(layout: Layout, name: str, sides: tuple[DimSlice, ...]) -> Box | None:
    """Return (begin, end) in each dimension; None if the layout does not have the tensor."""
    try:
        shape = layout.by_name(name).shape
    except KeyError:
        return None  # `PartLayout` refuses the name
    if len(sides) > len(shape):
        raise LayoutError(
            f"{printable(name, NAME_SHOWN)}: slices of {len(sides)} dimensions, published with "
            f"shape {list(shape)}"
        )
    box = list[tuple[int, int]]()
    for side, size in zip((*sides, *[None] * (len(shape) - len(sides))), shape, strict=True):
        if side is None:
            box.append((0, size))
        elif isinstance(side, slice):
            begin, end = side.start or 0, size if side.stop is None else side.stop
            box.append((begin + size * (begin < 0), end + size * (end < 0)))
        else:
            box.append(side)
    return tuple(box)


def local_part(target: object, leaves: Mapping[str, Leaf]) -> "Part | None":
    """Return this rank's part of a target with `DTensor`s; None if the target has no `DTensor`.

    Args:
        target: A module, TensorDict or mapping.
        leaves: The target's tensors by name.

    Raises:
        StateError: A tensor is not sharded into slices.
    """
    sharding = sys.modules.get("torch.distributed.tensor")  # without it, there are no DTensors
    if sharding is None or not any(isinstance(x, sharding.DTensor) for x in leaves.values()):
        return None
    from ..publishing.shards import PlacedShards, entries

    local, slices = dict[str, Leaf](), dict[str, Box]()
    for entry in entries(target):
        leaf = entry.tensor
        box = leaf.box() if isinstance(leaf, PlacedShards) else None
        if box is None and hasattr(leaf, "parts"):
            raise StateError(
                f"{entry.name}: the worker cannot find out which slice of it this rank has; give a "
                "weightbus.Part of the local tensors, with the slice of each"
            )
        local[entry.name] = leaf.mine() if isinstance(leaf, PlacedShards) else cast("Leaf", leaf)
        if box is not None:
            slices[entry.name] = box
    return Part(local, slices)
