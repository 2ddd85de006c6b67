"""The limit of shared memory: copy the model in, then every worker copies it out.

One thread each, one after the other: the publisher has filled before the first worker begins. A
system that lets workers begin earlier can be faster.
"""

from ..copies import Copies, copy_for_ever

NEEDS: tuple[str, ...] = ()
LIMIT = "fill_copy"


def create() -> Copies:
    """Return the publisher's side."""
    return Copies("shared: fill + copy", "fill_copy", fill_counts=True)


work = copy_for_ever
