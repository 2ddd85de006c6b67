"""weightbus over TCP with resident models at both sides: the publisher's snapshot is one copy."""

from ..bus import Bus, receive_for_ever

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"


def create() -> Bus:
    """Return the publisher's side."""
    return Bus(
        "TCP: weightbus, resident on both sides",
        "weightbus_resident_both",
        "network",
        resident="both",
    )


work = receive_for_ever
