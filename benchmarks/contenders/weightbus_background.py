"""weightbus over TCP, applied by a background thread of the worker after `start()`."""

from ..bus import Bus, subscriber
from ..fleet import Worker

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("TCP: weightbus, start()", "weightbus_background", "network")


def work(worker: Worker) -> None:
    """Leave it to the background."""
    with subscriber(worker).start():
        worker.ready.set()
        worker.for_ever()
