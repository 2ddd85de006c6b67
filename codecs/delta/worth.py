"""What a patch would take, from a sample: nobody need scan two versions to learn that all differs.

A patch is a little more than the entropy of which elements change, and what they change to. Which
ones change is told apart by class where that is known (`encoding.py`), which saves a part of it,
and takes longer. So a version is there soonest as it is over the fastest links, by a patch with
classes over the slowest, and by one without in between.

What is told of patches with classes and without stands in pairs, without first, so that `classes`
is the index.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DTYPES
from ..layout import Layout
from .format import HEADER, PLAIN, Block, groups
from .kernels import Bytes

SAMPLES: Final = 64  # places that are looked at
SAMPLE_BYTES: Final = 2**14  # at each of them: a megabyte in all
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
    found, seen, elements = np.zeros(3), 0, 0
    for block in blocks[step // 2 :: step]:
        begin = block.begin + (block.elements // 3) * block.width
        end = min(begin + SAMPLE_BYTES // block.width * block.width, block.end)
        seen += end - begin
        elements += (end - begin) // block.width
        found += _found(block, base[begin:end], target[begin:end])
    bits, changed = found[:2], found[2]
    shares = bits / (8 * seen) if seen else bits
    sizes = [HEADER.size + math.ceil(share * layout.nbytes) for share in shares]
    return Estimate(sizes, 1.0 + CHANGED * float(changed) / max(1, elements))


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


def _found(block: Block, old: Bytes, new: Bytes) -> NDArray[np.float64]:
    """Return about how many bits the changes of some elements take, and how many change."""
    unit = f"<u{block.width}"
    before, after = old.view(unit), new.view(unit)
    count, at = before.size, np.flatnonzero(before != after)
    changed = at.size
    if not changed:
        return np.zeros(3)
    share = changed / count
    rest = 1.0 - share
    entropy = -share * math.log2(share) - (rest * math.log2(rest) if rest else 0.0)
    each, saved = 8.0 * block.width, 1.0
    if block.kind != PLAIN:
        steps = np.abs(after[at].astype(np.int64) - before[at].astype(np.int64))
        each, saved = STEP_BITS + 2.0 * float(np.log2(steps).mean()), SAVED
    positions = count * entropy * np.array((1.0, saved))
    return np.append(np.minimum(positions + changed * each, 8.0 * old.size), changed)
