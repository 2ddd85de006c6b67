"""A worker's second thread, for slow work, since the first thread must answer pings meanwhile.

The thread copies versions from shared memory and decodes patches, one after another. When it is
idle, it touches memory ahead of the first use of that memory. The first job starts the thread. Jobs
are generators that do a little at each step, so they can be stopped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ...codecs.delta.patch import Delta
from ...codecs.errors import PatchError
from ...codecs.native import copy_crc32c, crc32c
from ..event_log import RateLimitedWarning
from ..protocol_limits import MODELS_MAX
from ..staged import Copying, Patching, StaleError
from ..worker.events import Copied, Decoded

log = logging.getLogger("weightbus.worker")

T = TypeVar("T")

AT_ONCE_BYTES = 2**20  # a smaller copy takes less time than waking the thread
CLOSE_SECONDS = 5.0  # seconds to wait at close for the current step, which takes some milliseconds


class Copier:
    """The queues of jobs, and the thread that runs them.

    Args:
        done: Called in that thread with each result.
    """

    def __init__(self, done: Callable[[Copied | Decoded], None]) -> None:
        self._done = done
        self._changed = threading.Condition()
        # Each job has a buffer, so there are few jobs.
        self._copies: deque[Copying | Patching] = deque()
        # Steps to run when idle. A publisher may cause many: then the oldest are dropped, without
        # harm.
        self._ahead: deque[Generator[None]] = deque(maxlen=MODELS_MAX)
        self._closed = False
        self._untouched = RateLimitedWarning(log, "memory was not touched ahead of its use: %s")
        self._thread: threading.Thread | None = None

    def copy(self, copy: Copying | Patching) -> None:
        """Queue a copy of a version, or the decoding of a patch.

        Raises:
            RuntimeError: The process cannot start another thread; nothing is done.
        """
        self._start()
        self._copies.append(copy)
        self._wake()

    def ahead(self, steps: Generator[None]) -> None:
        """Run these steps when the thread is idle."""
        self._start()
        self._ahead.append(steps)
        self._wake()

    def close(self) -> None:
        """End the thread; the current job is interrupted."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="weightbus-copy", daemon=True)
            thread.start()
            self._thread = thread

    def _wake(self) -> None:
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
        try:
            for _ in steps:
                if self._closed or self._copies:
                    self._ahead.appendleft(steps)
                    return
        except Exception as error:  # pages are then touched on first use
            self._untouched.warn(f"{type(error).__name__}: {error}", time.monotonic())


def decoded(job: Patching, stopped: Callable[[], bool] = lambda: False) -> Decoded:
    """Decode a patch, unless `stopped` returns True meanwhile; return the result."""
    begun = time.perf_counter()
    try:
        fault = _result(patching(job), stopped)
    except Exception as error:  # not fatal: the whole version is fetched instead
        log.exception("the patch to %s version %d cannot be decoded", job.model, job.key[1])
        fault = f"it cannot be decoded: {error!r}"
    fault = "it was stopped in the middle" if fault is None else fault
    return Decoded(job, fault, time.perf_counter() - begun)


def copied(copy: Copying, stopped: Callable[[], bool] = lambda: False) -> Copied:
    """Copy a version, unless `stopped` returns True meanwhile; return the result."""
    try:
        return Copied(copy, _result(copying(copy), stopped))
    except Exception:  # not fatal: the version is fetched over the network instead
        log.exception("%s version %d cannot be copied", copy.model, copy.key[1])
    return Copied(copy, None)


def _result(steps: Generator[None, None, T], stopped: Callable[[], bool]) -> T | None:
    """Run a generator and return its result; None if it was stopped."""
    with closing(steps):
        try:
            while not stopped():
                next(steps)
        except StopIteration as end:
            return cast("T", end.value)
    return None


def patching(job: Patching) -> Generator[None, None, str]:
    """Decode a patch, step by step; return an error text, "" on success. (D5)"""
    unwanted = "it is no longer needed"
    if not job.live:
        return unwanted
    try:
        patch = Delta(job.base.layout, job.patch.data)
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
    """Copy a version from shared memory, chunk by chunk; return the checksum of each chunk. (S5)

    The result is None if the memory is locked or has another version, or if the copy is cancelled.
    """
    crcs = np.zeros(copy.plan.count, np.uint32)
    try:
        with copy.memory.reading(copy.model, *copy.key):
            for index in range(copy.plan.count):
                begin, end = copy.plan.span(index)
                chunk = copy.memory.data[begin:end]
                if copy.cut is None:
                    crcs[index] = copy_crc32c(copy.buffer[begin:end], chunk)
                else:
                    crcs[index] = crc32c(chunk.data)
                    copy.cut.put(copy.buffer, index, chunk)
                copy.count = index + 1
                yield
                if not copy.live:
                    return None
    except StaleError:
        return None
    return crcs
