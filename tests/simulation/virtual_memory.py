"""Shared memory without a kernel: segments of processes that live and die, and their locks.

The package's own code reads it (`segment.StampedMemory`, `copier.copying`), and claims and stamps
it (`snapshots`); this module has only the memory, its stamp, and its lock.
"""

from collections.abc import Callable

import numpy as np

from weightbus.bus.memory.segment import StampedMemory, stamp_of
from weightbus.bus.messages import Shared

Lives = Callable[[], bool]  # whether a process does, which has what it locked and opened


class VirtualSegment:
    """A segment, as its publisher has it (`segment.Segment`).

    Args:
        number: Which one, of all that there ever were.
        nbytes: Bytes of the data section.
        lives: Whether its publisher does.
    """

    def __init__(self, number: int, nbytes: int, lives: Lives) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self.shared = Shared(f"/proc/1/fd/{number}", f"{number:032x}")
        self.lives, self.stamp = lives, b""
        self._claimed = False
        self._views: list[VirtualView] = []

    def claim(self) -> bool:
        """Take it for a new fill; False if a worker is copying from it."""
        if any(view.held for view in self._views):
            return False
        self._claimed, self.stamp = True, b""
        return True

    def release(self, model: str, epoch: int, version: int, *, late: bool = False) -> None:
        """The fill is whole: stamp it, and let workers copy."""
        assert not late, "there are no devices here"
        self._claimed, self.stamp = False, stamp_of(model, epoch, version)

    @property
    def filling(self) -> bool:
        """Whether its publisher holds the lock, which ends with it."""
        return self._claimed and self.lives()

    def open(self, lives: Lives) -> "VirtualView":
        """Open it in another process."""
        self._views = [*(view for view in self._views if view.lives()), VirtualView(self, lives)]
        return self._views[-1]


class VirtualView(StampedMemory):
    """A segment as a worker has opened it."""

    def __init__(self, segment: VirtualSegment, lives: Lives) -> None:
        self.data = segment.data.view()
        self.data.flags.writeable = False
        self.lives, self._segment = lives, segment
        self._holders = 0

    @property
    def held(self) -> bool:
        """Whether a worker that lives holds the lock."""
        return self._holders > 0 and self.lives()

    def _hold(self) -> bool:
        if self._segment.filling:
            return False
        self._holders += 1
        return True

    def _let_go(self) -> None:
        self._holders -= 1

    def _stamp(self) -> bytes:
        return self._segment.stamp
