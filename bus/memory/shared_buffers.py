"""Allocates a relay's buffers: segments, from which workers on its host copy whole versions.

The relay fills a buffer while a version arrives. So until the version is whole, the buffer's
segment is locked and has no stamp (`segment.py`): from `SharedBuffers.claim` to `Segment.release`.
A buffer that another process is copying from cannot be claimed.
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
    """The data section of a segment. The array keeps the segment alive.

    Attributes:
        segment: The segment.
    """

    segment: Segment


class SharedBuffers:
    """Allocates the buffers of a relay's versions."""

    def __init__(self) -> None:
        self._usable = weakref.WeakSet[Segment]()

    def allocate(self, nbytes: int) -> Memory:
        """Return a claimed buffer of this size, in private memory if there is no shared memory.

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

        This is so while a worker copies from the buffer, and after `retire`.
        """
        segment = self.segment_of(memory)
        return segment is None or (segment in self._usable and segment.claim())

    def retire(self) -> None:
        """Write no later version to existing buffers, so that processes that map them read none.

        Any thread may call this. A version that is arriving now is still readable.
        """
        self._usable = weakref.WeakSet[Segment]()

    def segment_of(self, memory: Memory) -> Segment | None:
        """Return the segment that a buffer is in; None if the buffer is private memory."""
        found: Segment | None = getattr(memory, "segment", None)
        return found
