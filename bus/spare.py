"""A descriptor that is kept for work that must go on where a process has none left."""

import errno
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

SCARCE = (errno.EMFILE, errno.ENFILE)  # the process, or the host, has no descriptor left


class Spare:
    """A descriptor that is given back to the system while somebody needs one. For one thread.

    Another thread may be quicker to take it. So its user tries again later, and does without a
    descriptor what can be done without.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._take()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor >= 0:  # at the interpreter's end `os` itself may be gone
            close(self._descriptor)

    @contextmanager
    def lent(self) -> Generator[None]:
        """Have one descriptor to open a file with, and to close it again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with suppress(OSError):  # there is none; next time there may be
            self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
