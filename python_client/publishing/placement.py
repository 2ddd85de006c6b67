"""Which rank of a sharded trainer sends which chunk of a version.

Each byte of the data section is on one rank, which follows from how the tensors are sharded. A
chunk is sent by one rank: the one that has most of its bytes. The others give it theirs
(`Foreign`). So workers see only whole chunks, each with its checksum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...bus.chunks import ChunkPlan
from ...bus.protocol_limits import SOURCE_RANGES_MAX
from .ranks import hash_of

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Foreign:
    """Intervals of the data section that one rank has, and another one sends.

    Attributes:
        begins, ends: The first byte of each, and the one after its last; ascending.
        has, sends: The index of the rank that has the bytes, and of the one that needs them.
    """

    begins: Integers
    ends: Integers
    has: Integers
    sends: Integers

    def between(self, has: int, sends: int) -> list[tuple[int, int]]:
        """Return (begin, end) of the intervals that one rank gives another one."""
        some = (self.has == has) & (self.sends == sends)
        return list(zip(self.begins[some].tolist(), self.ends[some].tolist(), strict=True))

    def batches(self, nbytes: int) -> "list[Foreign]":
        """Return the same in parts of at most about `nbytes` bytes in all."""
        sums = np.cumsum(self.ends - self.begins)
        cuts = np.searchsorted(sums, np.arange(nbytes, sums[-1] if len(sums) else 0, nbytes))
        arrays = (np.split(a, cuts) for a in (self.begins, self.ends, self.has, self.sends))
        return [Foreign(*part) for part in zip(*arrays, strict=True) if len(part[0])]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the chunks of a version are.

    Attributes:
        owners: For each chunk, the index of the rank that sends it.
        foreign: The bytes that change ranks before that.
    """

    owners: Integers
    foreign: Foreign

    def hash(self) -> str:
        """Return a hash that is another if anything of this is."""
        foreign = self.foreign
        parts = self.owners, foreign.begins, foreign.ends, foreign.has, foreign.sends
        return hash_of(b"".join(part.tobytes() for part in parts))

    def of(self, rank: int) -> list[int]:
        """Return the chunks that a rank sends."""
        return np.flatnonzero(self.owners == rank).tolist()

    def ranges(self, rank: int) -> list[int]:
        """Return first and count of each range of chunks that a rank sends, in turn."""
        here = np.flatnonzero(np.diff(np.concatenate(([0], self.owners == rank, [0]))))
        first, last = here[::2], here[1::2]
        return np.stack((first, last - first), 1).ravel().tolist()


def uncovered(intervals: Sequence[tuple[int, int, int]], begin: int, end: int) -> str:
    """Return what is wrong with the intervals of a tensor, from `begin` to `end`; empty: nothing.

    Args:
        intervals: Begin, end and index of the rank; in any order.
        begin, end: The first byte of the tensor, and the one after its last.
    """
    at, before = begin, -1
    for first, last, rank in sorted(intervals):
        if first < at:
            return f"its bytes from {first - begin} on are on ranks {before} and {rank}"
        if first > at:
            break
        at, before = last, rank
    if at < end:
        return f"its bytes from {at - begin} on are on no rank"
    return f"rank {before} has {at - end} bytes beyond it" if at > end else ""


def placement_of(
    intervals: Sequence[tuple[int, int, int]],
    plan: ChunkPlan,
    ranks: int,
    ranges_max: int = SOURCE_RANGES_MAX // 2,
) -> Placement:
    """Return the placement of a version's chunks.

    Args:
        intervals: Begin, end and index of the rank for each part of the data section, which they
            cover without gap or overlap; in any order.
        plan: The chunks.
        ranks: How many ranks there are.
        ranges_max: The most ranges of chunks that all ranks have together. If there are more,
            neighbours are sent by one rank.
    """
    table = np.array(sorted(i for i in intervals if i[0] < i[1]), np.int64).reshape(-1, 3)
    begins, ends, has = table.T
    # Cut the intervals where chunks begin.
    size = plan.chunk_bytes
    first = begins // size
    counts = (ends - 1) // size - first + 1
    which = np.repeat(np.arange(len(table)), counts)
    chunk = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(begins[which], chunk * size)
    ends = np.minimum(ends[which], (chunk + 1) * size)
    has = has[which]
    covered = np.zeros((plan.count, ranks), np.int64)
    np.add.at(covered, (chunk, has), ends - begins)
    unit, owners = 1, np.zeros(0, np.int64)
    while plan.count:
        most = np.add.reduceat(covered, np.arange(0, plan.count, unit)).argmax(1)
        owners = np.repeat(most, unit)[: plan.count]
        if np.count_nonzero(np.diff(owners)) < ranges_max:
            break
        unit *= 2
    sends = owners[chunk]
    moves = has != sends
    return Placement(owners, Foreign(begins[moves], ends[moves], has[moves], sends[moves]))
