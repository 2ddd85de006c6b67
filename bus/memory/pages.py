"""Provides private memory in whole pages, prefaults it, and exchanges its contents without a copy.

Theory of operation: `mremap` moves pages within a process by writing only their page tables. This
takes 0.6 ms for a GiB if whole tables (2 MiB) move. Three moves, through a spare mapping, exchange
the contents of two arrays. No move unmaps its source (MREMAP_DONTUNMAP), since another thread could
map other memory into the hole. A failed move may leave a hole, which this module fills immediately.
If another thread has mapped memory into the hole meanwhile, the process aborts. If only the spare
mapping is lost, the process continues without exchanges.
"""

import mmap
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codecs import native

Check = Callable[[], None]  # called between steps; ends them if it raises

TABLE_BYTES = 2**21  # bytes that one page table maps; they move together if aligned
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
STEP_BYTES = 2**26  # bytes allocated at a time, in much less than 0.1 s


class Pages(mmap.mmap):
    """A private mapping. An array over the mapping keeps the mapping alive.

    Attributes:
        nbytes: The size of the array over the mapping, in bytes.
    """

    nbytes: int

    def __new__(cls, nbytes: int) -> "Pages":
        """Map `nbytes` bytes, plus room to align them to `TABLE_BYTES`."""
        room = nbytes + TABLE_BYTES if nbytes >= TABLE_BYTES else nbytes
        pages = super().__new__(cls, -1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.nbytes = nbytes
        return pages


def memory_of(
    nbytes: int, *, touched: bool = False, check: Check = lambda: None
) -> NDArray[np.uint8]:
    """Return zeroed bytes that share no page with other memory.

    `touched`: whether the kernel allocates the pages now. Between the steps of this allocation,
    `check` is called, which may raise.

    numpy does not allocate this memory, since numpy requests huge pages. If memory is fragmented,
    the kernel takes half a second to make huge pages for 200 MiB, and they make no copy faster.

    Raises:
        MemoryError: There is not enough memory.
    """
    if not nbytes:
        return np.empty(0, np.uint8)
    try:
        pages = Pages(nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no memory for {nbytes} bytes: {error}") from None
    if touched:
        populate(pages, check)
    whole = np.frombuffer(pages, np.uint8)
    begin = -address_of(whole) % TABLE_BYTES if nbytes >= TABLE_BYTES else 0
    return whole[begin : begin + nbytes]


def address_of(memory: NDArray[np.uint8]) -> int:
    """Return the address of an array's bytes."""
    address: int = memory.__array_interface__["data"][0]
    return address


def pages_of(memory: NDArray[np.uint8]) -> Pages | None:
    """Return the mapping that contains an array; None if that is not a `Pages`."""
    base: Any = memory
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, Pages) else None


def within(pages: Pages, address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return `nbytes` bytes of a mapping, as an array that begins at `address`."""
    whole = np.frombuffer(pages, np.uint8)
    begin = address - address_of(whole)
    return whole[begin : begin + nbytes]


def has_pages_of_its_own(memory: NDArray[np.uint8]) -> bool:
    """True if the pages of an array contain nothing else."""
    pages = pages_of(memory)
    whole = pages is not None and pages.nbytes == memory.nbytes
    return whole and address_of(memory) % mmap.PAGESIZE == 0


_EXCHANGING = threading.Lock()
# A child that was forked during an exchange might have a part of a model in the spare mapping.
os.register_at_fork(
    before=_EXCHANGING.acquire,
    after_in_parent=_EXCHANGING.release,
    after_in_child=_EXCHANGING.release,
)


def exchange(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> None:
    """Exchange the contents of two arrays of equal size, which share no page with other memory.

    Another thread that reads the arrays meanwhile may see zeros. A fork waits for the end of the
    exchange.

    Raises:
        OSError: The system cannot exchange pages; nothing has changed.
        MemoryError: Too little address space is left for the spare mapping; nothing has changed.
        ValueError: The arrays differ in size, or share pages with other memory.
    """
    if not one.nbytes and not other.nbytes:
        return
    own = has_pages_of_its_own(one) and has_pages_of_its_own(other)
    if one.nbytes != other.nbytes or not own:
        raise ValueError(
            f"{one.nbytes} and {other.nbytes} bytes cannot be exchanged: give two arrays of one "
            "size from memory_of"
        )
    whole = -(-one.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with _EXCHANGING:
        native.exchange(address_of(one), address_of(other), whole)


def populate(memory: mmap.mmap, check: Check) -> None:
    """Make the kernel allocate all pages of a new mapping, since this costs more at first use."""
    for begin in range(0, len(memory), STEP_BYTES):
        length = min(STEP_BYTES, len(memory) - begin)
        try:
            memory.madvise(POPULATE_WRITE, begin, length)
        except OSError:  # an older kernel
            np.frombuffer(memory, np.uint8)[begin : begin + length : mmap.PAGESIZE] = 0
        check()


def memory_ahead(nbytes: int) -> tuple[NDArray[np.uint8], Generator[None]]:
    """Return memory of this size, and a generator whose steps allocate the memory's pages.

    Raises:
        MemoryError: There is not enough memory.
    """
    memory = memory_of(nbytes)
    return memory, _touching(pages_of(memory))


def _touching(pages: Pages | None) -> Generator[None]:
    """Make the kernel allocate all pages, in steps. Bytes that are written meanwhile stay."""
    if pages is None:  # an empty array
        return
    for begin in range(0, len(pages), STEP_BYTES):
        try:
            pages.madvise(POPULATE_WRITE, begin, min(STEP_BYTES, len(pages) - begin))
        except OSError:  # an older kernel: pages are allocated on first use
            return
        yield
