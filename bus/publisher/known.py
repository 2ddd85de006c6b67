"""What any thread may know of a publisher: a record that never changes, and is replaced by another.

Its machine belongs to one thread. Whoever publishes would have to ask that whether to hash what it
is about to copy; this says so at once.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reached:
    """A worker that is known to hear what is published."""

    name: str
    models: frozenset[str]
    shared: bool  # it reads shared memory of this host


@dataclass(frozen=True, slots=True)
class Known:
    """How things stand.

    Attributes:
        epoch: The publisher's incarnation.
        reached: Who is there and hears what is published.
        turned_away: Who was turned away unheard, in words; empty: nobody was.
        malformed: Messages that broke the protocol, a moment ago.
    """

    epoch: int
    reached: tuple[Reached, ...]
    turned_away: str
    malformed: int

    def sends(self, model: str, workers: Collection[str] | None, *, shared: bool) -> bool:
        """Return whether a version for these workers would be sent over the network. (P7, S9)

        `shared`: it lies in shared memory. Whoever is about to copy a version hashes it as well
        then, in the same pass. What nobody foresaw is hashed when it is sent.
        """
        for each in self.reached:
            meant = model in each.models and (workers is None or each.name in workers)
            if meant and not (shared and each.shared):
                return True
        return False
