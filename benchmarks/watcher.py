"""Watch a worker's tensors change from another process: `... watcher FILE SHAPE`.

A worker cannot measure when other readers see the first byte change. So its tensors are in shared
memory, and this process polls the first and last element of each, every few microseconds, which
needs a core.
"""

import itertools
import sys
import threading
import time

import numpy as np
from numpy.typing import NDArray

from .model import Shape
from .process import Answer, Answers
from .shelf import reach

SECONDS = 120.0


class Watcher:
    """Polls the first and last element of every tensor."""

    def __init__(self, file: str, shape: Shape) -> None:
        self._flat: NDArray[np.int32] = reach(file, shape.nbytes).view(np.int32)
        ends: list[int] = list(itertools.accumulate(shape.elements()))
        self._at = np.array([*(0, *ends[:-1]), *(end - 1 for end in ends)], np.int64)
        self._thread: threading.Thread | None = None
        self._pause = 0.0

    def arm(self) -> Answer:
        """Start to watch for the next version."""
        self._pause = 0.0
        self._thread = threading.Thread(target=self._watch, args=(self._look(),))
        self._thread.start()
        return {}

    def seen(self) -> Answer:
        """Return the time from the first change to the last."""
        assert self._thread is not None
        self._thread.join(SECONDS)
        if not self._pause:
            raise TimeoutError("not all tensors have changed")
        return {"seconds": self._pause}

    def _look(self) -> NDArray[np.int32]:
        return self._flat[self._at]

    def _watch(self, before: NDArray[np.int32]) -> None:
        deadline = time.perf_counter() + SECONDS
        began = 0.0
        while (now := time.perf_counter()) < deadline:
            changed = self._look() != before
            if not began and changed.any():
                began = now
            if changed.all():
                self._pause = time.perf_counter() - began
                return


if __name__ == "__main__":
    watcher = Watcher(sys.argv[1], Shape.parse(sys.argv[2]))
    Answers({"arm": watcher.arm, "seen": watcher.seen}).serve()
