"""What `publish_async` returns: a future of the receipt, which says so once if nobody asks of it.

Whoever publishes and goes on may drop it. That a publish has failed would then be known to nobody,
so it is a warning in the log, of which there is one from time to time.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..complaints import Complaints
from ..errors import PublishError
from ..receipt import Receipt


class Promise(Future[Receipt]):
    """A receipt to come.

    Args:
        complaints: Where it is said that nobody has asked for one that failed.
    """

    def __init__(self, complaints: Complaints) -> None:
        super().__init__()
        self._complaints, self._asked = complaints, False

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the receipt; see `Future`."""
        self._asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for what it failed with, if it did; see `Future`."""
        self._asked = True
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Receipt]], Any]) -> None:
        """Call this once it is done; see `Future`."""
        self._asked = True
        super().add_done_callback(fn)

    def __del__(self) -> None:
        if self._asked or not self.done() or self.cancelled():
            return
        error = super().exception()
        if isinstance(error, PublishError):
            self._complaints.warn(error, time.monotonic())
