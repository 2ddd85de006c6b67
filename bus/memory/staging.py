"""Memory that a version is staged in: taken, touched ahead, and filled from shared memory.

What takes long is a generator, which does a little at each step: whoever runs it can stop it, and
needs a thread of its own for it if others must not wait.
"""

import mmap
from collections.abc import Callable, Generator

import numpy as np
from numpy.typing import NDArray

from ...codecs.delta.patch import Patch
from ...codecs.errors import PatchError
from ...codecs.native import copy_crc32c
from ..staged import Copying, Patching, StaleError
from .pages import Pages, memory_of_pages, pages_of

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


def memory_ahead(nbytes: int) -> tuple[NDArray[np.uint8], Generator[None]]:
    """Return memory of this size, and what has the kernel give its pages before they are needed.

    Raises:
        MemoryError: There is none.
    """
    memory = memory_of_pages(nbytes)
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


def patching(job: Patching) -> Generator[None, None, str]:
    """Decode a patch, step by step; return why it is of no use, nothing if it is. (D5)"""
    unwanted = "nobody wants it any more"
    if not job.live:
        return unwanted
    try:
        patch = Patch(job.base.layout, job.patch.data)
        if patch.header.target != job.digest:
            return f"it leads to {patch.header.target[:12]}; announced is {job.digest[:12]}"
        for _ in patch.steps(job.base.data, job.buffer):
            yield
            if not job.live:
                return unwanted
    except (PatchError, MemoryError) as error:
        return str(error) or "there is no memory to decode it"
    return ""


def copying(copy: Copying) -> Generator[None, None, NDArray[np.uint32] | None]:
    """Copy a version from shared memory, chunk by chunk; return the checksum of each. (S5)

    None: it is of no use, since the memory is locked or holds another version, before or only after
    the copy, or since nobody wants it any more.
    """
    crcs = np.zeros(copy.plan.count, np.uint32)
    try:
        with copy.memory.reading(copy.model, *copy.key):
            for index in range(copy.plan.count):
                begin, end = copy.plan.span(index)
                crcs[index] = copy_crc32c(copy.buffer[begin:end], copy.memory.data[begin:end])
                copy.count = index + 1
                yield
                if not copy.live:
                    return None
    except StaleError:
        return None
    return crcs
