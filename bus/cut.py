"""Cuts the chunks of a version to the bytes that one worker needs. (docs/protocol/parts.md)

A worker may need only a *part* of a model: slices of its tensors. The bytes of a chunk that belong
to the part are the chunk's *piece*, and are contiguous in the memory of the part. The publisher
sends the piece alone, with the checksum of the chunk's other bytes. From both, the worker computes
the checksum of the whole chunk. This works since CRC-32C is linear: the checksum of a chunk is the
XOR of three checksums: of the chunk with zeros in place of the other bytes, of the chunk with zeros
in place of the piece, and of zeros alone.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..codecs.native import crc32c
from ..codecs.parts import PartLayout, Range, blank, clipped, gather, scatter, size_of
from .chunks import ChunkPlan, Memory
from .headers import Buffer
from .protocol_limits import RANGES_MAX

NUMBERS = 4  # numbers of a range: begin, length, stride, times
INTERVALS_MAX = 2**16  # of one piece; to cut more takes longer than to send the whole chunk


class Cut:
    """Cuts the chunks of versions with one layout for a worker that receives a part.

    Args:
        part: The part.
        plan: The chunks of the versions.

    Attributes:
        layout: The layout of the part.
        nbytes: Bytes of the part.
        unneeded: The indexes of the chunks without bytes of the part.
    """

    def __init__(self, part: PartLayout, plan: ChunkPlan) -> None:
        self.layout, self.nbytes = part.layout, part.nbytes
        self._part, self._plan = part, plan
        sizes = [size_of(part.within(*plan.span(index))) for index in range(plan.count)]
        self._starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).tolist()
        self.unneeded = frozenset(index for index, size in enumerate(sizes) if not size)

    def put(self, memory: Memory, index: int, chunk: Memory) -> None:
        """Copy a chunk's piece to its offset in the memory of the part."""
        begin, end = self._starts[index : index + 2]
        gather(chunk, self._part.within(*self._plan.span(index)), memory[begin:end])

    def put_piece(
        self, memory: Memory, index: int, payload: Buffer, crc: int, rest: int
    ) -> int | None:
        """Copy a piece to its offset; return its chunk's CRC-32C. Damaged: return None. (T3)"""
        begin, end = self._starts[index : index + 2]
        if len(payload) != end - begin or crc32c(payload) != crc:
            return None
        piece = np.frombuffer(payload, np.uint8)
        low, high = self._plan.span(index)
        chunk = np.zeros(high - low, np.uint8)
        scatter(piece, self._part.within(low, high), chunk)
        np.copyto(memory[begin:end], piece)
        return crc32c(chunk.data) ^ rest ^ _crc_of_zeros(high - low)

    def requests(self, first: int, count: int) -> list[tuple[int, int, list[int]]]:
        """Return the fetches for some chunks: (first, count, `ranges`) of each message.

        A chunk is fetched whole if all of its bytes are needed, or too many ranges of them.
        """
        found = list[tuple[int, int, list[int]]]()
        for index in range(first, first + count):
            begin, end = self._plan.span(index)
            ranges = self._part.within(begin, end)
            whole = size_of(ranges) == end - begin or len(ranges) * NUMBERS > RANGES_MAX
            if found and sum(found[-1][:2]) == index and (not found[-1][2]) == whole:
                earlier, size, _ = found[-1]
                numbers = [] if whole else self._numbers(earlier, index)
                if whole or len(numbers) <= RANGES_MAX:
                    found[-1] = earlier, size + 1, numbers
                    continue
            found.append((index, 1, [] if whole else self._numbers(index, index)))
        return found

    def _numbers(self, first: int, last: int) -> list[int]:
        """Return the `ranges` of a fetch of the chunks from `first` to `last`."""
        begin, end = self._plan.span(first)[0], self._plan.span(last)[1]
        ranges = self._part.within(begin, end)
        return [n for each in ranges for n in (begin + each.begin, *each[1:])]


@lru_cache(maxsize=16)
def _crc_of_zeros(nbytes: int) -> int:
    return crc32c(bytes(nbytes))


def piece_of(chunk: Buffer, begin: int, ranges: Sequence[Range]) -> tuple[Memory, int, int] | None:
    """Return the bytes of a chunk that a worker needs, and two checksums.

    Args:
        chunk: The bytes of the chunk.
        begin: The position of the chunk in the data section.
        ranges: The bytes that the worker needs.

    Returns:
        (piece, CRC-32C of the piece, CRC-32C of the chunk with zeros in place of the piece); None
        if the whole chunk is to be sent.
    """  # T2
    here = [*clipped(ranges, begin, begin + len(chunk))]
    size = size_of(here)
    if not 0 < size < len(chunk) or sum(each.times for each in here) > INTERVALS_MAX:
        return None
    data, piece = np.frombuffer(chunk, np.uint8), np.empty(size, np.uint8)
    gather(data, here, piece)
    rest = data.copy()
    blank(rest, here)
    return piece, crc32c(piece.data), crc32c(rest.data)


def ranges_of(numbers: Sequence[int]) -> Sequence[Range]:
    """Decode the `ranges` of a fetch; return none if they are not valid."""  # T2
    if len(numbers) % NUMBERS:
        return ()
    ranges = [Range(*numbers[at : at + NUMBERS]) for at in range(0, len(numbers), NUMBERS)]
    valid = all(each.length >= 1 and each.times >= 1 for each in ranges)
    return ranges if valid and all(each.stride >= each.length for each in ranges) else ()
