"""weightbus over TCP to workers whose models are resident: pages are exchanged, not copied."""

from ..bus import Bus, receive_for_ever

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("TCP: weightbus, resident", "weightbus_resident", "network", resident="workers")


work = receive_for_ever
