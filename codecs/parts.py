"""Computes where the bytes of a part of a version (slices of some tensors) are in its data section.

Theory of operation: the slice of a tensor is a *box*, a begin and an end in each dimension. The
bytes of a box are a few *ranges* of the data section. A range consists of intervals of equal length
at equal distances:

    data section     ─────██████──────██████──────██████──────█──────
    range                 ├────┤ length                       ├ next
                          ├───────────┤ stride    times = 3
                          begin

The memory of a part has all ranges one after another. So each box is contiguous there: it is the
local tensor, row-major. The ranges of a part are in the order of the data section, and no range
begins before the end of the previous one. So the bytes of a chunk that belong to the part (the
chunk's *piece*) are contiguous in the memory of the part, too.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .dtypes import DTYPES
from .errors import LayoutError
from .layout import NAME_SHOWN, Layout, TensorSpec
from .words import printable

RANGES_PER_TENSOR_MAX: Final = 4096  # with more ranges, every chunk is slow to cut

Box = tuple[tuple[int, int], ...]  # begin and end in each dimension
Bytes = NDArray[np.uint8]


class Range(NamedTuple):
    """`times` intervals of `length` bytes, each `stride` bytes after the one before."""

    begin: int
    length: int
    stride: int
    times: int = 1

    @property
    def end(self) -> int:
        """The end of the last interval."""
        return self.begin + (self.times - 1) * self.stride + self.length

    @property
    def nbytes(self) -> int:
        """The bytes of all intervals."""
        return self.length * self.times


def ranges_of(spec: TensorSpec, box: Box) -> list[Range]:
    """Return the ranges of a box of a tensor, in the order of the data section.

    Raises:
        LayoutError: The box is not inside of the tensor, begins or ends within a byte, or has too
            many ranges.
    """
    _check(spec, box)
    if any(begin == end for begin, end in box):
        return []
    # From the last dimension outwards: the length of a run in bits, then (count, distance in bits)
    # of each level of repetition.
    bits = DTYPES[spec.dtype].bits
    distances = [prod(spec.shape[at + 1 :]) * bits for at in range(len(box))]
    length, levels = bits, list[tuple[int, int]]()
    for (begin, end), distance in zip(reversed(box), reversed(distances), strict=True):
        count, inner = end - begin, levels[-1] if levels else (1, length)
        if count > 1 and distance == prod(inner):
            if levels:
                levels[-1] = inner[0] * count, inner[1]
            else:
                length *= count
        elif count > 1:
            levels.append((count, distance))
    offset = sum(begin * distance for (begin, _), distance in zip(box, distances, strict=True))
    if any(each % 8 for each in (offset, length, *(distance for _, distance in levels))):
        raise LayoutError(f"{_shown(spec)}: the slice {_text(box)} begins or ends within a byte")
    times, stride = levels[0] if levels else (1, length)
    outer = levels[:0:-1]
    if prod(count for count, _ in outer) > RANGES_PER_TENSOR_MAX:
        raise LayoutError(f"{_shown(spec)}: the slice {_text(box)} is in too many pieces")
    places = product(*(range(0, count * distance, distance) for count, distance in outer))
    return [
        Range(spec.begin + (offset + sum(place)) // 8, length // 8, stride // 8, times)
        for place in places
    ]


def _simple(each: Range) -> Range:
    """Return a range with one interval if the intervals of the given range are adjacent."""
    if each.times == 1 or each.length == each.stride:
        return Range(each.begin, each.nbytes, each.nbytes)
    return each


def _check(spec: TensorSpec, box: Box) -> None:
    inside = len(box) == len(spec.shape) and all(
        0 <= begin <= end <= size for (begin, end), size in zip(box, spec.shape, strict=True)
    )
    if not inside:
        raise LayoutError(
            f"{_shown(spec)}: the slice {_text(box)} is not inside of the published shape "
            f"{list(spec.shape)}"
        )


def _shown(spec: TensorSpec) -> str:
    return printable(spec.name, NAME_SHOWN)


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"


def clipped(ranges: Iterable[Range], begin: int, end: int) -> Iterator[Range]:
    """Yield the parts of ranges between the offsets `begin` and `end`, relative to `begin`."""
    for each in ranges:
        stride = each.stride
        # the intervals that overlap with [begin, end)
        first = max(0, -((each.begin + each.length - 1 - begin) // stride))
        last = min(each.times, -((each.begin - end) // stride))
        if first >= last:
            continue
        at = each.begin + first * stride - begin
        if at < 0:  # cut at the begin
            length = min(at + each.length, end - begin)
            yield Range(0, length, length)
            first, at = first + 1, at + stride
        if first >= last:
            continue
        over = begin + at + (last - 1 - first) * stride + each.length - end
        whole = last - first - (over > 0)
        if whole:
            yield _simple(Range(at, each.length, stride, whole))
        if over > 0:
            length = each.length - over
            yield Range(at + whole * stride, length, length)


def size_of(ranges: Iterable[Range]) -> int:
    """Return the bytes of ranges."""
    return sum(each.nbytes for each in ranges)


def _view(data: Bytes, each: Range) -> Bytes:
    """Return a view of a range's bytes with one row for each interval."""
    part = data[each.begin : each.end]
    return as_strided(part, (each.times, each.length), (each.stride, 1))


def gather(data: Bytes, ranges: Iterable[Range], into: Bytes) -> None:
    """Copy the bytes of ranges in `data` to `into`, one after another."""
    at = 0
    for each in ranges:
        place = into[at : at + each.nbytes]
        place.reshape(each.times, each.length)[:] = _view(data, each)
        at += each.nbytes


def scatter(piece: Bytes, ranges: Iterable[Range], into: Bytes) -> None:
    """Copy the bytes of `piece`, one after another, to the ranges in `into`."""
    at = 0
    for each in ranges:
        rows = piece[at : at + each.nbytes].reshape(each.times, each.length)
        _view(into, each)[:] = rows
        at += each.nbytes


def blank(data: Bytes, ranges: Iterable[Range]) -> None:
    """Set the bytes of ranges to zero."""
    for each in ranges:
        _view(data, each)[:] = 0


class PartLayout:
    """The part that a worker receives of versions with one layout.

    Args:
        whole: The layout of the versions.
        boxes: The box of each tensor of the part, by the tensor's name or alias; None: all of it.

    Attributes:
        layout: The layout of the part: the same names, with the shapes of the boxes.
        ranges: The ranges of the part.
        nbytes: Bytes of the part.

    Raises:
        LayoutError: The layout has no such tensor, or a box does not fit.
    """

    def __init__(self, whole: Layout, boxes: Mapping[str, Box | None]) -> None:
        taken = _boxes(whole, boxes)
        shapes = {name: tuple(end - begin for begin, end in box) for name, box in taken.items()}
        ranges = [
            each
            for spec in whole.tensors
            if spec.name in taken
            for each in ranges_of(spec, taken[spec.name])
        ]
        self.layout = whole.cut(shapes, {a: k for a, k in whole.aliases.items() if a in boxes})
        self.ranges = _joined(ranges)
        self.nbytes = self.layout.nbytes
        self._ends = [each.end for each in self.ranges]

    def within(self, begin: int, end: int) -> list[Range]:
        """Return the part's ranges between two offsets of the data section, relative to `begin`."""
        at = bisect_left(self._ends, begin + 1)
        until = at
        while until < len(self.ranges) and self.ranges[until].begin < end:
            until += 1
        return [*clipped(self.ranges[at:until], begin, end)]


def _boxes(whole: Layout, boxes: Mapping[str, Box | None]) -> dict[str, Box]:
    """Return the box of each tensor by the tensor's name; its aliases must have the same box."""
    taken = dict[str, Box]()
    for name, box in boxes.items():
        try:
            spec = whole.by_name(name)
        except KeyError:
            shown = printable(name, NAME_SHOWN)
            raise LayoutError(f"{shown}: in the part of this worker, not published") from None
        given = tuple((0, size) for size in spec.shape) if box is None else box
        if taken.setdefault(spec.name, given) != given:
            raise LayoutError(
                f"{_shown(spec)}: {_text(given)} and {_text(taken[spec.name])} of one published "
                "tensor are in the part; name one slice that has both"
            )
    return taken


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Join adjacent ranges that have one interval each."""
    joined = list[Range]()
    for each in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.times == each.times == 1 and last.end == each.begin:
            length = last.length + each.length
            joined[-1] = Range(last.begin, length, length)
        else:
            joined.append(each)
    return joined
