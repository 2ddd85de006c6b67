"""A worker's second thread, for what takes long: the first must answer pings meanwhile.

It copies versions from shared memory and decodes patches, one after another, and touches memory
ahead of its first use when there is nothing else to do. It starts with the first thing to do.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing

from ..limits import MODELS_MAX
from ..memory.staging import copying, patching
from ..staged import Copying, Patching
from ..worker.events import Copied, Decoded

log = logging.getLogger("weightbus.worker")

AT_ONCE_BYTES = 2**20  # copied sooner than the other thread would be awake
CLOSE_SECONDS = 5.0  # for the step that it is at, which takes some milliseconds


class Copier:
    """What is to be copied, and touched.

    Args:
        done: Told how each has ended; called in the thread of its own.
    """

    def __init__(self, done: Callable[[Copied | Decoded], None]) -> None:
        self._done = done
        self._changed = threading.Condition()
        # Each has a buffer, so there are few.
        self._copies: deque[Copying | Patching] = deque()
        # What a publisher may ask for again and again: the oldest are forgotten, at no loss.
        self._ahead: deque[Generator[None]] = deque(maxlen=MODELS_MAX)
        self._closed = False
        self._thread: threading.Thread | None = None

    def copy(self, copy: Copying | Patching) -> None:
        """Copy a version, or decode a patch, soon."""
        self._copies.append(copy)
        self._go()

    def ahead(self, steps: Generator[None]) -> None:
        """Do this when there is time, step by step."""
        self._ahead.append(steps)
        self._go()

    def close(self) -> None:
        """End the thread, in the middle of what it does."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _go(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightbus-copy", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.notify()

    # For the thread itself.

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._copies or self._ahead or self._closed)
            if self._copies:
                job, stop = self._copies.popleft(), lambda: self._closed
                self._done(decoded(job, stop) if isinstance(job, Patching) else copied(job, stop))
            elif self._ahead:
                self._touch(self._ahead.popleft())
        self._copies.clear()
        self._ahead.clear()

    def _touch(self, steps: Generator[None]) -> None:
        for _ in steps:
            if self._closed or self._copies:
                self._ahead.appendleft(steps)
                return


def decoded(job: Patching, stopped: Callable[[], bool] = lambda: False) -> Decoded:
    """Decode a patch, unless told to stop in the middle; return how that has ended."""
    fault, begun = "it was stopped in the middle", time.perf_counter()
    with closing(patching(job)) as steps:
        try:
            while not stopped():
                next(steps)
        except StopIteration as end:
            fault = end.value
        except Exception as error:  # all of the version can still be fetched
            log.exception("the patch to %s version %d cannot be decoded", job.model, job.key[1])
            fault = f"it cannot be decoded: {error!r}"
    return Decoded(job, fault, time.perf_counter() - begun)


def copied(copy: Copying, stopped: Callable[[], bool] = lambda: False) -> Copied:
    """Copy a version, unless told to stop in the middle; return how that has ended."""
    crcs = None
    with closing(copying(copy)) as steps:
        try:
            while not stopped():
                next(steps)
        except StopIteration as end:
            crcs = end.value
        except Exception:  # it can still be fetched
            log.exception("%s version %d cannot be copied", copy.model, copy.key[1])
    return Copied(copy, crcs)
