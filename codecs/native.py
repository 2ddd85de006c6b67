"""Provides the functions of the C helper, and the same functions in Python if it was not built.

`WEIGHTBUS_NATIVE=0` in the environment selects Python. `description` names the implementation in
use, and its instruction set. Both implementations give the same results, to the bit.

The caller keeps the memory at all given addresses alive, and no other thread writes it during a
call. Both implementations refuse addresses where no memory can be, before they copy a byte.
"""

import contextlib
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..codecs import _delta, _native
    from .numpy_tensors import Bytes, Memory

Addresses = NDArray[np.uint64]

CHOICE = "WEIGHTBUS_NATIVE"
STREAM_BYTES = 2**25  # from this size on, a copy bypasses the caches

if not TYPE_CHECKING:
    _native = _delta = None
    if os.environ.get(CHOICE, "1") != "0":
        with contextlib.suppress(ImportError):  # no compiler, or another system
            from ..codecs import _native
        with contextlib.suppress(ImportError):
            from ..codecs import _delta

BUILT: bool = _native is not None
DELTA = _delta  # called by `delta/kernels.py`

# No memory is mapped below this address: a lower address is null, or null plus an offset. A tensor
# whose memory was freed has such an address.
FIRST_ADDRESS = 4096

# Tensors up to this size are copied as memory. The Python implementation holds the GIL while it
# copies, so its copies must be short; numpy and torch also copy larger tensors faster.
COPIED_BYTES_MAX = sys.maxsize if BUILT else 2**15


def description() -> str:
    """Return the name of the implementation in use, for people."""
    if BUILT:
        return f"native helper ({_native.levels()[0]})"
    chosen = os.environ.get(CHOICE) == "0"
    return f"Python ({CHOICE}=0)" if chosen else "Python (the native helper was not built)"


if TYPE_CHECKING:

    def crc32c(data: Memory, value: int = 0) -> int:
        """Return the CRC-32C (Castagnoli) of a contiguous buffer, continued from `value`.

        Nothing is copied; from 32 KiB on, the GIL is released.
        """
        raise NotImplementedError

elif BUILT:  # no wrapper, since it is called for every piece of every chunk
    crc32c = _native.crc32c
else:
    from crc32c import crc32c as crc32c


def copy_crc32c(to: "Bytes", from_: "Bytes", value: int = 0) -> int:
    """Copy bytes and return their CRC-32C. The C helper does both in one pass.

    Args:
        to: The destination; contiguous.
        from_: The source, of the same size, without overlap.
        value: The CRC-32C of the preceding bytes.
    """
    if BUILT:
        return _native.copy_crc32c(to, from_, value, to.nbytes >= STREAM_BYTES)
    np.copyto(to, from_)
    return crc32c(to, value)


def copies(to: Addresses, from_: Addresses, sizes: Addresses) -> Callable[[], None]:
    """Return a function that makes these copies each time it is called.

    Copies that are adjacent on both sides are joined.

    Args:
        to, from_: The destination and source addresses of the copies.
        sizes: The bytes of each copy.

    Raises:
        ValueError: An address is not a valid address of this process. (With the C helper, the
            returned function raises this error.)
    """
    if BUILT:
        to, from_, sizes = joined(to, from_, sizes)
        if int(sizes.sum()) >= STREAM_BYTES:
            return partial(_native.copies, to, from_, sizes, True)
        return partial(_native.copies, to, from_, sizes)
    for addresses in (to, from_):
        _check(addresses, sizes)
    targets, sources = ([*map(_view, map(int, a), map(int, sizes))] for a in (to, from_))
    everything = slice(None)

    def run() -> None:
        deque(map(memoryview.__setitem__, targets, repeat(everything), sources), maxlen=0)

    return run


def joined(
    to: Addresses, from_: Addresses, sizes: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Sort copies by destination, and join copies that are adjacent on both sides."""
    if not len(to):
        return to, from_, sizes
    order = np.argsort(to, kind="stable")
    to, from_, sizes = to[order], from_[order], sizes[order]
    adjacent = (to[:-1] + sizes[:-1] == to[1:]) & (from_[:-1] + sizes[:-1] == from_[1:])
    first = np.flatnonzero(np.concatenate(([True], ~adjacent)))
    return to[first], from_[first], np.add.reduceat(sizes, first)


def _check(addresses: Addresses, sizes: Addresses) -> None:
    """Raise ValueError for addresses that cannot be valid, as the C helper does."""
    wrong = (sizes > 0) & ((addresses < FIRST_ADDRESS) | (addresses + sizes < addresses))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"{sizes[first]} bytes at address {addresses[first]}: there is no memory, so a tensor "
            "has been freed, or never had any"
        )


def bytes_at(address: int, nbytes: int) -> "Bytes":
    """Return the bytes at an address, without a copy; ValueError if it cannot be valid."""
    _check(np.array([address], np.uint64), np.array([nbytes], np.uint64))
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


def _view(address: int, nbytes: int) -> memoryview:
    return bytes_at(address, nbytes).data  # numpy's bytes can be assigned to


def gather(to: "Bytes", from_: Addresses, sizes: Addresses, chunk_bytes: int) -> NDArray[np.uint32]:
    """Copy pieces of memory into one buffer, end to end; return the CRC-32C of each chunk.

    Args:
        to: The destination: contiguous, with exactly the sum of `sizes` bytes. A piece whose source
            is its destination in `to` is only hashed.
        from_: The address of each piece.
        sizes: The bytes of each piece.
        chunk_bytes: Bytes per chunk; the last may be shorter.

    Raises:
        ValueError: An address cannot be valid, or the sizes do not fit.
    """
    crcs = np.zeros(-(-to.nbytes // chunk_bytes), np.uint32)
    if BUILT:
        _native.gather(to, from_, sizes, chunk_bytes, crcs, to.nbytes >= STREAM_BYTES)
        return crcs
    if int(sizes.sum()) != to.nbytes:
        raise ValueError(f"the pieces have {int(sizes.sum())} bytes, the buffer {to.nbytes}")
    _check(from_, sizes)
    begin: int = to.__array_interface__["data"][0]
    for address, size in zip(map(int, from_), map(int, sizes), strict=True):
        if address != begin:
            ctypes.memmove(begin, address, size)
        begin += size
    for index in range(len(crcs)):
        crcs[index] = crc32c(to[index * chunk_bytes : (index + 1) * chunk_bytes])
    return crcs


def marks(tensors: Sequence[object], exchange: object) -> bytes:
    """Return bytes that change with the address, device, dtype, shape or strides of a tensor.

    Args:
        tensors: Plain tensors of one framework.
        exchange: The framework's `__dlpack_c_exchange_api__`.

    Raises:
        BufferError: A tensor cannot be inspected in this way, or has elements but no memory.
        NotImplementedError: The C helper was not built.
    """
    if not BUILT:
        raise NotImplementedError(description())
    return _native.marks(tensors, exchange)


def exchange(one: int, other: int, nbytes: int) -> None:
    """Exchange the pages of two private mappings, without copying a byte.

    Args:
        one: The address of the first mapping, page-aligned.
        other: The address of the second mapping, page-aligned.
        nbytes: Bytes of each, a multiple of the page size.

    Raises:
        OSError: The kernel cannot exchange pages (Linux 5.7 or later can). Both mappings are
            unchanged. If an exchange fails although the kernel can exchange pages, later calls fail
            at once.
        MemoryError: Too little address space is left for `nbytes` more bytes; nothing has changed.
        ValueError: `one` or `other` cannot be a valid address.
    """
    if not BUILT:
        raise OSError("only the native helper exchanges pages, and it was not built")
    _native.exchange(one, other, nbytes)
