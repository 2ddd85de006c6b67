"""The buffers of a relay: segments, from which workers on the relay's host copy whole versions.

A worker fills a buffer while a version arrives. So the segment is locked, and has no stamp, from
the moment when a version is given the buffer (`SharedBuffers.claim`) until the version is whole
(`Segment.release`). A buffer that another process is copying from cannot be claimed.
"""

import time
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pages import memory_of
from .segment import Segment, unshared

Memory = NDArray[np.uint8]


class _Data(np.ndarray[Any, np.dtype[np.uint8]]):
    """The data section of a segment, which exists as long as this array.

    Attributes:
        segment: The segment.
    """

    segment: Segment


class SharedBuffers:
    """Allocates the buffers of a relay's versions."""

    def __init__(self) -> None:
        self._usable = weakref.WeakSet[Segment]()

    def allocate(self, nbytes: int) -> Memory:
        """Return memory of this size, claimed; private memory if there is no shared memory.

        Raises:
            MemoryError: There is not enough memory.
        """
        try:
            segment = Segment(nbytes)
        except OSError as error:
            unshared.warn(error.strerror or error, time.monotonic())
            return memory_of(nbytes)
        segment.claim()
        data = segment.data.view(_Data)
        data.segment = segment
        self._usable.add(segment)
        return data

    def claim(self, memory: Memory) -> bool:
        """Lock a buffer and clear its stamp; return False if it must not be overwritten now.

        A worker may be copying from it, or it may be retired.
        """
        segment = self.segment_of(memory)
        return segment is None or (segment in self._usable and segment.claim())

    def retire(self) -> None:
        """Write no more versions to existing buffers: processes that map them must not read more.

        Any thread may call this. A version that is arriving now is still readable.
        """
        self._usable = weakref.WeakSet[Segment]()

    def segment_of(self, memory: Memory) -> Segment | None:
        """Return the segment that a buffer is in; None if the buffer is private memory."""
        found: Segment | None = getattr(memory, "segment", None)
        return found
