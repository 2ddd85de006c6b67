"""Private memory in whole pages: allocated, touched ahead of use, and exchanged without a copy.

Theory of operation: Linux moves pages within a process by `mremap`, at the cost of writing their
page tables: with whole tables (2 MiB) 0.6 ms for a GiB. Three moves, through a spare mapping,
exchange the contents of two places. Nothing is unmapped in between (MREMAP_DONTUNMAP): another
thread's mapping could take the hole. A failed move may leave a hole for a moment: it is filled
immediately; if another thread was quicker, the process aborts (or, if only the spare mapping is
lost, goes on), and pages are not moved again.
"""

import mmap
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codecs import native

Check = Callable[[], None]  # called between steps, which end if it raises

TABLE_BYTES = 2**21  # of pages in one page table: they move together if aligned to it
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
STEP_BYTES = 2**26  # of memory that is allocated at a time: a fraction of a tenth of a second


class Pages(mmap.mmap):
    """A private mapping. (The array over it keeps it alive, never the other way round.)

    Attributes:
        nbytes: The size of that array.
    """

    nbytes: int

    def __new__(cls, nbytes: int) -> "Pages":
        """Map `nbytes` bytes, and room to align them to `TABLE_BYTES`."""
        room = nbytes + TABLE_BYTES if nbytes >= TABLE_BYTES else nbytes
        pages = super().__new__(cls, -1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.nbytes = nbytes
        return pages


def memory_of(
    nbytes: int, *, touched: bool = False, check: Check = lambda: None
) -> NDArray[np.uint8]:
    """Return zeros in pages of their own; with `touched`, the kernel allocates all of them now.

    `check` is called between the steps of that, and may raise.

    numpy is not used, since it requests huge pages: where memory is fragmented, the kernel takes
    half a second to make those for 200 MiB, and copies between them are no faster.

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
    """Return the mapping that contains an array, if it is a `Pages`."""
    base: Any = memory
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, Pages) else None


def within(pages: Pages, address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes of a mapping at an address."""
    whole = np.frombuffer(pages, np.uint8)
    begin = address - address_of(whole)
    return whole[begin : begin + nbytes]


def has_pages_of_its_own(memory: NDArray[np.uint8]) -> bool:
    """True if nothing else lies in the pages of an array."""
    pages = pages_of(memory)
    whole = pages is not None and pages.nbytes == memory.nbytes
    return whole and address_of(memory) % mmap.PAGESIZE == 0


_EXCHANGING = threading.Lock()
# A child that is forked during an exchange would have a model in the spare mapping.
os.register_at_fork(
    before=_EXCHANGING.acquire,
    after_in_parent=_EXCHANGING.release,
    after_in_child=_EXCHANGING.release,
)


def exchange(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> None:
    """Exchange the contents of two arrays of one size, both with pages of their own.

    Another thread that reads one of them meanwhile may see zeros. A fork waits until the end.

    Raises:
        OSError: It is not possible here; nothing has changed.
        MemoryError: There is no room for the spare mapping; nothing has changed.
        ValueError: These two arrays cannot be exchanged.
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
    """Have the kernel allocate all pages of a new mapping now, cheaper than on first use."""
    for begin in range(0, len(memory), STEP_BYTES):
        length = min(STEP_BYTES, len(memory) - begin)
        try:
            memory.madvise(POPULATE_WRITE, begin, length)
        except OSError:  # an older kernel
            np.frombuffer(memory, np.uint8)[begin : begin + length : mmap.PAGESIZE] = 0
        check()


def memory_ahead(nbytes: int) -> tuple[NDArray[np.uint8], Generator[None]]:
    """Return memory of this size, and a generator that has its pages allocated ahead of use.

    Raises:
        MemoryError: There is not enough memory.
    """
    memory = memory_of(nbytes)
    return memory, _touching(pages_of(memory))


def _touching(pages: Pages | None) -> Generator[None]:
    """Have the kernel allocate all pages. They may be written meanwhile, without loss."""
    if pages is None:  # an empty array
        return
    for begin in range(0, len(pages), STEP_BYTES):
        try:
            pages.madvise(POPULATE_WRITE, begin, min(STEP_BYTES, len(pages) - begin))
        except OSError:  # an older kernel: pages are allocated on first use
            return
        yield
