"""A spare file descriptor, for work that must continue when no other descriptor is free."""

import errno
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

SCARCE = (errno.EMFILE, errno.ENFILE)  # the process, or the host, has no descriptor left


class Spare:
    """A file descriptor that is closed for a moment so that another file can be opened.

    This class is not thread-safe. Another thread may take the freed descriptor. Then callers do
    work that needs no descriptor, and try again later.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._take()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)  # not `os.close`: `os` may be gone when the interpreter ends

    @contextmanager
    def released(self) -> Generator[None]:
        """Release the descriptor during a `with` block, which can open and close one file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with suppress(OSError):  # no descriptor is free: the next use tries again
            self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
