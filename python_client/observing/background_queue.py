"""Runs queued jobs in a separate thread, which exists only while there are jobs."""

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class BackgroundQueue:
    """Runs jobs one after another, so that callers do not block.

    Args:
        name: The name of the thread.
        capacity: The maximum number of queued jobs.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self._name, self._capacity = name, capacity
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = False  # whether the thread exists

    def put(self, job: Job) -> bool:
        """Queue a job, which must not raise.

        Return False if the queue is full or its thread cannot be started.
        """
        with self._changed:
            if len(self._jobs) >= self._capacity:
                return False
            if not self._running:
                try:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                except (RuntimeError, MemoryError):  # no thread can be started
                    return False
            self._running = True
            self._jobs.append(job)
            return True

    def settle(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all jobs are done; return whether they are done."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()

    def _next(self) -> Job | None:
        with self._changed:
            if self._jobs:
                return self._jobs.popleft()
            self._running = False
            self._changed.notify_all()
            return None
