"""What the trainer published and what each worker applied, held against each other.

A worker's line names a version and its digest but no epoch. No two versions have the same digest
(the trainer's data is noisy, and drawn anew in each run), so the digest tells the epoch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightbus.tests.compose.fleet import Row

Key = tuple[int, int]


@dataclass(frozen=True)
class Ledger:
    """The keys (epoch, version) that were published, and that each worker applied, in order."""

    published: dict[str, Key]
    applied: dict[str, list[Key]]

    def epochs(self) -> list[int]:
        """Return the trainer's epochs, in order."""
        return sorted({epoch for epoch, _ in self.published.values()})

    def by_all(self, epoch: int) -> list[Key]:
        """Return what every single worker applied in an epoch."""
        everywhere = set[Key].intersection(*(set(keys) for keys in self.applied.values()))
        return sorted(key for key in everywhere if key[0] == epoch)


def ledger(trainer: Iterable[Row], workers: Mapping[str, Iterable[Row]]) -> Ledger:
    """Read the logs.

    Raises:
        AssertionError: They contradict each other; it says where.
    """
    published = {row["digest"]: (row["epoch"], row["version"]) for row in trainer}
    unlogged = defaultdict[Key, set[str]](set)
    applied = dict[str, list[Key]]()
    for worker, rows in workers.items():
        applied[worker] = []
        for row in rows:
            key = published.get(row["digest"])
            if key is None:
                key = _unlogged(published, worker, row)
                unlogged[key].add(row["digest"])
            assert row["version"] == key[1], f"{worker} says {row}, but these bytes are {key}"
            applied[worker].append(key)
        assert applied[worker] == sorted(applied[worker]), f"{worker} went back: {applied[worker]}"
    for key, digests in unlogged.items():
        assert len(digests) == 1, f"workers applied different bytes as {key}: {digests}"
    return Ledger(published, applied)


def _unlogged(published: dict[str, Key], worker: str, row: Row) -> Key:
    """Return the key of what a trainer has published but not logged: its log may be cut there.

    It logs a version when it is done with it, so workers can be ahead of its log by one version,
    and for ever if it is killed just then. Of a version 1 nobody has told the epoch yet: the number
    after the newest one stands for it.
    """
    last = dict(sorted(published.values()))  # of each epoch
    if row["version"] == 1:
        return max(last, default=0) + 1, 1
    epochs = [epoch for epoch, version in last.items() if version + 1 == row["version"]]
    assert epochs, f"{worker} applied what was never published: {row}"
    return epochs[0], row["version"]
