"""Computes the positions of a strided view's elements in a tensor, and the box that contains them.

A chain of slices, transpositions and reshapes is one `Region` of the tensor: an offset, and loops
with strides. `None` in place of a region or a box means that no such loops describe the elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Box = tuple[tuple[int, int], ...]  # (begin, end) for each dimension of a tensor
Loop = tuple[int, int]  # (count, stride)


@dataclass(frozen=True, slots=True)
class Region:
    """The positions of elements in a contiguous tensor, in the order of the elements.

    Attributes:
        offset: The position of the first element.
        loops: Count and stride of each loop over the elements, the outermost first.
    """

    offset: int
    loops: tuple[Loop, ...]

    def within(self, outer: "Region") -> "Region | None":
        """Return the region in a tensor, if this region is in a contiguous copy of `outer`."""
        found = _steps(self, tuple(count for count, _ in outer.loops))
        if found is None:
            return None
        first, steps = found
        strides = [stride for _, stride in outer.loops]
        offset = outer.offset + sum(a * b for a, b in zip(first, strides, strict=True))
        return Region(offset, tuple((n, step and step * strides[dim]) for dim, n, step in steps))

    def box(self, shape: tuple[int, ...]) -> Box | None:
        """Return the smallest box, in a tensor of this shape, that contains the elements."""
        found = _steps(self, shape)
        if found is None:
            return None
        first, steps = found
        last = [*first]
        for dim, n, step in steps:
            if step:
                last[dim] += (n - 1) * step
        return tuple((begin, end + 1) for begin, end in zip(first, last, strict=True))

    def in_box(self, shape: tuple[int, ...], box: Box) -> "Region | None":
        """Return the region in a contiguous copy of a box; None if the box lacks elements."""
        found, needed = _steps(self, shape), self.box(shape)
        if found is None or needed is None or not contains(box, needed):
            return None
        first, steps = found
        strides = contiguous([end - begin for begin, end in box])
        begins = [begin for begin, _ in box]
        offset = sum((a - b) * s for a, b, s in zip(first, begins, strides, strict=True))
        return Region(offset, tuple((n, step and step * strides[dim]) for dim, n, step in steps))


def contiguous(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape."""
    strides, unit = list[int](), 1
    for size in reversed(shape):
        strides.append(unit)
        unit *= size
    return strides[::-1]


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def contains(outer: Box, inner: Box) -> bool:
    """Return whether the box `outer` contains the box `inner`."""
    pairs = zip(outer, inner, strict=True)
    return all(a[0] <= b[0] and b[1] <= a[1] for a, b in pairs)


def joined(one: Box, other: Box) -> Box:
    """Return the smallest box that contains both boxes."""
    pairs = zip(one, other, strict=True)
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in pairs)


Steps = list[tuple[int, int, int]]  # (dimension, count, step) of loops within one dimension


@lru_cache(4096)  # layers, and experts, have the same regions
def _steps(region: Region, shape: tuple[int, ...]) -> tuple[list[int], Steps] | None:
    """Return the first element's indices in a tensor of this shape, and the loops' steps in it.

    None: a loop crosses the end of a dimension in the middle of its steps.
    """
    first, rest = list[int](), region.offset
    for size in reversed(shape):
        first.insert(0, rest % max(size, 1))
        rest //= max(size, 1)
    last, every = [*first], Steps()
    for count, stride in region.loops:
        steps = _split(count, stride, shape)
        if steps is None:
            return None
        for dim, n, step in steps:
            if step:
                last[dim] += (n - 1) * step
        every += steps
    if any(index >= size for index, size in zip(last, shape, strict=True)):
        return None
    return first, every


def _split(count: int, stride: int, shape: Sequence[int]) -> Steps | None:
    """Split a loop into loops that each stay in one dimension; the outermost first."""
    if count == 1:
        return []
    if stride == 0:
        return [(0, count, 0)]
    found, step = Steps(), stride  # the step in elements of the dimension
    for dim in reversed(range(len(shape))):
        size = shape[dim]
        if step >= size:  # the loop does not move in this dimension
            if step % size:
                return None
            step //= size
        elif (count - 1) * step < size:
            return [(dim, count, step), *reversed(found)]
        else:  # the loop goes through this whole dimension, and continues in the next outer one
            if size % step or count % (size // step):
                return None
            found.append((dim, size // step, step))
            count, step = count // (size // step), 1
    return None
