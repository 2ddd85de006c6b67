"""The one door to the helper in C, with the same in Python for where it was not built.

`WEIGHTBUS_NATIVE=0` in the environment chooses Python. Which one it is, and which instructions of
the processor are used, `description` says; what they compute is the same to the bit.

Addresses are those of memory that the caller keeps alive and that nobody else writes meanwhile.
Either of the two refuses addresses where no memory can be, before it copies a byte.
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
STREAM_BYTES = 2**25  # from here on, a copy is larger than what the caches keep for the reader

if not TYPE_CHECKING:
    _native = _delta = None
    if os.environ.get(CHOICE, "1") != "0":
        with contextlib.suppress(ImportError):  # no compiler, or another system
            from ..codecs import _native
        with contextlib.suppress(ImportError):
            from ..codecs import _delta

BUILT: bool = _native is not None
DELTA = _delta  # of `delta/kernels.py`, which calls it

# Nothing is mapped below: such an address is null, or an offset from it, of memory that is freed.
FIRST_ADDRESS = 4096

# Tensors of up to this are copied as memory. In Python that keeps its lock, so it must not take
# long; from there on the frameworks copy faster, too.
COPIED_BYTES_MAX = sys.maxsize if BUILT else 2**15


def description() -> str:
    """Say which of the two it is."""
    if BUILT:
        return f"native helper ({_native.levels()[0]})"
    chosen = os.environ.get(CHOICE) == "0"
    return f"Python ({CHOICE}=0)" if chosen else "Python (the native helper was not built)"


if TYPE_CHECKING:

    def crc32c(data: Memory, value: int = 0) -> int:
        """Return the CRC-32C (Castagnoli) of a contiguous buffer, going on from `value`.

        Nothing is copied; from 32 KiB on, other threads run meanwhile.
        """
        raise NotImplementedError

elif BUILT:  # unwrapped, since it is called for every piece of every chunk
    crc32c = _native.crc32c
else:
    from crc32c import crc32c as crc32c


def copy_crc32c(to: "Bytes", from_: "Bytes", value: int = 0) -> int:
    """Copy bytes and return their CRC-32C, in one pass where the helper is there.

    Args:
        to: Where to; contiguous.
        from_: As many bytes, which do not overlap with `to`.
        value: The CRC-32C of what came before.
    """
    if BUILT:
        return _native.copy_crc32c(to, from_, value, to.nbytes >= STREAM_BYTES)
    np.copyto(to, from_)
    return crc32c(to, value)


def copies(to: Addresses, from_: Addresses, sizes: Addresses) -> Callable[[], None]:
    """Return what copies so many bytes each from some addresses to others, again and again.

    What lies behind one another on both sides is copied as one.

    Raises:
        ValueError: There can be no memory at an address. (From what is returned, with the helper.)
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
    """Return the same copies, in order of where to, with neighbours on both sides in one."""
    if not len(to):
        return to, from_, sizes
    order = np.argsort(to, kind="stable")
    to, from_, sizes = to[order], from_[order], sizes[order]
    goes_on = (to[:-1] + sizes[:-1] == to[1:]) & (from_[:-1] + sizes[:-1] == from_[1:])
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return to[first], from_[first], np.add.reduceat(sizes, first)


def _check(addresses: Addresses, sizes: Addresses) -> None:
    """Refuse addresses where there can be no memory, as the helper does."""
    wrong = (sizes > 0) & ((addresses < FIRST_ADDRESS) | (addresses + sizes < addresses))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"{sizes[first]} bytes at address {addresses[first]}: there is no memory, so a tensor "
            "has been freed, or never had any"
        )


def bytes_at(address: int, nbytes: int) -> "Bytes":
    """Return what lies in memory; ValueError if there can be none at the address."""
    _check(np.array([address], np.uint64), np.array([nbytes], np.uint64))
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


def _view(address: int, nbytes: int) -> memoryview:
    return bytes_at(address, nbytes).data  # numpy's bytes can be assigned to


def gather(to: "Bytes", from_: Addresses, sizes: Addresses, chunk_bytes: int) -> NDArray[np.uint32]:
    """Copy pieces of memory behind one another; return the CRC-32C of each chunk of the whole.

    Args:
        to: Where to: exactly the sum of `sizes` bytes, contiguous. A piece that lies in its place
            already, since its address is that, is only hashed.
        from_: The address of each piece.
        sizes: Bytes of each.
        chunk_bytes: Bytes of a chunk; the last may be shorter.
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
    """Return address, device, dtype, shape and strides of each tensor, to be compared.

    Args:
        tensors: Plain ones of the framework that `exchange` is of.
        exchange: Its `__dlpack_c_exchange_api__`.

    Raises:
        BufferError: One cannot be looked at in this way, or has elements and no memory.
        NotImplementedError: There is no helper.
    """
    if not BUILT:
        raise NotImplementedError(description())
    return _native.marks(tensors, exchange)


def exchange(one: int, other: int, nbytes: int) -> None:
    """Exchange the pages of two private mappings, without copying a byte.

    Args:
        one: Where the first begins, on a boundary of pages.
        other: Where the second begins.
        nbytes: Bytes of each, a multiple of a page.

    Raises:
        OSError: It cannot be done here (Linux 5.7 or later can). Both hold what they held before.
            Where it could not although it can be, it is not tried again in this process.
        MemoryError: There is no room for as many bytes in between; nothing has changed.
        ValueError: There can be no memory at an address.
    """
    if not BUILT:
        raise OSError("pages are exchanged by the native helper alone, which is not there")
    _native.exchange(one, other, nbytes)
