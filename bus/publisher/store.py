"""The versions that a publisher keeps: for each model, the latest one and those still in use.

A version is kept while it is the latest for some worker, waits for its commit, or is being
received. All others are released, so that their memory can be reused. The latest version is
reclaimable (`lent`) while no worker receives it: the next one overwrites it, so that one copy of a
model is enough. If all copies are in use, the least needed version is evicted.
"""

from collections.abc import Collection, Iterable, Iterator

from ..limits import EPOCHS_KEPT, VERSIONS_TIMED
from .effects import Effect, Hash, Lend, Release, Stamp
from .phases import VERSIONS, VersionEvent, VersionPhase
from .roster import Peer
from .version import Snapshot, Version, VersionOffer

DIGESTS_KEPT = 1000  # versions that are gone but whose late acknowledgements can still be checked

# The phases in which a version may be evicted for the next one, the least needed first.
EVICTABLE: tuple[VersionPhase, ...] = ("old", "targeted")
# The same, if the next version replaces the latest.
EVICTABLE_FOR_ALL: tuple[VersionPhase, ...] = (*EVICTABLE, "lent", "latest")


class Versions:
    """The versions of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.latest: Version | None = None  # for every worker without a newer targeted version
        self.pending: Version | None = None  # commits together, undecided
        self.announced_layout = ""  # the id of the layout last published on the data socket
        self._targeted: dict[str, Version] = {}  # by worker, the version published to it by name
        self._versions: dict[int, Version] = {}
        self._digests: dict[int, str] = {}  # of versions that are gone
        self._first, self._count = 1, 0  # first and last number of this epoch
        self.times: dict[int, float] = {}  # by number, when the last ones were published
        self.changed = False  # since the last call of `freed`
        self._freed: list[Effect] = []  # what `freed` returns next

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def number(self, offer: VersionOffer, epoch: int, now: float | None = None) -> Version:
        """Add an offer as a new version with the next number; `now`: the time of its publish."""
        self._count += 1
        if now is not None:
            self.times[self._count] = now
            if len(self.times) > VERSIONS_TIMED:
                del self.times[next(iter(self.times))]
        version = self._versions[self._count] = Version(offer, epoch, self._count)
        return version

    def renew(self, epoch: int) -> list[Effect]:
        """Move the versions that are still needed to a later epoch, of which no worker has any."""
        for version in list(self):
            version.left_by(*version.receivers)
            version.ends.clear()
            version.claims.clear()
            version.patches = ()  # their bases are of the old epoch
            self.hold(version)
        self._prune()
        self._digests.clear()
        self._first = min(self._versions, default=self._count + 1)
        for version in self:
            version.names = frozenset(sorted({*version.names, version.key})[-EPOCHS_KEPT:])
            version.epoch = epoch
        return [Stamp(version) for version in self if version.shared is not None]

    # Looking.

    def find(self, number: int) -> Version | None:
        """Return a version that exists, for its attributes; use `get` to send it."""
        version = self._versions.get(number)
        if version is None or version.phase != "lent" or version.snapshot.there:
            return version
        return None

    def get(self, number: int) -> Version | None:
        """Return a version that can be sent; it is no longer reclaimable. None: unavailable."""
        version = self._versions.get(number)
        return version if version is not None and self.hold(version) else None

    def targeted(self) -> dict[str, int]:
        """Return, by worker, the version published to it by name, if that is its newest."""
        return {worker: version.version for worker, version in self._targeted.items()}

    def latest_for(self, worker: str) -> Version | None:
        """Return the newest committed version for a worker, for its attributes."""
        known = [v for v in (self.latest, self._targeted.get(worker)) if v is not None]
        return max(filter(_exists, known), key=lambda v: v.key, default=None)

    def get_latest_for(self, worker: str) -> Version | None:
        """Return the newest committed version for a worker, so that it can be sent."""
        version = self.latest_for(worker)
        if version is None or self.hold(version):
            return version
        return self.latest_for(worker)  # the latest was just overwritten; others are never lent

    def hold(self, version: Version) -> bool:
        """Take a version back if it is reclaimable; return True if it can be sent."""
        if version.phase == "lent":
            self.changed = True
            self._move(version, "asked" if version.snapshot.take_back() else "overwritten")
        return version.phase != "gone"

    def serves(self, peer: Peer) -> bool:
        """True if a version is kept for a worker because the worker is receiving it.

        No other version is kept for it then, so that a worker that reads nothing of what it fetched
        holds at most one. A worker that moves on to a later version reports or fetches that.
        """
        doing = peer.incoming.get(self.model)
        version = self.find(doing.version) if doing and doing.phase == "receiving" else None
        return version is not None and peer.name in version.receivers

    @property
    def any(self) -> bool:
        """True if a version was ever published."""
        return self._count > 0

    def had(self, number: int) -> bool:
        """True if there ever was a version with this number in this epoch."""
        return self._first <= number <= self._count

    def known_digest(self, number: int) -> str | None:
        """Return a version's digest, as far as it is known.

        None: no worker can have this version; it does not exist, or its memory was reused before
        its digest was sent, and it was never in shared memory. Empty: it is too old to remember, or
        this publisher has not hashed it.
        """
        if not self.had(number):
            return None
        version = self._versions.get(number)
        if version is not None:
            return version.chunks.digest or ("" if _exists(version) else None)
        known = self._digests.get(number)
        return "" if known is None else known or None

    # Changing.

    def settle(self, version: Version, targets: frozenset[str] | None) -> None:
        """Make a version the newest: for all workers, or for the `targets`."""
        if self.pending is version:
            self.pending = None
        self._move(version, "for-all" if targets is None else "for-some")
        if targets is None:
            if self.latest is None or self.latest.version < version.version:
                self.latest = version
            if self._targeted:
                each, number = self._targeted.items(), self.latest.version
                self._targeted = {w: v for w, v in each if v.version > number}
        else:
            for worker in targets:
                known = self._targeted.get(worker)
                if known is None or known.version < version.version:
                    self._targeted[worker] = version
        self.changed = True

    def await_commit(self, version: Version) -> None:
        """Keep a version as pending until it is committed or dropped."""
        self.pending, self.changed = version, True

    def drop(self, version: Version) -> None:
        """Drop a version that was aborted."""
        self._move(version, "aborted")

    def give_up(self, among: Collection[Snapshot], *, replaces_latest: bool) -> None:
        """Evict one version of those with these snapshots, if one may be, for the next version.

        `replaces_latest`: the next one is for all workers, so the latest may be evicted.
        """
        self._prune()
        phases = EVICTABLE_FOR_ALL if replaces_latest else EVICTABLE
        found = [v for v in self if v.phase in phases and v.snapshot in among]
        if found:
            least = min(found, key=lambda v: (phases.index(v.phase), -v.version))
            self._move(least, "given-up")

    def forget_worker(self, worker: str) -> None:
        """Drop all that is kept for a lost worker, and what it waits for."""
        self.left(worker, older_than=self._count + 1)
        for version in self:
            version.ends.discard(worker)
            version.waits.pop(worker, None)
            version.claims = {key: c for key, c in version.claims.items() if key[0] != worker}

    def supersede(self, latest: Version, peers: Iterable[Peer]) -> None:
        """Stop keeping older versions for workers that read shared memory: they need the latest.

        So their memory is free without a message. A worker that copies from one holds the kernel's
        lock on it.
        """
        for version in self._versions.values():
            if version is not latest and version.shared is not None and not version.hashing:
                self.changed |= version.left_by(*[p.name for p in peers if p.shared])

    def left_all(self, worker: str, *, but: int) -> None:
        """Note that a worker is receiving no version, except perhaps `but`."""
        for number, version in self._versions.items():
            if number != but and worker in version.receivers:
                self.changed |= version.left_by(worker)

    def left(self, worker: str, older_than: int) -> None:
        """Note that a worker is no longer receiving any version below this number."""
        for number, version in self._versions.items():
            if number < older_than and worker in version.receivers:
                self.changed |= version.left_by(worker)  # only the last receiver matters

    # Reading all of a version.

    def hash(self, version: Version) -> list[Effect]:
        """Start hashing all of a version, whose digest is needed; call `hold` before."""
        if version.hashing:
            return []
        version.hashing = True
        return [Hash(version)] if version.chunks.whole else []  # else it has to arrive first

    def hashed(self, version: Version) -> None:
        """Note that all of a version is hashed."""
        version.hashing, self.changed = False, True

    def compared(self, version: Version) -> None:
        """Note that a comparison with a version is over, so that it may be reclaimable again."""
        version.readers -= 1
        self.changed = True

    # Letting memory go.

    def freed(self) -> list[Effect]:
        """Return the effects for memory that became free or reclaimable since the last call."""
        latest = self.latest
        if latest is None or len(self._versions) > 1:  # else there is nothing to prune
            self._prune()
        self.changed = False
        freed, self._freed = self._freed, []
        read = latest is not None and (latest.receivers or latest.hashing or latest.readers)
        if latest is not None and latest.phase == "latest" and not read:
            self._move(latest, "unread")
            freed.append(Lend(latest))
        return freed

    def _prune(self) -> None:
        """Drop each version that is the newest for no worker, unless one is receiving it."""
        kept = (self.latest, self.pending, *self._targeted.values())
        for version in [*self._versions.values()]:
            if version not in kept:
                self._move(version, "newer")
                if not version.receivers:
                    self._move(version, "unread")

    def _move(self, version: Version, event: VersionEvent) -> None:
        """Change a version's phase as the table says; if it is gone, free its memory."""
        before = version.phase
        version.phase = after = VERSIONS[before].get(event, before)
        if after == "gone" and before != "gone":
            self._forget(version, here=before != "lent" or version.snapshot.there)

    def _forget(self, version: Version, *, here: bool) -> None:
        self.changed, version.patches = True, ()
        if here:
            self._freed.append(Release(version))
        self.latest = None if self.latest is version else self.latest
        self.pending = None if self.pending is version else self.pending
        if self._targeted:
            self._targeted = {w: v for w, v in self._targeted.items() if v is not version}
        del self._versions[version.version]
        digest = version.chunks.digest
        if digest or version.shared is None:  # else a worker may have it, with an unknown digest
            self._digests[version.version] = digest
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]


def _exists(version: Version) -> bool:
    return version.phase != "lent" or version.snapshot.there
