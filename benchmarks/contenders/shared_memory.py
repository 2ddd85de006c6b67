"""The floor of shared memory: every worker copies the bytes out, all at the same time.

Filling the shared memory is not timed, so no system that must do it can be this fast.
"""

from ..copies import Copies, copy_for_ever

NEEDS: tuple[str, ...] = ()
LIMIT = "fill_copy"


def create() -> Copies:
    """Return the publisher's side."""
    return Copies("shared: N memcpys", "shared_memory", fill_counts=False)


work = copy_for_ever
