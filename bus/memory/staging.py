"""Where a version waits until it is whole: the buffers of one model, and what they then hold.

There are at most two. One holds a version that is complete and waits to be applied, the other the
version that is arriving. They are kept and used again, so that a steady stream of versions touches
no fresh memory.
"""

import mmap
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..limits import BUFFERS_MAX
from .pages import memory_of_pages, pages_of

Check = Callable[[], None]  # called between steps; what it raises ends them

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
STEP_BYTES = 2**26  # of memory that is taken at a time: a fraction of a tenth of a second


def populate(memory: mmap.mmap, check: Check) -> None:
    """Have the kernel give all pages of a fresh mapping now, cheaper than one by one."""
    for begin in range(0, len(memory), STEP_BYTES):
        length = min(STEP_BYTES, len(memory) - begin)
        try:
            memory.madvise(POPULATE_WRITE, begin, length)
        except OSError:  # another kernel
            np.frombuffer(memory, np.uint8)[begin : begin + length : mmap.PAGESIZE] = 0
        check()


def memory_of(
    nbytes: int, *, touched: bool = False, check: Check = lambda: None
) -> NDArray[np.uint8]:
    """Return memory in pages of its own; with `touched`, the kernel gives all of it now.

    `check` is called between the steps of that, and may raise.

    Not by numpy, which asks for huge pages: where memory is fragmented, the kernel takes half a
    second to make those for 200 MiB, and copies between them are no faster.

    Raises:
        MemoryError: There is none.
    """
    memory = memory_of_pages(nbytes)
    pages = pages_of(memory)
    if touched and pages is not None:
        populate(pages, check)
    return memory


class Buffers:
    """The staging buffers of one model."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._taken = 0

    def reserve(self, nbytes: int) -> None:
        """Make a buffer of this size now, so that the first version need not wait for it."""
        if nbytes and not self._taken and not self._free:
            with suppress(MemoryError):  # whoever asks for it then is told
                self._free.append(memory_of(nbytes, touched=True))

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return a buffer of this size, one used before if possible; None if all are in use.

        Raises:
            MemoryError: There is no memory for it.
        """
        if self._taken >= BUFFERS_MAX:
            return None
        fits = next((i for i, b in enumerate(self._free) if b.nbytes == nbytes), None)
        if fits is not None:
            buffer = self._free.pop(fits)
        else:
            self._free.clear()  # the model has changed its size: the old memory will not fit again
            buffer = memory_of(nbytes)
        self._taken += 1
        return buffer

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Take a buffer back."""
        self._taken -= 1
        self._free.append(buffer)
