"""Implements the inner loops of patches in numpy: finds steps, and chooses, writes and reads codes.

`kernels.py` describes the functions. The C helper has the same functions, which give the same
results, bit for bit.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import PatchError
from ..numpy_tensors import Bytes
from . import bits
from .format import BF16, CLASSES, EVERY, F16, STEP_MAX, Table

Elements = NDArray[np.uint16]
Counts = NDArray[np.uint32]


def keys(elements: Elements) -> NDArray[np.int32]:
    """Return the rank of each bit pattern in the order of float values, with NaNs at both ends."""
    u = elements.astype(np.int32)
    return np.where(u & 0x8000, 0xFFFF - u, u | 0x8000)


def elements_of(placed: NDArray[np.int32]) -> Elements:
    """Return the bit patterns with these ranks; the inverse of `keys`."""
    return np.where(placed & 0x8000, placed & 0x7FFF, 0xFFFF - placed).astype(np.uint16)


def classes_of(elements: Elements, kind: int) -> NDArray[np.uint8]:
    """Return the class of each element, by its exponent; two exponents make a class."""
    if kind == F16:
        return ((elements >> 11) & 15).astype(np.uint8)
    exponents = np.maximum((elements >> 7).astype(np.uint8), 96)  # drops the sign
    return np.asarray(np.minimum((exponents - 96) >> 1, 15), np.uint8)


def compare(base: Bytes, target: Bytes, kind: int) -> tuple[Counts, Counts, NDArray[np.int32]]:
    # See `kernels.compare`.
    old, new = base.view("<u2"), target.view("<u2")
    at = np.flatnonzero(old != new)
    steps = keys(new[at]) - keys(old[at])
    if kind not in (BF16, F16):
        return np.array([len(at)], np.uint32), _gaps(at), steps
    classes = classes_of(old, kind)
    changed = classes[at]
    counts = np.bincount(changed, minlength=CLASSES).astype(np.uint32)
    order = np.argsort(changed, kind="stable")
    ends = np.cumsum(counts)
    gaps = [
        _gaps(_ranks(classes == number, at[order[end - count : end]]))
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
        if count
    ]
    return counts, np.concatenate([*gaps, np.zeros(0, np.uint32)]), steps[order]


def _gaps(at: NDArray[np.int64]) -> Counts:
    return (np.diff(at, prepend=-1) - 1).astype(np.uint32)


def _ranks(chosen: NDArray[np.bool_], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each position, the number of chosen elements before it."""
    packed = np.packbits(chosen, bitorder="little")
    words = np.zeros(-(-len(packed) // 8) * 8, np.uint8)
    words[: len(packed)] = packed
    wide = words.view("<u8")
    ones = np.bitwise_count(wide).astype(np.int64)
    before = np.cumsum(ones) - ones
    below = (np.uint64(1) << (at & 63).astype(np.uint64)) - np.uint64(1)
    return np.asarray(before[at >> 6] + np.bitwise_count(wide[at >> 6] & below), np.int64)


def tune(counts: Counts, gaps: Counts, steps: NDArray[np.int32]) -> Table:
    classes = counts.shape[1]
    number = np.repeat(np.arange(counts.size) % classes, counts.ravel())
    table = np.zeros((classes, 5), np.uint8)
    for each in range(classes):
        mine = number == each
        if mine.any():
            sizes = np.abs(steps[mine]).astype(np.int64)
            mine_by_block = counts[:, each].astype(np.int64)
            table[each] = _row(mine_by_block, gaps[mine].astype(np.int64), sizes)
    return table


def _row(counts: bits.Values, gaps: bits.Values, sizes: bits.Values) -> list[int]:
    """Return a class's row of the table, from its counts, gaps and step sizes."""
    width, gap = int(counts.max()).bit_length(), best_rice(gaps)[0]
    at = np.flatnonzero(sizes > 1)
    block = np.repeat(np.arange(len(counts)), counts)[at]
    larges = np.bincount(block, minlength=len(counts))
    begins = np.cumsum(counts) - counts
    first = np.diff(block, prepend=-1) != 0
    large_gaps = np.where(first, at - begins[block], np.diff(at, prepend=0) - 1)
    every, every_cost = _best_golomb(sizes - 1, sizes - 1)
    size, size_cost = _best_golomb(sizes[at] - 1, sizes[at] - 2)
    large_gap, large_cost = best_rice(large_gaps)
    large = int(larges.max()).bit_length()
    large_cost += size_cost + len(counts) * large
    if large_cost <= every_cost:
        return [width, gap, large, large_gap if large else 0, size if large else 0]
    return [width, gap, EVERY, 0, every]


def best_rice(values: bits.Values) -> tuple[int, int]:
    """Return the cheapest of the three Rice parameters near the mean, and its cost in bits."""
    if not len(values):
        return 0, 0
    middle = max((int(values.sum()) * 11 // (16 * len(values))).bit_length() - 1, 0)
    costs = [
        (len(values) * (1 + k) + int((values >> k).sum()), k)
        for k in range(max(middle - 1, 0), middle + 2)
    ]
    cost, k = min(costs)
    return k, cost


def _best_golomb(like: bits.Values, values: bits.Values) -> tuple[int, int]:
    """Return (best Exp-Golomb parameter for `like`, bits of the codes of `values` with it)."""
    lengths = np.bincount(bits.bit_length(like), minlength=17).astype(np.int64)
    guesses = [
        (int((lengths * (1 + k + 2 * np.maximum(np.arange(17) - k, 0))).sum()), k)
        for k in range(16)
    ]
    _, k = min(guesses)
    return k, int((2 * bits.bit_length(values + (1 << k)) - 1 - k).sum())


def write(
    counts: Counts, gaps: Counts, steps: NDArray[np.int32], table: Table, nbytes_max: int
) -> bytes | None:
    # See `kernels.write`.
    parts: list[bits.Bit] = []
    head: list[bits.Bit] = [np.zeros(0, np.uint8)]
    begin = 0
    for count, (width, gap, large, large_gap, size) in zip(
        counts.tolist(), table.tolist(), strict=True
    ):
        if not width:
            continue
        some = slice(begin, begin := begin + count)
        sizes = np.abs(steps[some]).astype(np.int64)
        parts += bits.rice(gaps[some].astype(np.int64), gap)
        parts.append((steps[some] < 0).astype(np.uint8))
        head.append(bits.fixed(np.array([count]), width))
        at = np.flatnonzero(sizes > 1)
        if large == EVERY:
            parts += bits.golomb(sizes - 1, size)
        elif large:
            head.append(bits.fixed(np.array([len(at)]), large))
            parts += bits.rice(np.diff(at, prepend=-1) - 1, large_gap)
            parts += bits.golomb(sizes[at] - 2, size)
    if sum(map(len, parts)) + sum(map(len, head)) > 8 * nbytes_max:
        return None
    return np.packbits(np.concatenate([*head, *parts]), bitorder="little").tobytes()


def read(body: Bytes, table: Table, base: Bytes, kind: int) -> tuple[Counts, Elements]:
    # See `kernels.read`.
    old = base.view("<u2")
    reader = bits.BitReader(body)
    rows = [(number, row) for number, row in enumerate(table.tolist()) if row[0]]
    counts = [(reader.number(row[0]), _large_count(reader, row[2])) for _, row in rows]
    if sum(count for count, _ in counts) > len(old):
        raise PatchError(f"more steps than the {len(old)} elements of a block")
    classes = classes_of(old, kind) if len(table) > 1 else np.zeros(len(old), np.uint8)
    at, steps = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for (number, row), (count, large_count) in zip(rows, counts, strict=True):
        if large_count > count:
            raise PatchError(f"{large_count} of {count} steps are marked as large")
        ranks, some = _read_class(reader, row, count, large_count, len(old))
        at.append(_select(classes, number, ranks) if len(table) > 1 else ranks)
        steps.append(some)
    reader.end()
    where = np.concatenate(at)
    placed = keys(old[where]) + np.concatenate(steps)
    if ((placed < 0) | (placed > STEP_MAX)).any():
        raise PatchError("a step leads beyond 16 bits: is the patch applied to the wrong base?")
    return where.astype(np.uint32), elements_of(placed.astype(np.int32))


def _large_count(reader: bits.BitReader, large: int) -> int:
    return reader.number(large) if large != EVERY else 0


def _read_class(
    reader: bits.BitReader, row: Sequence[int], count: int, large_count: int, elements: int
) -> tuple[bits.Values, bits.Values]:
    """Return (ranks of the changed elements of a class within the class, their steps)."""
    _, gap, large, large_gap, size = row
    ranks = bits.positions(reader.rice(count, gap), elements)
    negative = reader.take(count)
    sizes = np.ones(count, np.int64)
    if large == EVERY:
        sizes += reader.golomb(count, size)
    elif large:
        which = bits.positions(reader.rice(large_count, large_gap), count)
        sizes[which] = reader.golomb(large_count, size) + 2
    return ranks, np.where(negative, -sizes, sizes)


def _select(classes: NDArray[np.uint8], class_id: int, ranks: bits.Values) -> bits.Values:
    """Return the positions in the block of the elements with these ranks within a class."""
    positions = np.flatnonzero(classes == class_id) if len(ranks) else ranks
    if len(ranks) and ranks[-1] >= len(positions):
        raise PatchError(
            f"the patch refers to element {ranks[-1]} of class {class_id}, which has "
            f"{len(positions)}: is it applied to the wrong base?"
        )
    return positions[ranks]
