"""Runs a worker's slow work in a second thread, so that the first thread can answer pings.

The thread copies versions from shared memory and decodes patches, one after another. When it is
idle, it prefaults memory that will be used later. The first job starts the thread. Jobs are
generators that do a little work at each step, so they can be stopped between two steps.
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
CLOSE_SECONDS = 5.0  # seconds that `close` waits for the current step, which takes milliseconds


class Copier:
    """The queues of jobs, and the thread that runs them.

    Args:
        done: Called in that thread with each result.
    """

    def __init__(self, done: Callable[[Copied | Decoded], None]) -> None:
        self._done = done
        self._changed = threading.Condition()
        # This queue is short, since each job has a buffer of its model.
        self._jobs: deque[Copying | Patching] = deque()
        # Generators to run when idle. A publisher may cause many; then the oldest are dropped,
        # which does no harm.
        self._idle_work: deque[Generator[None]] = deque(maxlen=MODELS_MAX)
        self._closed = False
        self._not_prefaulted = RateLimitedWarning(log, "memory was not prefaulted: %s")
        self._thread: threading.Thread | None = None

    def queue(self, job: Copying | Patching) -> None:
        """Queue a copy of a version, or the decoding of a patch.

        Raises:
            RuntimeError: The process cannot start another thread; nothing is queued.
        """
        self._start()
        self._jobs.append(job)
        self._wake()

    def run_when_idle(self, steps: Generator[None]) -> None:
        """Run a generator when the thread has no job.

        Raises:
            RuntimeError: The process cannot start another thread; nothing is queued.
        """
        self._start()
        self._idle_work.append(steps)
        self._wake()

    def close(self) -> None:
        """End the thread after the current step; unfinished jobs are dropped."""
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
                self._changed.wait_for(lambda: self._jobs or self._idle_work or self._closed)
            if self._jobs:
                job, stop = self._jobs.popleft(), lambda: self._closed
                self._done(decoded(job, stop) if isinstance(job, Patching) else copied(job, stop))
            elif self._idle_work:
                self._run_idle(self._idle_work.popleft())
        self._jobs.clear()
        self._idle_work.clear()

    def _run_idle(self, steps: Generator[None]) -> None:
        try:
            for _ in steps:
                if self._closed or self._jobs:
                    self._idle_work.appendleft(steps)
                    return
        except Exception as error:  # the kernel then maps pages on their first use
            self._not_prefaulted.warn(f"{type(error).__name__}: {error}", time.monotonic())


def decoded(job: Patching, stopped: Callable[[], bool] = lambda: False) -> Decoded:
    """Decode a patch and return the result; stop early if `stopped` returns True."""
    started = time.perf_counter()
    try:
        fault = _result(patching(job), stopped)
    except Exception as error:  # not fatal: the whole version is fetched instead
        log.exception("the patch to %s version %d cannot be decoded", job.model, job.key[1])
        fault = f"it cannot be decoded: {error!r}"
    fault = "it was stopped in the middle" if fault is None else fault
    return Decoded(job, fault, time.perf_counter() - started)


def copied(copy: Copying, stopped: Callable[[], bool] = lambda: False) -> Copied:
    """Copy a version and return the result; stop early if `stopped` returns True."""
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
    """Decode a patch, step by step; return an error text, or "" on success. (D5)"""
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
