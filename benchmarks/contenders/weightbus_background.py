"""weightbus over TCP, applied in the background of the worker after `start()`."""

from ..bus import Bus, apply_for_ever

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("TCP: weightbus, start()", "weightbus_background", "network")


work = apply_for_ever
