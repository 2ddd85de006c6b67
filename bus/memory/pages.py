"""Private memory of whole pages: taken, touched ahead, and exchanged without being copied.

Theory of operation: Linux moves pages from one place of a process to another by `mremap`, which
costs what writing their table costs: with whole tables (2 MiB) 0.6 ms for a GiB. Three moves, by
way of a spare mapping, exchange what lies in two places. Nothing is ever unmapped in between
(MREMAP_DONTUNMAP): a hole would be taken by whatever another thread maps. Where a move fails there
may be one for a moment: it is filled at once, or, if another thread was quicker, the process ends
(or, where only the spare mapping is lost, goes on), and pages are not moved again.
"""

import mmap
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codecs import native

Check = Callable[[], None]  # called between steps; what it raises ends them

TABLE_BYTES = 2**21  # of pages that one table names: moved together if it begins at a multiple
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
STEP_BYTES = 2**26  # of memory that is taken at a time: a fraction of a tenth of a second


class Pages(mmap.mmap):
    """A mapping of this process alone. (The array over it keeps it, never the other way round.)

    Attributes:
        nbytes: Bytes of that array.
    """

    nbytes: int

    def __new__(cls, nbytes: int) -> "Pages":
        """Map so many bytes, and room to begin at a multiple of `TABLE_BYTES`."""
        room = nbytes + TABLE_BYTES if nbytes >= TABLE_BYTES else nbytes
        pages = super().__new__(cls, -1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.nbytes = nbytes
        return pages


def memory_of(
    nbytes: int, *, touched: bool = False, check: Check = lambda: None
) -> NDArray[np.uint8]:
    """Return zeros in pages that nothing else is in; with `touched`, the kernel gives all now.

    `check` is called between the steps of that, and may raise.

    Not by numpy, which asks for huge pages: where memory is fragmented, the kernel takes half a
    second to make those for 200 MiB, and copies between them are no faster.

    Raises:
        MemoryError: There is no memory for them.
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
    """Return where an array's bytes begin."""
    address: int = memory.__array_interface__["data"][0]
    return address


def pages_of(memory: NDArray[np.uint8]) -> Pages | None:
    """Return the mapping that an array lies in, if it is one of these."""
    base: Any = memory
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, Pages) else None


def within(pages: Pages, address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes of a mapping that lie at an address."""
    whole = np.frombuffer(pages, np.uint8)
    begin = address - address_of(whole)
    return whole[begin : begin + nbytes]


def has_pages_of_its_own(memory: NDArray[np.uint8]) -> bool:
    """Return whether nothing else lies in the pages of an array."""
    pages = pages_of(memory)
    whole = pages is not None and pages.nbytes == memory.nbytes
    return whole and address_of(memory) % mmap.PAGESIZE == 0


_EXCHANGING = threading.Lock()
# In a child that is forked in the middle, a model would lie in the spare mapping.
os.register_at_fork(
    before=_EXCHANGING.acquire,
    after_in_parent=_EXCHANGING.release,
    after_in_child=_EXCHANGING.release,
)


def exchange(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> None:
    """Exchange the contents of two arrays of one size, both with pages of their own.

    Whoever reads one of them meanwhile may see zeros. A fork waits until it is done.

    Raises:
        OSError: It cannot be done here; nothing has changed.
        MemoryError: There is no room for the spare mapping; nothing has changed.
        ValueError: These two cannot be exchanged.
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
    """Have the kernel give all pages of a fresh mapping now, cheaper than one by one."""
    for begin in range(0, len(memory), STEP_BYTES):
        length = min(STEP_BYTES, len(memory) - begin)
        try:
            memory.madvise(POPULATE_WRITE, begin, length)
        except OSError:  # another kernel
            np.frombuffer(memory, np.uint8)[begin : begin + length : mmap.PAGESIZE] = 0
        check()


def memory_ahead(nbytes: int) -> tuple[NDArray[np.uint8], Generator[None]]:
    """Return memory of this size, and what has the kernel give its pages before they are needed.

    Raises:
        MemoryError: There is none.
    """
    memory = memory_of(nbytes)
    return memory, _touching(pages_of(memory))


def _touching(pages: Pages | None) -> Generator[None]:
    """Have the kernel give all pages. They may be written to meanwhile, which loses nothing."""
    if pages is None:  # of no bytes
        return
    for begin in range(0, len(pages), STEP_BYTES):
        try:
            pages.madvise(POPULATE_WRITE, begin, min(STEP_BYTES, len(pages) - begin))
        except OSError:  # another kernel: pages come as they are needed
            return
        yield
