"""Waiting for a condition, with a deadline, and with words for when it is missed."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
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


def stop(pid: int) -> None:
    """Stop a process in its tracks, all threads of it: they run on for a moment after the signal.

    Raises:
        MissedError: It has not stopped within 10 s.
    """
    os.kill(pid, signal.SIGSTOP)
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    wait_for(lambda: all(") T " in stat.read_text() for stat in stats), f"{pid} has stopped", 10.0)
