"""Waiting for a condition, with a deadline, and with words for when it is missed."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LOOK_SECONDS = 0.05  # at most, between two looks at what only answers when it is asked


class MissedError(Exception):
    """A condition did not come to hold in time."""


def wait_for(condition: Callable[[], T], what: str, seconds: float) -> T:
    """Return the first value of the condition that is true.

    Raises:
        MissedError: There was none within so many seconds.
    """
    deadline = time.monotonic() + seconds
    pause, look = threading.Event(), 0.002
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise MissedError(f"{what}: not within {seconds:.0f} s")
        pause.wait(look)
        look = min(2 * look, LOOK_SECONDS)
