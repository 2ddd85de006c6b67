"""Writes and reads the codes of a patch as bit strings in numpy, without a loop over elements.

The Rice code of v with a parameter k is `v >> k` in unary (that many zeros, then a one), then the
low k bits of v. For the Exp-Golomb code of v with k, let n + k + 1 be the number of bits of
`v + 2**k`. The code is n zeros and a one, then the low n + k bits of that sum. The codes of many
values are stored in two parts: first all unary numbers, then all low bits.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import PatchError

Bit = NDArray[np.uint8]  # one bit per byte
Values = NDArray[np.int64]

GOLOMB_BITS_MAX: Final = 16  # enough for the size of every step


def fixed(values: Values, width: int) -> Bit:
    """Return the bits of numbers of `width` bits, the lowest bit of each number first."""
    return ((values[:, None] >> np.arange(width)) & 1).astype(np.uint8).ravel()


def unary(values: Values) -> Bit:
    """Return the unary codes of numbers: n zeros and a one for the number n."""
    ends = np.cumsum(values + 1)
    out = np.zeros(ends[-1] if len(ends) else 0, np.uint8)
    out[ends - 1] = 1
    return out


def rice(values: Values, k: int) -> list[Bit]:
    """Return the Rice codes of numbers."""
    return [unary(values >> k), fixed(values & ((1 << k) - 1), k)]


def golomb(values: Values, k: int) -> list[Bit]:
    """Return the Exp-Golomb codes of numbers."""
    shifted = values + (1 << k)
    widths = bit_length(shifted) - 1
    index = np.repeat(np.arange(len(values)), widths)
    return [unary(widths - k), ((shifted[index] >> _places(widths)) & 1).astype(np.uint8)]


def bit_length(values: Values) -> Values:
    """Return the length of each number in bits: 0 for the number 0, at most 53."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def _places(widths: Values) -> Values:
    """Return 0, 1, …, width - 1 for each width, concatenated."""
    ends = np.cumsum(widths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - widths, widths)


def positions(gaps: Values, most: int) -> Values:
    """Return the positions after these gaps; PatchError if a position is `most` or more."""
    at = np.cumsum(gaps + 1) - 1
    if len(at) and at[-1] >= most:
        raise PatchError(f"gaps lead to position {at[-1]}; the last one is {most - 1}")
    return at


class BitReader:
    """Reads a bit string from its beginning; raises PatchError if it is malformed."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._bits = np.unpackbits(data, bitorder="little")
        self._ones = np.flatnonzero(self._bits)
        self._at = 0

    def take(self, count: int) -> Bit:
        """Return the next `count` bits."""
        begin, self._at = self._at, self._at + count
        if self._at > len(self._bits):
            raise PatchError(f"the body of a block ends {self._at - len(self._bits)} bits early")
        return self._bits[begin : self._at]

    def number(self, width: int) -> int:
        """Return the next number of a fixed width."""
        return int.from_bytes(np.packbits(self.take(width), bitorder="little").tobytes(), "little")

    def fixed(self, count: int, width: int) -> Values:
        """Return the next `count` numbers of a fixed width."""
        if not width:
            return np.zeros(count, np.int64)
        packed = np.packbits(self.take(count * width).reshape(count, width), 1, "little")
        weights = np.array([256**place for place in range(packed.shape[1])])
        return np.asarray(packed.astype(np.int64) @ weights, np.int64)

    def unary(self, count: int) -> Values:
        """Return the next `count` unary numbers."""
        first = np.searchsorted(self._ones, self._at)
        ones = self._ones[first : first + count]
        if len(ones) < count:
            raise PatchError(f"{count} unary codes, of which {count - len(ones)} have no end")
        values = np.diff(ones, prepend=self._at - 1) - 1
        self._at += int(values.sum()) + count
        return values

    def rice(self, count: int, k: int) -> Values:
        """Return the next `count` numbers of Rice codes with parameter `k`."""
        high = self.unary(count)
        return (high << k) + self.fixed(count, k)

    def golomb(self, count: int, k: int) -> Values:
        """Return the next `count` numbers of Exp-Golomb codes with parameter `k`."""
        widths = self.unary(count) + k
        if count and int(widths.max()) > GOLOMB_BITS_MAX:
            raise PatchError(f"a step has {widths.max()} bits; {GOLOMB_BITS_MAX} are allowed")
        bits = self.take(int(widths.sum())).astype(np.int64) << _places(widths)
        sums = np.concatenate([[0], np.cumsum(bits)])  # exact, since each number is below 2**16
        ends = np.cumsum(widths)
        return np.asarray(sums[ends] - sums[ends - widths] + (1 << widths) - (1 << k), np.int64)

    def end(self) -> None:
        """Raise PatchError unless only the zero bits are left that pad the last byte."""
        rest = self._bits[self._at :]
        if len(rest) > 7 or rest.any():
            raise PatchError(f"{len(rest)} bits are left in the body of a block; up to 7 zeros may")
