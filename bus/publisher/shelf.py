"""What a publisher has to give: for each model, the latest version and those still of use.

A version is kept while it is the latest for somebody, is waiting for its commit, or is still being
received. Everything else is retired, so that its memory can be used again.
"""

import contextlib
from collections.abc import Iterator

from ..limits import EPOCHS_KEPT
from ..memory.version import Retired, Version

DIGESTS_KEPT = 1000  # versions that are gone but whose late acknowledgements can still be checked


class Shelf:
    """The versions of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.latest: Version | None = None  # for every worker that has nothing newer of its own
        self.pending: Version | None = None  # staged together, not committed yet
        self.announced_layout = ""  # the layout that was last published on PUB
        self._targeted: dict[str, Version] = {}  # by worker, what was published to it alone
        self._versions: dict[int, Version] = {}
        self._digests: dict[int, str] = {}  # of versions that are gone
        self._first, self._count = 1, 0  # the numbers of this epoch

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def number(self, version: Version, epoch: int) -> None:
        """Take a new version in and number it."""
        self._count += 1
        version.number(epoch, self._count)
        self._versions[version.version] = version

    def renew(self, epoch: int) -> None:
        """Give what is still needed a number of a later epoch; nobody has anything of that yet."""
        for version in self._versions.values():
            version.receivers.clear()
        self.prune()
        self._digests.clear()
        self._first = min(self._versions, default=self._count + 1)
        for number, version in self._versions.items():
            version.names = frozenset(sorted({*version.names, version.key})[-EPOCHS_KEPT:])
            version.number(epoch, number)

    def get(self, number: int) -> Version | None:
        """Return a version that can still be given out."""
        version = self._versions.get(number)
        return version if version is not None and version.alive else None

    def had(self, number: int) -> bool:
        """Return whether there ever was a version of this number in this epoch."""
        return self._first <= number <= self._count

    def known_digest(self, number: int) -> str | None:
        """Return a version's digest.

        None: nobody can have this version; there is none, or its memory was used for another before
        anybody was told the digest. Empty: it is too long ago to say.
        """
        if not self.had(number):
            return None
        version = self._versions.get(number)
        if version is not None:
            with contextlib.suppress(Retired):
                return version.digest()
            return version.known_digest or None
        known = self._digests.get(number)
        return "" if known is None else known or None

    def latest_for(self, worker: str) -> Version | None:
        """Return the newest committed version that is meant for a worker."""
        known = [v for v in (self.latest, self._targeted.get(worker)) if v is not None and v.alive]
        return max(known, key=lambda v: v.key, default=None)

    def settle(self, version: Version, targets: frozenset[str] | None) -> None:
        """Make a version the latest: for everybody, or for some workers."""
        if self.pending is version:
            self.pending = None
        if targets is None:
            if self.latest is None or self.latest.key < version.key:
                self.latest = version
            newer = {w: v for w, v in self._targeted.items() if v.key > self.latest.key}
            self._targeted = newer
        else:
            for worker in targets:
                known = self._targeted.get(worker)
                if known is None or known.key < version.key:
                    self._targeted[worker] = version
        self.prune()

    def drop(self, version: Version) -> None:
        """Forget a version that was aborted."""
        if self.pending is version:
            self.pending = None
        version.receivers.clear()
        self.prune()

    def forget(self, worker: str, *, but: int = 0) -> None:
        """A worker is lost: keep no version for its sake, but perhaps one."""
        for number, version in self._versions.items():
            if number != but:
                version.receivers.discard(worker)

    def left(self, worker: str, older_than: int) -> None:
        """A worker is no longer at any version below this number."""
        for version in self._versions.values():
            if version.version < older_than:
                version.receivers.discard(worker)

    def prune(self) -> None:
        """Retire what nobody needs."""
        targeted = set(map(id, self._targeted.values()))
        for number, version in list(self._versions.items()):
            if version is self.latest:
                version.role = "latest"
            elif id(version) in targeted:
                version.role = "targeted"
            elif version is self.pending:
                version.role = "pending"
            elif version.receivers and version.alive:
                version.role = "old"
            else:
                version.retire()
                del self._versions[number]
                self._digests[number] = version.known_digest
                while len(self._digests) > DIGESTS_KEPT:
                    del self._digests[next(iter(self._digests))]


class Catalog:
    """The shelves of all models."""

    def __init__(self) -> None:
        self._shelves: dict[str, Shelf] = {}

    def __iter__(self) -> Iterator[Shelf]:
        return iter(self._shelves.values())

    def __getitem__(self, model: str) -> Shelf:
        shelf = self._shelves.get(model)
        if shelf is None:
            shelf = self._shelves[model] = Shelf(model)
        return shelf

    def get(self, model: str) -> Shelf | None:
        """Return the shelf of a model that has been published."""
        return self._shelves.get(model)
