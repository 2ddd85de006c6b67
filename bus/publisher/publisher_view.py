"""The view of a publisher's state for all threads: an immutable record, replaced at each change.

The machine belongs to one thread. A thread that publishes reads this view instead of waiting for
the machine's thread. The view says whether a version will be sent over the network, and so whether
to hash the version while it is copied.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReachableWorker:
    """A worker that receives pushed versions."""

    name: str
    models: frozenset[str]
    shared: bool  # the worker reads shared memory of this host


@dataclass(frozen=True, slots=True)
class PublisherView:
    """An immutable view of a publisher's state.

    Attributes:
        epoch: The publisher's epoch.
        reached: The workers that receive pushed versions.
        turned_away: A text on why connections were rejected; empty if none were.
        malformed: The number of malformed messages received until the view was made.
    """

    epoch: int
    reached: tuple[ReachableWorker, ...]
    turned_away: str
    malformed: int

    def sends(self, model: str, workers: Collection[str] | None, *, shared: bool) -> bool:
        """Return whether a version for these workers would be sent over the network. (P7, S9)

        A version that would be sent is hashed while it is copied; any other version, when it is
        sent for the first time. `shared` is true if the version is in shared memory.
        """
        for each in self.reached:
            meant = model in each.models and (workers is None or each.name in workers)
            if meant and not (shared and each.shared):
                return True
        return False
