"""Defines the format of a patch (encoding `delta-1`): header, blocks, and tables of its codes.

A patch turns the data section of a base into the data section of a target with the same layout, bit
for bit. `docs/DELTA.md` defines every byte.

    0       120
    ├────────┼─────────┬─────────┬───
    │ header │ group 0 │ group 1 │ …    a group: │ entries │ table │ body of block 0 │ …
    └────────┴─────────┴─────────┴───

The layout alone determines the blocks, so a patch cannot repeat or omit a block.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DTYPES
from ..errors import PatchError
from ..layout import Layout
from ..protocol_limits import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, CHUNKS_MAX

NAME: Final = "delta-1"
MAGIC: Final = b"WBDELTA1"
BLOCK_ELEMENTS: Final = 2**18  # a block is decoded by itself, and fits into a second-level cache
GROUP_BLOCKS: Final = 16  # number of blocks that share a table, so that its size is negligible
CLASSES: Final = 16  # classes of base values; more classes would save only half a percent

HEADER: Final = struct.Struct("<8sIIQ32s32s32s")
ENTRY_BYTES_MAX: Final = 4  # 28 bits: a block has at most 2^21 bytes, and two bits are its mode

UNCHANGED, STEPS, OVERWRITE, RAW = range(4)  # modes of a block
PLAIN, INTEGER, BF16, F16 = range(4)  # kinds of elements: any; of 16 bits; two with an exponent

# Bits of each field of a table's row. "large" is the number of bits of a count of steps above 1.
COUNT_BITS, GAP_BITS, LARGE_BITS, LARGE_GAP_BITS, SIZE_BITS = 5, 5, 5, 5, 4
EVERY: Final = 31  # value of the field "large" if the size of every step is coded
WIDTH_MAX: Final = BLOCK_ELEMENTS.bit_length()  # the most bits of a count
RICE_MAX: Final = 18
STEP_MAX: Final = 2**16 - 1

Table = NDArray[np.uint8]  # one row of five fields for each class
KINDS = {"BF16": BF16, "F16": F16, "I16": INTEGER, "U16": INTEGER}


@dataclass(frozen=True, slots=True)
class Block:
    """Adjacent elements of one dtype: bytes `begin` to `end` of the data section."""

    begin: int
    end: int
    width: int  # bytes of an element; 1 if it has fewer than 8 bits
    kind: int  # one of PLAIN, INTEGER, BF16, F16

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """The number of elements."""
        return self.nbytes // self.width


def groups(layout: Layout) -> Iterator[list[Block]]:
    """Yield the blocks of a layout, in order, in groups of blocks of one dtype."""
    for dtype, specs in groupby((s for s in layout.tensors if s.nbytes), lambda s: s.dtype):
        stretch = list(specs)
        width = max(DTYPES[dtype].bits // 8, 1)
        begin, end, step = stretch[0].begin, stretch[-1].end, BLOCK_ELEMENTS * width
        kind = KINDS.get(dtype, PLAIN)
        for first in range(begin, end, GROUP_BLOCKS * step):
            past = min(first + GROUP_BLOCKS * step, end)
            yield [Block(at, min(at + step, past), width, kind) for at in range(first, past, step)]


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a patch, which names its base and its target by their digests."""

    layout_id: str
    nbytes: int
    chunk_bytes: int  # the chunk size of both digests
    base: str  # digest
    target: str  # digest

    def pack(self) -> bytes:
        """Return the bytes of the header."""
        ids = (bytes.fromhex(text) for text in (self.layout_id, self.base, self.target))
        return HEADER.pack(MAGIC, 0, self.chunk_bytes, self.nbytes, *ids)

    @staticmethod
    def parse(data: memoryview) -> "Header":
        """Parse the header of a patch; PatchError if it is malformed."""
        if len(data) < HEADER.size:
            raise PatchError(f"a patch of {len(data)} bytes; its header alone has {HEADER.size}")
        magic, flags, chunk_bytes, nbytes, *ids = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise PatchError(f"a patch begins with {MAGIC!r}, not with {magic!r}")
        if flags:
            raise PatchError(f"the patch has flags {flags:#x}; a reader of {NAME} knows none")
        right = CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX
        if not right or nbytes > CHUNKS_MAX * chunk_bytes:
            raise PatchError(
                f"digests of {nbytes} bytes by chunks of {chunk_bytes}; {CHUNK_BYTES_MIN} to "
                f"{CHUNK_BYTES_MAX} are allowed, and {CHUNKS_MAX} chunks"
            )
        layout_id, base, target = (part.hex() for part in ids)
        return Header(layout_id, nbytes, chunk_bytes, base, target)


def pack_entry(mode: int, nbytes: int) -> bytes:
    """Return the entry of a block: its mode and the size of its body, with seven bits per byte."""
    value, out = nbytes << 2 | mode, bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def parse_entry(data: memoryview, at: int, block: Block) -> tuple[int, int, int]:
    """Parse a block's entry at offset `at`; return (mode, size of the body, end of the entry).

    Raises:
        PatchError: The entry is malformed.
    """
    value = 0
    for number in range(ENTRY_BYTES_MAX):
        if at >= len(data):
            raise PatchError(f"the patch ends at byte {at}, in an entry; more blocks must follow")
        byte = data[at]
        at += 1
        value |= (byte & 127) << 7 * number
        if byte < 128:
            break
    else:
        raise PatchError(f"an entry before byte {at} has more than {ENTRY_BYTES_MAX} bytes")
    if number and not byte:
        raise PatchError(f"the entry before byte {at} is longer than it need be")
    mode, nbytes = value & 3, value >> 2
    if mode == STEPS and block.kind == PLAIN:
        raise PatchError(f"the block at byte {block.begin} has steps, but not elements of 16 bits")
    least, most = {UNCHANGED: (0, 0), RAW: (block.nbytes,) * 2}.get(mode, (1, block.nbytes - 1))
    if not least <= nbytes <= most:
        raise PatchError(
            f"the body of the block at byte {block.begin} (mode {mode}) has {nbytes} bytes; "
            f"{least} to {most} are allowed"
        )
    return mode, nbytes, at


def pack_table(table: Table) -> bytes:
    """Return the bytes of a table: the number of classes, then the fields of each class as bits."""
    bits, at = 0, 0
    for row in table.tolist():
        for value, width in _fields(row):
            bits |= value << at
            at += width
    return bytes([len(table)]) + bits.to_bytes(-(-at // 8), "little")


def _fields(row: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (value, width in bits) of each field of a row that is part of the bytes."""
    count, gap, large, large_gap, size = row
    yield count, COUNT_BITS
    if count:
        yield gap, GAP_BITS
        yield large, LARGE_BITS
        if large not in (0, EVERY):
            yield large_gap, LARGE_GAP_BITS
        if large:
            yield size, SIZE_BITS


def parse_table(data: memoryview, at: int, kind: int) -> tuple[Table, int]:
    """Parse a group's table at offset `at`; return (table, end of the table).

    Raises:
        PatchError: The table is malformed.
    """
    classes = data[at] if at < len(data) else 0
    if classes != 1 and not (classes == CLASSES and kind in (BF16, F16)):
        raise PatchError(f"a table of {classes} classes at byte {at}; 1 is allowed, or {CLASSES}")
    begin = at + 1
    most = -(-classes * (COUNT_BITS + GAP_BITS + LARGE_BITS + LARGE_GAP_BITS + SIZE_BITS) // 8)
    bits = _Bits(bytes(data[begin : begin + most]))
    rows = [_row(bits) for _ in range(classes)]
    return np.array(rows, np.uint8), begin + bits.end()


def _row(bits: "_Bits") -> list[int]:
    """Parse one row of a table; fields that are not part of the bytes are 0."""
    count = bits.take(COUNT_BITS, WIDTH_MAX)
    if not count:
        return [0] * 5
    gap = bits.take(GAP_BITS, RICE_MAX)
    large = bits.take(LARGE_BITS, EVERY)
    if WIDTH_MAX < large < EVERY:
        raise PatchError(f"a table has counts of {large} bits; at most {WIDTH_MAX} are allowed")
    large_gap = bits.take(LARGE_GAP_BITS, RICE_MAX) if large not in (0, EVERY) else 0
    return [count, gap, large, large_gap, bits.take(SIZE_BITS, 15) if large else 0]


class _Bits:
    """Reads the bits of a table, the lowest bit first."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left, self._at = int.from_bytes(data, "little"), 8 * len(data), 0

    def take(self, width: int, most: int) -> int:
        """Return the next number of `width` bits; PatchError if it is above `most`."""
        value = self._value >> self._at & (1 << width) - 1
        self._at += width
        if self._at > self._left:
            raise PatchError("the patch ends within a table")
        if value > most:
            raise PatchError(f"a table has a parameter of {value}; at most {most} is allowed")
        return value

    def end(self) -> int:
        """Return the number of bytes read; PatchError if the bits after the table are not zero."""
        nbytes = -(-self._at // 8)
        if self._value >> self._at & (1 << 8 * nbytes - self._at) - 1:
            raise PatchError("the bits behind a table are not zero")
        return nbytes
