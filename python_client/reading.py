"""A lock that many readers share and one writer takes alone: forward passes, and an apply.

A writer that waits goes before new readers, so that steady forward passes cannot keep new weights
out. A thread that is reading or writing may read inside. Nobody waits without a deadline, and who
gave up is told who was in the way. After a write that failed half-way there is nothing to read
until one has succeeded.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

READING_SECONDS = 60.0  # that a reader waits for an apply unless told otherwise
LOST_SECONDS = 0.5  # between two looks of a waiting writer at whether readers are still there


class InUseError(TimeoutError):
    """Readers did not leave in time."""


Alive = Callable[[int], bool]  # tells whether a thread still does what it began


class _Holder:
    """A thread that reads or writes."""

    __slots__ = ("alive", "depth", "doing", "since", "thread")

    def __init__(self, doing: str, thread: int, alive: Alive | None = None) -> None:
        self.doing, self.thread, self.alive = doing, thread, alive
        self.since, self.depth = time.monotonic(), 0

    def __str__(self) -> str:
        names = {t.ident: t.name for t in threading.enumerate()}
        name = names.get(self.thread, f"{self.thread} (ended)")
        return f"{self.doing} in thread {name} for {time.monotonic() - self.since:.1f} s"


class ReadingLock:
    """A readers-writer lock that prefers the writer.

    A reader that meets no writer takes no lock of the system's: it notes itself, and only then
    looks whether somebody writes or waits to; a writer says that it waits, and only then looks for
    readers. So one of the two sees the other.
    """

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
        self.enter(timeout, model)
        try:
            yield
        finally:
            self.leave()

    def enter(
        self,
        timeout: float = READING_SECONDS,
        model: str | None = None,
        *,
        doing: str = "reading (`reading()`)",
        alive: Alive | None = None,
    ) -> None:
        """Begin to read, as `reading` does with these arguments; `leave` must follow.

        Args:
            timeout, model: As of `reading`.
            doing: What is done, for writers that wait for its end.
            alive: Where `leave` may be left out, tells a waiting writer whether it was.

        Raises:
            Exception: As `reading`.
        """
        me = threading.get_ident()
        holder = self._readers.get(me)
        if holder is None:
            self._readers[me] = holder = _Holder(doing, me, alive)
            if self._waiting_writers or self._writer or self._torn:
                del self._readers[me]
                self._enter_slowly(me, holder, timeout, model)
        elif self._torn:
            self._check_whole(me, model)
        holder.depth += 1

    def _enter_slowly(self, me: int, holder: _Holder, timeout: float, model: str | None) -> None:
        with self._lock:
            self._changed.notify_all()  # a writer may have seen this reader, which is none yet
            free = self._changed.wait_for(
                lambda: (
                    me in self._writer
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
            self._check_whole(me, model)
            holder.since = time.monotonic()
            self._readers[me] = holder

    def _check_whole(self, me: int, model: str | None) -> None:
        late = None if me in self._readers or me in self._writer else self._late
        for torn, error in (*self._torn.items(), *([late] if late else [])):
            if model in (None, torn):
                raise error.with_traceback(None)

    def leave(self) -> None:
        """End what `enter` began, in the same thread."""
        me = threading.get_ident()
        holder = self._readers.get(me)
        if holder is None:
            return  # a writer took it for one that would not leave any more
        holder.depth -= 1
        if holder.depth:
            return
        del self._readers[me]
        if self._waiting_writers:
            with self._lock:
                self._changed.notify_all()

    @property
    def held(self) -> bool:
        """Whether this very thread reads or writes."""
        me = threading.get_ident()
        return me in self._readers or me in self._writer

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
                if not self._wait_alone(timeout):
                    others = self._writer or self._readers
                    raise InUseError(
                        f"the weights were in use for more than {timeout} s: {_all(others)}"
                    )
                self._writer[me] = _Holder(doing, me)  # before it is none that waits any more
            finally:
                self._waiting_writers -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._writer.clear()
                self._late = None
                self._changed.notify_all()

    def _wait_alone(self, timeout: float) -> bool:
        """Wait until nobody else reads or writes; readers that are gone do not count."""
        deadline = time.monotonic() + timeout
        while True:
            look = min(LOST_SECONDS, deadline - time.monotonic())
            if self._changed.wait_for(lambda: not (self._writer or self._readers), look):
                return True
            if time.monotonic() >= deadline:
                return False
            for thread, holder in [*self._readers.items()]:
                if holder.alive is not None and not holder.alive(thread):
                    self._readers.pop(thread, None)

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
    return "; ".join(map(str, [*holders.values()]))
