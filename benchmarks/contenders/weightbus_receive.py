"""weightbus over TCP, applied by the worker's main thread at `receive()`."""

from ..bus import Bus, receive_for_ever

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("TCP: weightbus, receive()", "weightbus_receive", "network")


work = receive_for_ever
