"""A lock that many readers share and one writer takes alone: forward passes, and an apply.

A writer that waits goes before new readers, so that steady forward passes cannot keep new weights
out. A thread that is reading or writing may read inside. Nobody waits without a deadline, and who
gave up is told who was in the way. After a write that failed half-way there is nothing to read
until one has succeeded.
"""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

READING_SECONDS = 60.0  # that a reader waits for an apply unless told otherwise


class InUseError(TimeoutError):
    """Readers did not leave in time."""


@dataclass(slots=True)
class _Holder:
    """A thread that reads or writes."""

    doing: str
    name: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.monotonic)
    depth: int = 0

    def __str__(self) -> str:
        return f"{self.doing} in thread {self.name} for {time.monotonic() - self.since:.1f} s"


class ReadingLock:
    """A readers-writer lock that prefers the writer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._readers: dict[int, _Holder] = {}  # by thread
        self._writer: dict[int, _Holder] = {}  # the same, one at most
        self._waiting_writers = 0
        self._torn: dict[str, Exception] = {}  # by model, what has left it without a version
        # The writer of this model has no time left, and goes on all the same.
        self._late: tuple[str, Exception] | None = None

    @contextmanager
    def reading(
        self, timeout: float = READING_SECONDS, model: str | None = None
    ) -> Generator[None]:
        """Read: nothing is written meanwhile.

        Args:
            timeout: Seconds to wait for a writer.
            model: What alone is read: that another holds no version is no matter. None: all.

        Raises:
            TimeoutError: A writer was at it for longer than `timeout` seconds; it says who.
            Exception: What was handed to `tear`, or, if nobody waits any more, to `despair`.
        """
        me = threading.get_ident()
        with self._lock:
            free = self._changed.wait_for(
                lambda: (
                    me in self._readers
                    or me in self._writer
                    or self._late is not None
                    or not (self._writer or self._waiting_writers)
                ),
                timeout,
            )
            if not free:
                others = self._writer or self._readers  # whom a writer waits for
                raise TimeoutError(
                    f"weights were being applied for more than {timeout} s: {_all(others)}"
                )
            late = None if me in self._readers or me in self._writer else self._late
            for torn, error in (*self._torn.items(), *([late] if late else [])):
                if model in (None, torn):
                    raise error.with_traceback(None)
            self._readers.setdefault(me, _Holder("reading (`reading()`)")).depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[me].depth -= 1
                if not self._readers[me].depth:
                    del self._readers[me]
                self._changed.notify_all()

    def check_not_reading(self) -> None:
        """Check that this thread may write, before anything is done that cannot be undone.

        Raises:
            RuntimeError: It is reading: it would wait for itself.
        """
        if threading.get_ident() in self._readers:
            raise RuntimeError("receive() inside reading(): leave the reading block first")

    @contextmanager
    def writing(self, timeout: float, doing: str = "applying a version") -> Generator[None]:
        """Write: nobody reads or writes meanwhile.

        Args:
            timeout: Seconds to wait for others to leave.
            doing: What is done, for those who wait for its end.

        Raises:
            InUseError: Readers were at it for longer; it says who.
            RuntimeError: This very thread is reading.
        """
        me = threading.get_ident()
        with self._lock:
            self.check_not_reading()
            self._waiting_writers += 1
            try:
                free = self._changed.wait_for(lambda: not (self._writer or self._readers), timeout)
            finally:
                self._waiting_writers -= 1
                self._changed.notify_all()
            if not free:
                others = self._writer or self._readers
                raise InUseError(
                    f"the weights were in use for more than {timeout} s: {_all(others)}"
                )
            self._writer[me] = _Holder(doing)
        try:
            yield
        finally:
            with self._lock:
                self._writer.clear()
                self._late = None
                self._changed.notify_all()

    def tear(self, model: str, error: Exception) -> None:
        """A model holds no version: have readers told, from now on. (For the writer.)"""
        self._torn[model] = error

    def despair(self, model: str, error: Exception) -> None:
        """Who writes has no time left: have readers told, and not wait any more until it is out."""
        with self._lock:
            self._late = model, error
            self._changed.notify_all()

    def mend(self, model: str) -> bool:
        """A model holds a version again; return whether it did not before. (For the writer.)"""
        return self._torn.pop(model, None) is not None


def _all(holders: dict[int, _Holder]) -> str:
    return "; ".join(map(str, holders.values()))
