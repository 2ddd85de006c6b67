"""weightbus, applied by a background thread of the worker after `start()`."""

import threading

from ..fleet import Worker
from .weightbus_receive import Bus, subscriber

NEEDS: tuple[str, ...] = ("torch",)


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("weightbus, start()", "weightbus_background")


def work(worker: Worker) -> None:
    """Leave it to the background."""
    with subscriber(worker).start():
        worker.ready.set()
        threading.Event().wait()
