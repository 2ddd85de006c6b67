"""Provides the inner loops of encoding and decoding a block, in C or in numpy.

The bytes of blocks need not be aligned. The steps of a block (`encoding.py`), and the gaps between
them, are ordered by class, and within a class by element.
"""

import numpy as np
from numpy.typing import NDArray

from .. import native
from ..errors import PatchError
from ..numpy_tensors import Bytes
from . import bits, numpy_kernels
from .format import BF16, CLASSES, F16, RICE_MAX, Table

Positions = NDArray[np.uint32]
Steps = NDArray[np.int32]
EncodedChanges = tuple[Positions, Positions, Steps]  # counts, gaps and steps

BUILT: bool = native.DELTA is not None
_OVERWRITE_HEAD = 3  # bytes: 19 bits for a count, and 5 for a Rice parameter


def compare(base: Bytes, target: Bytes, kind: int) -> EncodedChanges:
    """Compare two blocks of 16-bit elements; return counts, gaps and steps.

    Args:
        base: A block of the base.
        target: The same block of the target.
        kind: The kind of the elements. Elements of kind `BF16` and `F16` have 16 classes; elements
            of other kinds have one class.

    Returns:
        Three arrays. Counts: for each class, the number of elements that differ. Gaps: for each
        element that differs, the number of equal elements of its class since the last one that
        differs. Steps: for each element that differs, the rank of the target's value minus the rank
        of the base's value. `numpy_kernels.keys` defines the ranks.
    """
    if not BUILT:
        return numpy_kernels.compare(base, target, kind)
    counts = np.zeros(CLASSES if kind in (BF16, F16) else 1, np.uint32)
    differ = native.DELTA.compare(base, target, kind, counts)
    gaps, steps = np.empty(differ, np.uint32), np.empty(differ, np.int32)
    native.DELTA.changes(base, target, kind, counts, gaps, steps)
    return counts, gaps, steps


def tune(counts: Positions, gaps: Positions, steps: Steps) -> Table:
    """Return the table with the best codes for the steps of a group.

    Args:
        counts: The counts, by block and class.
        gaps: The gaps of all blocks, concatenated.
        steps: The steps of all blocks, concatenated.
    """
    if not BUILT:
        return numpy_kernels.tune(counts, gaps, steps)
    table = np.zeros((counts.shape[1], 5), np.uint8)
    native.DELTA.tune(counts, gaps, steps, table)
    return table


def write(
    counts: Positions, gaps: Positions, steps: Steps, table: Table, nbytes_max: int
) -> bytes | None:
    """Return the body of a block with these steps; None if it exceeds `nbytes_max` bytes."""
    if not BUILT:
        return numpy_kernels.write(counts, gaps, steps, table, nbytes_max)
    room = np.empty(nbytes_max, np.uint8)
    nbytes = native.DELTA.write(counts, gaps, steps, table, room)
    return None if nbytes < 0 else room[:nbytes].tobytes()


def read(body: Bytes, table: Table, base: Bytes, kind: int) -> tuple[Positions, NDArray[np.uint16]]:
    """Decode a body of steps: return (positions of changed elements, their new values).

    Raises:
        PatchError: The body is malformed, or does not fit this block of the base.
    """
    if not BUILT:
        return numpy_kernels.read(body, table, base, kind)
    # Each step takes at least two bits, and changes a different element.
    most = min(4 * body.size, base.size // 2)
    at, values = np.empty(most, np.uint32), np.empty(most, np.uint16)
    try:
        count = native.DELTA.read(body, table, base, kind, at, values)
    except ValueError as error:
        raise PatchError(str(error)) from None
    return at[:count].copy(), values[:count].copy()  # copies, to free the unused memory


def write_overwrite(base: Bytes, target: Bytes, width: int) -> bytes:
    """Return the body of a block that lists the elements (of any width) that differ."""
    unit = f"<u{width}"
    old, new = base.view(unit), target.view(unit)
    at = np.flatnonzero(old != new)
    gaps = np.diff(at, prepend=-1) - 1
    k = numpy_kernels.best_rice(gaps)[0]
    codes = np.packbits(np.concatenate(bits.rice(gaps, k)), bitorder="little").tobytes()
    head = (len(at) | k << 19).to_bytes(_OVERWRITE_HEAD, "little")
    return head + codes + new[at].tobytes()


def read_overwrite(body: Bytes, width: int, elements: int) -> tuple[Positions, NDArray[np.uint8]]:
    """Decode a body of `write_overwrite`; return (changed positions, bytes of the new elements).

    Raises:
        PatchError: The body is malformed.
    """
    head = int.from_bytes(body[:_OVERWRITE_HEAD].tobytes(), "little")
    count, k = head & (1 << 19) - 1, head >> 19
    codes = body.size - _OVERWRITE_HEAD - count * width
    longest = count * (1 + k) + (elements >> k)  # bits that the gaps may take
    if not 0 < count <= elements or k > RICE_MAX or not 0 < codes <= longest // 8 + 1:
        raise PatchError(
            f"{count} elements of {width} bytes with parameter {k} in a body of {body.size} bytes, "
            f"for a block of {elements}"
        )
    reader = bits.BitReader(body[_OVERWRITE_HEAD : _OVERWRITE_HEAD + codes])
    at = bits.positions(reader.rice(count, k), elements)
    reader.end()
    return at.astype(np.uint32), body[_OVERWRITE_HEAD + codes :].reshape(count, width)
