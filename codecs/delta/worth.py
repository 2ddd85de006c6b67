"""Estimates from a sample whether a patch arrives sooner than the whole version.

A patch is a little larger than two entropies together: that of the changed positions, and that of
the changes. Coding by class (`encoding.py`) saves a part of the positions' entropy, but takes
longer. So the first to arrive is the whole version over the fastest links, a patch with classes
over the slowest, and a patch without classes over those in between.

Values for both kinds of patches are pairs (without classes, with classes), so that the bool
`classes` is an index.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DTYPES
from ..layout import Layout
from ..numpy_tensors import Bytes
from .format import HEADER, PLAIN, Block, groups

SAMPLES: Final = 64  # least number of sampled blocks, if the version has as many
SAMPLE_BYTES: Final = 2**18  # bytes of all samples together
STEPS: Final = 2**12  # steps whose sizes are sampled
TINY: Final = 2.0**-64  # replaces a share of 0, whose logarithm is multiplied by 0
STEP_BITS: Final = 2.0  # bits of a step of size 1 with its sign; others take 2 * log2(size) more
REMAINING: Final = 0.7  # fraction of the positions' entropy that remains with classes
SAMPLE_BLOCKS: Final = 2  # blocks for measuring the encoding: a megabyte of 16-bit elements
CHANGED: Final = 40.0  # extra work for a changed element, relative to an unchanged one
WORTH: Final = 1.1  # a patch must save this many times the time that its coding takes

Pair = Sequence[float]


class Estimate(NamedTuple):
    """The estimated cost of patches.

    Attributes:
        sizes: Bytes of a patch without classes, and of a patch with classes.
        work: The time to make or decode a patch, as a multiple of the time for a version without
            changes.
    """

    sizes: Pair
    work: float


class Way(NamedTuple):
    """A kind of patch: whether it has classes; and its `work` (0: unknown)."""

    classes: bool
    work: float = 0.0


def chosen(nbytes: int, costs: Estimate, rate: float, encode: Pair, decode: Pair) -> Way | None:
    """Return the kind of patch that arrives first; None if the whole version arrives first.

    Args:
        nbytes: Bytes of the version.
        costs: The estimated cost of patches.
        rate: The rate of the link, in bytes per second.
        encode: As a pair, the seconds per byte to encode a version without changes.
        decode: As a pair, the seconds per byte to decode its patch at the worker.
    """
    coding = [(e + d) * nbytes * costs.work for e, d in zip(encode, decode, strict=True)]
    seconds = [cost + size / rate for cost, size in zip(coding, costs.sizes, strict=True)]
    classes = seconds[True] < seconds[False]
    saved = (nbytes - costs.sizes[classes]) / rate
    return Way(classes, costs.work) if saved > WORTH * coding[classes] else None


def may_pay(rate: float, encode: Pair, decode: Pair) -> bool:
    """Return whether a patch of a version without changes would arrive first on a link."""
    return chosen(1, Estimate((0.0, 0.0), 1.0), rate, encode, decode) is not None


def estimate(layout: Layout, base: Bytes, target: Bytes) -> Estimate:
    """Estimate the cost of patches from one data section to another."""
    blocks = [block for each in groups(layout) for block in each]
    return estimated(layout.nbytes, [sums(blocks, base, target)])


def sums(blocks: Sequence[Block], base: Bytes, target: Bytes) -> list[float]:
    """Return what `estimated` needs to know of some blocks of two data sections.

    These are five sums over a sample: bits of a patch without classes, bits of a patch with
    classes, changed elements, elements, bytes.
    """
    step = max(1, len(blocks) // SAMPLES)
    blocks = blocks[step // 2 :: step]
    places = defaultdict[tuple[int, int], list[slice]](list)
    for block in blocks:
        begin = block.begin + (block.elements // 3) * block.width
        elements = max(1, SAMPLE_BYTES // len(blocks) // block.width)
        end = min(begin + elements * block.width, block.end)
        places[block.width, block.kind].append(slice(begin, end))
    found = [_found(*of, some, base, target) for of, some in places.items()]
    return [float(each) for each in np.sum(found or [np.zeros(5)], axis=0)]


def estimated(nbytes: int, found: Iterable[Sequence[float]]) -> Estimate:
    """Return the cost of patches to a version of `nbytes` bytes, from `sums` of its parts."""
    flat, classes, changed, elements, seen = map(sum, zip(*found, strict=True))
    sizes = [HEADER.size + math.ceil(b / 8 / max(1, seen) * nbytes) for b in (flat, classes)]
    return Estimate(sizes, 1.0 + CHANGED * changed / max(1, elements))


def sample(layout: Layout, among: Iterable[Sequence[Block]] | None = None) -> tuple[Layout, slice]:
    """Return a layout of some blocks of the largest group, and their slice of the data section.

    The time to encode a patch of this sample predicts the time for the whole version. All blocks
    are of one group, since a group shares a table. `among`: the groups to choose from, each with
    adjacent blocks; None: all groups.
    """
    found = groups(layout) if among is None else among
    group = max(found, key=lambda blocks: blocks[-1].end - blocks[0].begin)
    group = group[:SAMPLE_BLOCKS]
    begin, end = group[0].begin, group[-1].end
    dtype = next(spec.dtype for spec in layout.tensors if spec.begin <= begin < spec.end)
    bits = DTYPES[dtype].bits
    if bits % 8:  # a patch treats them as bytes
        dtype, bits = "U8", 8
    count = 8 * (end - begin) // bits
    return Layout.plan([("sample", dtype, (count,))]), slice(begin, end)


def _found(
    width: int, kind: int, places: list[slice], old: Bytes, new: Bytes
) -> NDArray[np.float64]:
    """Return the five sums of `sums` over some slices with elements of one width and kind."""
    before, after = (
        np.concatenate([data[each] for each in places]).view(f"<u{width}") for data in (old, new)
    )
    counts = np.array([each.stop - each.start for each in places]) // width
    differs = before != after
    changed = np.add.reduceat(differs, np.cumsum(counts) - counts, dtype=np.int64)
    share = changed / counts
    entropy = sum(-each * np.log2(np.maximum(each, TINY)) for each in (share, 1.0 - share))
    each, remaining = 8.0 * width, 1.0
    if kind != PLAIN:
        each, remaining = STEP_BITS + 2.0 * _mean_log2(before[differs], after[differs]), REMAINING
    bits = [
        np.minimum(part * counts * entropy + each * changed, 8.0 * width * counts).sum()
        for part in (1.0, remaining)
    ]
    return np.array([*bits, changed.sum(), counts.sum(), before.nbytes])


def _mean_log2(old: NDArray[Any], new: NDArray[Any]) -> float:
    """Return roughly the mean binary logarithm of some steps, none of which is 0."""
    every = max(1, old.size // STEPS)
    steps = np.abs(new[::every].astype(np.int64) - old[::every].astype(np.int64))
    return float(np.log2(steps).mean()) if steps.size else 0.0
