"""A lock that many readers share and one writer takes alone: forward passes, and an apply.

A writer that waits goes before new readers, so that steady forward passes cannot keep new weights
out. A thread that is reading or writing may read inside.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager


class InUseError(TimeoutError):
    """Readers did not leave in time."""


class ReadingLock:
    """A readers-writer lock that prefers the writer."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: dict[int, int] = {}  # by thread, how deep it is
        self._writer: int | None = None
        self._waiting_writers = 0

    @contextmanager
    def reading(self, timeout: float | None = None) -> Generator[None]:
        """Read: nothing is written meanwhile.

        Raises:
            TimeoutError: A writer was at it for longer than `timeout` seconds.
        """
        me = threading.get_ident()
        with self._changed:
            free = self._changed.wait_for(
                lambda: (
                    me in self._readers
                    or me == self._writer
                    or (self._writer is None and not self._waiting_writers)
                ),
                timeout,
            )
            if not free:
                raise TimeoutError(f"weights were being applied for more than {timeout} s")
            self._readers[me] = self._readers.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[me] -= 1
                if not self._readers[me]:
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
    def writing(self, timeout: float | None = None) -> Generator[None]:
        """Write: nobody reads or writes meanwhile.

        Raises:
            InUseError: Readers were at it for longer than `timeout` seconds.
            RuntimeError: This very thread is reading.
        """
        me = threading.get_ident()
        with self._changed:
            self.check_not_reading()
            self._waiting_writers += 1
            try:
                free = self._changed.wait_for(
                    lambda: self._writer is None and not self._readers, timeout
                )
            finally:
                self._waiting_writers -= 1
                self._changed.notify_all()
            if not free:
                raise InUseError(f"the weights were in use (`reading()`) for more than {timeout} s")
            self._writer = me
        try:
            yield
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()
