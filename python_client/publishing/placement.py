"""Computes which rank of a sharded trainer sends which chunk of a version.

Each byte of the data section is on one rank, depending on how the tensors are sharded. Each chunk
is sent by one rank: the rank that has most of its bytes. Other ranks that have bytes of the chunk
first send them to this rank (`Foreign`). So workers see only whole chunks, each with its checksum.

A patch has *blocks* (docs/DELTA.md), whose boundaries differ from those of chunks. In the same way,
each block is encoded by one rank: the rank that sends most of its bytes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...bus.chunks import ChunkPlan
from ...bus.protocol_limits import SOURCE_RANGES_MAX

Integers = NDArray[np.int64]
Intervals = Sequence[tuple[int, int, int]]  # begin, end and rank index of each interval


def hash_of(text: str | bytes) -> str:
    """Return a hash of a text, for ranks to compare texts."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Foreign:
    """Intervals of the data section that one rank has, and another rank sends to workers.

    Attributes:
        begins, ends: The first byte of each interval, and the byte after its last; ascending.
        has, sends: The index of the rank that has the interval, and of the rank that sends it.
    """

    begins: Integers
    ends: Integers
    has: Integers
    sends: Integers

    def between(self, has: int, sends: int) -> list[tuple[int, int]]:
        """Return (begin, end) of the intervals that rank `has` must give to rank `sends`."""
        some = (self.has == has) & (self.sends == sends)
        return list(zip(self.begins[some].tolist(), self.ends[some].tolist(), strict=True))

    def batches(self, nbytes: int) -> "list[Foreign]":
        """Split the intervals into batches of about `nbytes` bytes in all."""
        sums = np.cumsum(self.ends - self.begins)
        cuts = np.searchsorted(sums, np.arange(nbytes, sums[-1] if len(sums) else 0, nbytes))
        arrays = (np.split(a, cuts) for a in (self.begins, self.ends, self.has, self.sends))
        return [Foreign(*part) for part in zip(*arrays, strict=True) if len(part[0])]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank sends each chunk of a version, or encodes each block of a patch.

    Attributes:
        owners: For each chunk (or block), the index of the rank that sends (or encodes) it.
        foreign: The bytes that other ranks first give to the owners.
    """

    owners: Integers
    foreign: Foreign

    def hash(self) -> str:
        """Return a hash of the whole placement, for ranks to compare placements."""
        foreign = self.foreign
        parts = self.owners, foreign.begins, foreign.ends, foreign.has, foreign.sends
        return hash_of(b"".join(part.tobytes() for part in parts))

    def of(self, rank: int) -> list[int]:
        """Return the indexes of the chunks (or blocks) of a rank."""
        return np.flatnonzero(self.owners == rank).tolist()

    def ranges(self, rank: int) -> list[int]:
        """Return first, count, first, count, ... of the ranges of chunks that a rank sends."""
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self.owners == rank, [0]))))
        first, end = edges[::2], edges[1::2]
        return np.stack((first, end - first), 1).ravel().tolist()


def uncovered(intervals: Intervals, begin: int, end: int) -> str:
    """Return how the intervals overlap, leave a gap, or end too late; empty if they do not.

    Args:
        intervals: The intervals of a tensor, in any order.
        begin, end: The first byte of the tensor, and the byte after its last.
    """
    at, before = begin, -1
    for first, after, rank in sorted(intervals):
        if first < at:
            return f"its bytes from {first - begin} on are on ranks {before} and {rank}"
        if first > at:
            break
        at, before = after, rank
    if at < end:
        return f"its bytes from {at - begin} on are on no rank"
    return f"rank {before} has {at - end} bytes beyond it" if at > end else ""


def placement_of(
    intervals: Intervals, plan: ChunkPlan, ranks: int, ranges_max: int = SOURCE_RANGES_MAX // 2
) -> Placement:
    """Return the placement of a version's chunks.

    Args:
        intervals: Which rank has which part of the data section; in any order. They cover the
            section without gap or overlap.
        plan: The chunks.
        ranks: How many ranks there are.
        ranges_max: The most ranges of chunks that all ranks may have together. If there were more,
            groups of neighbouring chunks get the same rank.
    """
    begins = np.arange(plan.count, dtype=np.int64) * plan.chunk_bytes
    return _placement(intervals, begins, plan.nbytes, ranks, ranges_max)


def placement_of_blocks(
    chunks: Placement, plan: ChunkPlan, begins: Sequence[int], ranks: int
) -> Placement:
    """Return the placement of a patch's blocks, once each rank has the chunks that it sends.

    Args:
        chunks: The placement of the chunks.
        plan: The chunks.
        begins: The first byte of each block; blocks lie side by side, the first at byte 0.
        ranks: How many ranks there are.
    """
    spans = map(plan.span, range(plan.count))
    owners = chunks.owners.tolist()
    sent = [(begin, end, rank) for (begin, end), rank in zip(spans, owners, strict=True)]
    return _placement(sent, np.array(begins, np.int64), plan.nbytes, ranks, len(begins) + 1)


def _placement(
    intervals: Intervals, starts: Integers, nbytes: int, ranks: int, ranges_max: int
) -> Placement:
    """Return the placement of the units (chunks or blocks) that begin at the bytes `starts`."""
    table = np.array(sorted(i for i in intervals if i[0] < i[1]), np.int64).reshape(-1, 3)
    begins, ends, has = table.T
    # Cut the intervals where units begin: each piece is `which` interval's part of a `unit`.
    first = np.searchsorted(starts, begins, "right") - 1
    counts = np.searchsorted(starts, ends - 1, "right") - first
    which = np.repeat(np.arange(len(table)), counts)
    unit = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(begins[which], starts[unit])
    ends = np.minimum(ends[which], np.append(starts[1:], nbytes)[unit])
    has = has[which]
    covered = np.zeros((len(starts), ranks), np.int64)
    np.add.at(covered, (unit, has), ends - begins)
    step, owners = 1, np.zeros(0, np.int64)
    while len(starts):
        most = np.add.reduceat(covered, np.arange(0, len(starts), step)).argmax(1)
        owners = np.repeat(most, step)[: len(starts)]
        if np.count_nonzero(np.diff(owners)) < ranges_max:
            break
        step *= 2
    sends = owners[unit]
    moves = has != sends
    return Placement(owners, Foreign(begins[moves], ends[moves], has[moves], sends[moves]))
