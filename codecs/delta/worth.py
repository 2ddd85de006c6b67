"""What a patch would take, from a sample: nobody need scan two versions to learn that all differs.

A patch is a little more than the entropy of which elements change, and what they change to. Which
ones change is told apart by class where that is known (`encoding.py`), which saves a part of it,
and takes longer. So a version is there soonest as it is over the fastest links, by a patch with
classes over the slowest, and by one without in between.

What is told of patches with classes and without stands in pairs, without first, so that `classes`
is the index.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DTYPES
from ..layout import Layout
from ..numpy_tensors import Bytes
from .format import HEADER, PLAIN, groups

SAMPLES: Final = 64  # places that are looked at, at least if there are as many blocks
SAMPLE_BYTES: Final = 2**18  # at all of them
STEPS: Final = 2**12  # whose size is looked at
TINY: Final = 2.0**-64  # in place of no share at all, whose logarithm times 0 is 0
STEP_BITS: Final = 2.0  # of a step of one unit, sign included; of others twice their logarithm more
SAVED: Final = 0.7  # what is left of the entropy of positions where they are told apart by class
SAMPLE_BLOCKS: Final = 2  # of which the pace of encoding is taken: a megabyte of 16 bits
CHANGED: Final = 40.0  # times that an element takes if it changes, on top of what each one takes
WORTH: Final = 1.1  # a patch must save so much more than it takes: what is known of links is rough

Pair = Sequence[float]


class Estimate(NamedTuple):
    """What patches would take.

    Attributes:
        sizes: Bytes of either kind.
        work: What it takes to make or decode one, over what it would take if nothing had changed.
    """

    sizes: Pair
    work: float


class Way(NamedTuple):
    """How a patch is made: with classes or without, and the `work` of it; 0: that is not known."""

    classes: bool
    work: float = 0.0


def chosen(nbytes: int, would: Estimate, rate: float, encode: Pair, decode: Pair) -> Way | None:
    """Return which patch is there soonest; None: the version is, as it is.

    Args:
        nbytes: Of the version.
        would: What patches would take.
        rate: Bytes a second that the link carries.
        encode: Seconds for each byte of a version of which nothing changes, at the publisher.
        decode: The same, at the worker.
    """
    costs = [(e + d) * nbytes * would.work for e, d in zip(encode, decode, strict=True)]
    seconds = [cost + size / rate for cost, size in zip(costs, would.sizes, strict=True)]
    classes = seconds[True] < seconds[False]
    saved = (nbytes - would.sizes[classes]) / rate
    return Way(classes, would.work) if saved > WORTH * costs[classes] else None


def may_pay(rate: float, encode: Pair, decode: Pair) -> bool:
    """Return whether a patch could pay on a link, if nothing had changed."""
    return chosen(1, Estimate((0.0, 0.0), 1.0), rate, encode, decode) is not None


def estimate(layout: Layout, base: Bytes, target: Bytes) -> Estimate:
    """Return about what patches from one data section to another would take."""
    blocks = [block for each in groups(layout) for block in each]
    step = max(1, len(blocks) // SAMPLES)
    blocks = blocks[step // 2 :: step]
    places = defaultdict[tuple[int, int], list[slice]](list)
    for block in blocks:
        begin = block.begin + (block.elements // 3) * block.width
        elements = max(1, SAMPLE_BYTES // len(blocks) // block.width)
        end = min(begin + elements * block.width, block.end)
        places[block.width, block.kind].append(slice(begin, end))
    found = [_found(*of, some, base, target) for of, some in places.items()]
    flat, classes, changed, elements, seen = np.sum(found or [np.zeros(5)], axis=0).tolist()
    sizes = [HEADER.size + math.ceil(b / 8 / max(1, seen) * layout.nbytes) for b in (flat, classes)]
    return Estimate(sizes, 1.0 + CHANGED * changed / max(1, elements))


def sample(layout: Layout) -> tuple[Layout, slice]:
    """Return a layout of some blocks of the largest group alone, and where they are.

    How long its patch takes to encode says how long all of it does: a group shares one table.
    """
    group = max(groups(layout), key=lambda blocks: blocks[-1].end - blocks[0].begin)
    group = group[:SAMPLE_BLOCKS]
    begin, end = group[0].begin, group[-1].end
    dtype = next(spec.dtype for spec in layout.tensors if spec.begin <= begin < spec.end)
    bits = DTYPES[dtype].bits
    if bits % 8:  # they are bytes to a patch
        dtype, bits = "U8", 8
    count = 8 * (end - begin) // bits
    return Layout.plan([("sample", dtype, (count,))]), slice(begin, end)


def _found(
    width: int, kind: int, places: list[slice], old: Bytes, new: Bytes
) -> NDArray[np.float64]:
    """Return about how many bits the changes of some elements take, in places of one dtype.

    Without classes and with them; then how many elements change, how many there are, and bytes.
    """
    before, after = (
        np.concatenate([data[each] for each in places]).view(f"<u{width}") for data in (old, new)
    )
    counts = np.array([each.stop - each.start for each in places]) // width
    differs = before != after
    changed = np.add.reduceat(differs, np.cumsum(counts) - counts, dtype=np.int64)
    share = changed / counts
    entropy = sum(-each * np.log2(np.maximum(each, TINY)) for each in (share, 1.0 - share))
    each, saved = 8.0 * width, 1.0
    if kind != PLAIN:
        each, saved = STEP_BITS + 2.0 * _mean_log2(before[differs], after[differs]), SAVED
    bits = [
        np.minimum(part * counts * entropy + each * changed, 8.0 * width * counts).sum()
        for part in (1.0, saved)
    ]
    return np.array([*bits, changed.sum(), counts.sum(), before.nbytes])


def _mean_log2(old: NDArray[Any], new: NDArray[Any]) -> float:
    """Return about the mean logarithm of some steps; none is 0."""
    every = max(1, old.size // STEPS)
    steps = np.abs(new[::every].astype(np.int64) - old[::every].astype(np.int64))
    return float(np.log2(steps).mean()) if steps.size else 0.0
