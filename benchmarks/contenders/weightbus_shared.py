"""weightbus over shared memory, applied by the worker's main thread at `receive()`."""

from ..bus import Bus, receive_for_ever

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "fill_copy"


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("shared: weightbus, receive()", "weightbus_shared", "shared")


work = receive_for_ever
