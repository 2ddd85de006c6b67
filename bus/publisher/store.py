"""Stores the versions that a publisher keeps: for each model, the latest version and those in use.

A version is kept while it is the latest for a worker, waits for its commit, or is being received.
All other versions are released, so that their memory can be reused. While no worker receives the
latest version, its memory is reclaimable (phase `reclaimable`): the next version may overwrite it,
so memory for one version is enough. If all memory is in use, the least needed version is evicted.
"""

from collections.abc import Collection, Iterable, Iterator

from ..limits import SNAPSHOTS_MAX, VERSIONS_TIMED
from ..messages import Applied, Staged
from .effects import Effect, Hash, MakeReclaimable, Release, Stamp
from .roster import Peer
from .tables import VersionEvent, VersionPhase
from .version import Snapshot, Version, VersionOffer

DIGESTS_KEPT = 1000  # digests of versions that are gone, to check late acknowledgements

# The phases in which a version may be evicted for the next version, the least needed first.
EVICTABLE: tuple[VersionPhase, ...] = ("old", "targeted")
# The same phases if the next version replaces the latest.
EVICTABLE_FOR_ALL: tuple[VersionPhase, ...] = (*EVICTABLE, "reclaimable", "latest")


class Versions:
    """The versions of one model.

    Args:
        model: The model's name.
        named_here: Whether this publisher numbers the versions. False: it is a relay, and its
            workers may have versions of its epoch that it has never had.
    """

    def __init__(self, model: str, *, named_here: bool = True) -> None:
        self.model, self._named_here = model, named_here
        self.latest: Version | None = None  # for workers without a newer targeted version
        self.pending: Version | None = None  # the version whose commit is undecided
        self.part: Version | None = None  # the version whose chunks this publisher has as a source
        self.announced_layout = ""  # the id of the layout last published on the data socket
        # by worker, the newest version that was published to named workers
        self._targeted: dict[str, Version] = {}
        self._versions: dict[int, Version] = {}
        self._digests: dict[int, str] = {}  # digests of versions that are gone, by number
        self._first, self._count = 1, 0  # first and last version number of this epoch
        self.times: dict[int, float] = {}  # by number, when the last versions were published
        # from when on the pending version may be announced again: to any worker, and by worker
        self._again_after, self._again_after_to = 0.0, dict[str, float]()
        self.changed = False  # True if `freed` may have effects to return
        self._freed: list[Effect] = []  # effects that `freed` returns next

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def add(self, offer: VersionOffer, epoch: int, now: float | None = None) -> Version:
        """Make a version from an offer, with the offer's number or the next number.

        Raises:
            ValueError: The offer's number is not greater than that of the latest version.
        """
        number = self._count + 1 if offer.key is None else offer.key[1]
        latest = 0 if self.latest is None else self.latest.version
        if number <= latest:
            raise ValueError(f"version {number} of {self.model} comes after version {latest}")
        before = self._versions.get(number)
        if before is not None:  # a relay receives it again
            self.abandon(before)
        self._count = max(self._count, number)
        if now is not None:
            self.times[number] = now
            if len(self.times) > VERSIONS_TIMED:
                del self.times[next(iter(self.times))]
        version = self._versions[number] = Version(offer, epoch, number)
        return version

    @property
    def next_number(self) -> int:
        """The number of the next version."""
        return self._count + 1

    def end_epoch(self) -> None:
        """Drop all versions, and begin anew: the next version is of a later epoch."""
        for version in list(self):
            self.abandon(version)
        self._digests.clear()
        self.times.clear()
        self._count = 0

    def renew(self, epoch: int) -> list[Effect]:
        """Move the needed versions to a later epoch, as if no worker had received them."""
        for version in list(self):
            version.withdraw()
            self.hold(version)
        self._prune()
        self._digests.clear()
        self._first = min(self._versions, default=self._count + 1)
        for version in self:
            version.renew(epoch)
        return [Stamp(version) for version in self if version.shared is not None]

    # Finding versions.

    def find(self, number: int) -> Version | None:
        """Return the version with this number, if its bytes exist. To send it, use `get`."""
        version = self._versions.get(number)
        if version is None or version.phase != "reclaimable" or version.snapshot.exists:
            return version
        return None

    def get(self, number: int) -> Version | None:
        """Return the version with this number, no longer reclaimable; None if it cannot be sent."""
        version = self._versions.get(number)
        return version if version is not None and self.hold(version) else None

    def targeted(self) -> dict[str, int]:
        """Return, by worker, the number of a targeted version newer than the latest for all."""
        return {worker: version.version for worker, version in self._targeted.items()}

    def named(self) -> list[Version]:
        """Return the versions for named workers, targeted or pending, the oldest first."""
        found = {*self._targeted.values()}
        if self.pending is not None and self.pending.only is not None:
            found.add(self.pending)
        return sorted(found, key=lambda version: version.key)

    def latest_for(self, worker: str) -> Version | None:
        """Return a worker's newest committed version; None if there is none.

        To send that version, use `get_latest_for`.
        """
        known = [v for v in (self.latest, self._targeted.get(worker)) if v is not None]
        return max(filter(_exists, known), key=lambda v: v.key, default=None)

    def get_latest_for(self, worker: str) -> Version | None:
        """Return a worker's newest committed version, no longer reclaimable, so it can be sent."""
        version = self.latest_for(worker)
        if version is None or self.hold(version):
            return version
        # the latest was just overwritten; other versions are never reclaimable
        return self.latest_for(worker)

    def hold(self, version: Version) -> bool:
        """Make a version not reclaimable; return False if it is gone, and cannot be sent."""
        if version.phase == "reclaimable":
            self.changed = True
            self._move(version, "requested" if version.snapshot.take_back() else "overwritten")
        return version.phase != "gone"

    def serves(self, peer: Peer) -> bool:
        """True if a version is kept for a worker because the worker is receiving it.

        Then no other version is kept for the worker, so a worker that stops reading keeps at most
        one version in memory. Once the worker begins a later version, it reports or fetches that.
        """
        doing = peer.incoming.get(self.model)
        version = self.find(doing.version) if doing and doing.phase == "receiving" else None
        return version is not None and peer.name in version.receivers

    @property
    def any(self) -> bool:
        """True if a version of this model was ever published."""
        return self._count > 0

    def had(self, number: int) -> bool:
        """True if a version may have been published under this number in this epoch."""
        return self._first <= number <= self._count or not self._named_here

    def known_digest(self, number: int) -> str | None:
        """Return the digest of a version; empty or None if it is not known.

        The result is None if no worker can have this version, because the version does not exist,
        or was never in shared memory and its memory was reused before its digest was sent. The
        result is empty if the version is too old to remember, or if this publisher has not hashed
        it, or if the publisher is a relay that does not have it.
        """
        if not self.had(number):
            return None
        version = self._versions.get(number)
        if version is not None:
            may_be_elsewhere = _exists(version) or not self._named_here
            return version.chunks.digest or ("" if may_be_elsewhere else None)
        known = self._digests.get(number)
        if known is None or not self._named_here:
            return known or ""
        return known or None

    # Changing versions.

    def settle(self, version: Version, targets: frozenset[str] | None) -> None:
        """Make a committed version the newest for the workers `targets`; None: for all."""
        if self.pending is version:
            self.pending = None
        version.move("for-all" if targets is None else "for-some")
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

    def note_layout_announced(self, layout: str) -> None:
        """Record that this layout is published on the data socket now, so workers know it."""
        self.announced_layout = layout

    def await_commit(self, version: Version, again_after: float) -> None:
        """Keep a version as pending until it is committed or dropped.

        `again_after`: when it may be announced again.
        """
        self.pending, self.changed = version, True
        self._again_after, self._again_after_to = again_after, {}

    def postpone_announcing(self, worker: str, again_after: float) -> None:
        """Record from when on the pending version may be announced to a worker again."""
        self._again_after_to[worker] = again_after

    def may_announce_again(self, worker: str, now: float) -> bool:
        """Return whether the pending version may be announced to a worker again."""
        return now >= self._again_after_to.get(worker, self._again_after)

    def keep_part(self, version: Version) -> None:
        """Keep a version of which this publisher is a source, until the next one. (N5)"""
        version.move("for-some")
        self.part, self.changed = version, True

    def drop(self, version: Version) -> None:
        """Drop a version that was aborted."""
        self._move(version, "aborted")

    def abandon(self, version: Version) -> None:
        """Drop a version that cannot be sent any more, even if workers receive it."""
        self._move(version, "aborted" if version.phase == "pending" else "evicted")

    def give_up(self, among: Collection[Snapshot], *, replaces_latest: bool) -> None:
        """Make room for the next version: evict the least needed version whose snapshot fits.

        `replaces_latest` is true if the next version is for all, so the latest may be evicted too.
        """
        self._prune()
        phases = EVICTABLE_FOR_ALL if replaces_latest else EVICTABLE
        self._evict(phases, [v for v in self if v.snapshot in among])

    def limit(self) -> None:
        """Evict a relay's least needed versions until it has at most `SNAPSHOTS_MAX`.

        An original publisher's `Pool` of memory calls `give_up` instead.
        """
        self._prune()
        while len(self._versions) > SNAPSHOTS_MAX and self._evict(EVICTABLE, self):
            pass

    def _evict(self, phases: tuple[VersionPhase, ...], among: Iterable[Version]) -> bool:
        """Evict the least needed version in these phases; return whether there was one."""
        found = [version for version in among if version.phase in phases]
        if found:
            least = min(found, key=lambda v: (phases.index(v.phase), -v.version))
            self._move(least, "evicted")
        return bool(found)

    def forget_worker(self, worker: str) -> None:
        """Drop all that is kept for a lost worker: versions, waits for messages, and reports."""
        self.end_receiving(worker, older_than=self._count + 1)
        for version in self:
            version.forget_worker(worker)

    def supersede(self, latest: Version, peers: Iterable[Peer]) -> None:
        """Stop keeping versions older than `latest` for workers that read shared memory.

        Such a worker needs only the latest version, so older memory is freed without a message. A
        worker that copies from an older version holds a file lock on the segment.
        """
        for version in self._versions.values():
            if version is not latest and version.shared is not None and not version.hashing:
                self.changed |= version.remove_receivers(*[p.name for p in peers if p.shared])

    def receives_only(self, worker: str, only: int) -> None:
        """Record that a worker receives only the version with the number `only`; 0: no version."""
        for number, version in self._versions.items():
            if number != only and worker in version.receivers:
                self.changed |= version.remove_receivers(worker)

    def end_receiving(self, worker: str, older_than: int) -> None:
        """Record that a worker no longer receives versions with numbers below `older_than`."""
        for number, version in self._versions.items():
            if number < older_than and worker in version.receivers:
                self.changed |= version.remove_receivers(worker)  # only the last receiver matters

    # Reading all of a version.

    def hash(self, version: Version) -> list[Effect]:
        """Start to hash all of a version, whose digest is needed; call `hold` before."""
        begun = version.begin_hashing()
        # otherwise the chunks are hashed as they arrive
        return [Hash(version)] if begun and version.chunks.whole else []

    def hashed(self, version: Version) -> tuple[set[str], list[tuple[str, Staged | Applied]]]:
        """Handle the end of a version's hashing; return the result of `Version.end_hashing`."""
        self.changed = True
        return version.end_hashing()

    def compared(self, version: Version) -> None:
        """Handle the end of a comparison, after which the version may become reclaimable."""
        version.end_comparison()
        self.changed = True

    # Freeing memory.

    def freed(self) -> list[Effect]:
        """Return the effects for memory that became free or reclaimable since the last call."""
        latest = self.latest
        if latest is None or len(self._versions) > 1:  # otherwise no version can be pruned
            self._prune()
        self.changed = False
        freed, self._freed = self._freed, []
        in_use = latest is not None and (latest.receivers or latest.hashing or latest.comparisons)
        if latest is not None and latest.phase == "latest" and not in_use:
            latest.move("no-readers")
            freed.append(MakeReclaimable(latest))
        return freed

    def _prune(self) -> None:
        """Drop each version that is the newest for no worker and that no worker receives."""
        kept = (self.latest, self.pending, self.part, *self._targeted.values())
        for version in [*self._versions.values()]:
            if version not in kept:
                self._move(version, "newer")
                if version.phase == "old" and not version.receivers:
                    self._move(version, "no-readers")

    def _move(self, version: Version, event: VersionEvent) -> None:
        """Change a version's phase as the table says; free the memory of a version that is gone."""
        reclaimable = version.phase == "reclaimable"
        if not version.move(event):
            return
        self.changed = True
        if not reclaimable or version.snapshot.exists:
            self._freed.append(Release(version))
        self.latest = None if self.latest is version else self.latest
        self.pending = None if self.pending is version else self.pending
        self.part = None if self.part is version else self.part
        if self._targeted:
            self._targeted = {w: v for w, v in self._targeted.items() if v is not version}
        del self._versions[version.version]
        digest = version.chunks.digest
        # without a digest, workers may have copied the version from shared memory
        if digest or version.shared is None:
            self._digests[version.version] = digest
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]


def _exists(version: Version) -> bool:
    return version.phase != "reclaimable" or version.snapshot.exists
