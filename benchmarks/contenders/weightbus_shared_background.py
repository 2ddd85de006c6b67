"""weightbus over shared memory, applied in the background of the worker after `start()`."""

from ..bus import Bus, apply_for_ever

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "fill_copy"


def create() -> Bus:
    """Return the publisher's side."""
    return Bus("shared: weightbus, start()", "weightbus_shared_background", "shared")


work = apply_for_ever
