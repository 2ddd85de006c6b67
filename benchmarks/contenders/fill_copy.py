"""The limit of shared memory: copy the model in, then every worker copies it out.

Each side has one thread, and the workers start when the publisher has copied the whole model. A
system whose workers start earlier can be faster.
"""

from ..copies import Copies, copy_for_ever

NEEDS: tuple[str, ...] = ()
LIMIT = "fill_copy"


def create() -> Copies:
    """Return the publisher's side."""
    return Copies("shared: fill + copy", "fill_copy", fill_counts=True)


work = copy_for_ever
