"""A spare file descriptor, for work that must continue when the process has none left."""

import errno
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

SCARCE = (errno.EMFILE, errno.ENFILE)  # the process, or the host, has no descriptor left


class Spare:
    """A file descriptor that is closed for a moment so that another can be opened. Not thread-safe.

    Another thread may take it first. So callers try again later, and meanwhile do what needs no
    descriptor.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._take()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor >= 0:  # at the interpreter's exit `os` itself may be gone
            close(self._descriptor)

    @contextmanager
    def lent(self) -> Generator[None]:
        """While the block runs, release the descriptor, so that it can open and close a file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with suppress(OSError):  # none is free; tried again at the next use
            self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
