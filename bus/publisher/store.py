"""What a publisher has to give: for each model, the latest version and those still of use.

A version is kept while it is the latest for somebody, is waiting for its commit, or is still being
received. Everything else is released, so that its memory can be used again. The latest version is
lent while nobody is receiving it: the next one is written over it, so that one copy of a model is
enough. Where the copies that there may be are all in use, the least needed one is given up.
"""

from collections.abc import Collection, Iterable, Iterator

from ..limits import EPOCHS_KEPT, VERSIONS_TIMED
from .effects import Effect, Hash, Lend, Release, Stamp
from .phases import VERSIONS, VersionEvent, VersionPhase
from .roster import Peer
from .version import Offer, Snapshot, Version

DIGESTS_KEPT = 1000  # versions that are gone but whose late acknowledgements can still be checked

# What is given up for the next version, the least needed first. A version that is neither is not.
GIVEN_UP: tuple[VersionPhase, ...] = ("old", "targeted")
# The next one takes the place of the latest.
GIVEN_UP_FOR_ALL: tuple[VersionPhase, ...] = (*GIVEN_UP, "lent", "latest")


class Versions:
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
        self.times: dict[int, float] = {}  # by number, when the last ones were published
        self.changed = False  # since `freed` was asked
        self._freed: list[Effect] = []  # what it is to say

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def number(self, offer: Offer, epoch: int, now: float | None = None) -> Version:
        """Take in what is offered as a new version; `now`: it is published at this time."""
        self._count += 1
        if now is not None:
            self.times[self._count] = now
            if len(self.times) > VERSIONS_TIMED:
                del self.times[next(iter(self.times))]
        version = self._versions[self._count] = Version(offer, epoch, self._count)
        return version

    def renew(self, epoch: int) -> list[Effect]:
        """Give what is still needed a number of a later epoch; nobody has anything of that yet."""
        for version in list(self):
            version.left_by(*version.receivers)
            version.ends.clear()
            version.claims.clear()
            version.patches = ()  # of names that are no more
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
        """Return a version that is there: to speak of it, not to give it out."""
        version = self._versions.get(number)
        if version is None or version.phase != "lent" or version.snapshot.there:
            return version
        return None

    def get(self, number: int) -> Version | None:
        """Return a version that can be given out."""
        version = self._versions.get(number)
        return version if version is not None and self.hold(version) else None

    def targeted(self) -> dict[str, int]:
        """Return, by worker, the version that was published to it alone, if that is the newest."""
        return {worker: version.version for worker, version in self._targeted.items()}

    def latest_for(self, worker: str) -> Version | None:
        """Return the newest committed version that is meant for a worker, to speak of it."""
        known = [v for v in (self.latest, self._targeted.get(worker)) if v is not None]
        return max(filter(_there, known), key=lambda v: v.key, default=None)

    def get_latest_for(self, worker: str) -> Version | None:
        """Return the newest committed version that is meant for a worker, to give it out."""
        version = self.latest_for(worker)
        if version is None or self.hold(version):
            return version
        return self.latest_for(worker)  # the lent one has just been taken; others are not lent

    def hold(self, version: Version) -> bool:
        """Have a version to give out, though it was lent; return whether it can be had."""
        if version.phase == "lent":
            self.changed = True
            self._move(version, "asked" if version.snapshot.take_back() else "overwritten")
        return version.phase != "gone"

    def serves(self, peer: Peer) -> bool:
        """Return whether a version is kept for a worker that it is receiving.

        No other is kept for it then, so that one that takes nothing of what it has asked for has no
        more than one. When it goes on to a later version it says so, or asks what is the newest.
        """
        doing = peer.incoming.get(self.model)
        version = self.find(doing.version) if doing and doing.phase == "receiving" else None
        return version is not None and peer.name in version.receivers

    @property
    def any(self) -> bool:
        """Whether there ever was a version."""
        return self._count > 0

    def had(self, number: int) -> bool:
        """Return whether there ever was a version of this number in this epoch."""
        return self._first <= number <= self._count

    def known_digest(self, number: int) -> str | None:
        """Return a version's digest, as far as it is known.

        None: nobody can have this version; there is none, or its memory was used for another before
        anybody was told the digest, and nobody could read it. Empty: it is too long ago to say, or
        nobody here has hashed it.
        """
        if not self.had(number):
            return None
        version = self._versions.get(number)
        if version is not None:
            return version.chunks.digest or ("" if _there(version) else None)
        known = self._digests.get(number)
        return "" if known is None else known or None

    # Changing.

    def settle(self, version: Version, targets: frozenset[str] | None) -> None:
        """Make a version the latest: for everybody, or for some workers."""
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
        """Keep a version until it is committed or dropped."""
        self.pending, self.changed = version, True

    def drop(self, version: Version) -> None:
        """Forget a version that was aborted."""
        self._move(version, "aborted")

    def give_up(self, among: Collection[Snapshot], *, replaces_latest: bool) -> None:
        """Give one of some versions up; `replaces_latest`: another is for all."""
        self._prune()
        phases = GIVEN_UP_FOR_ALL if replaces_latest else GIVEN_UP
        found = [v for v in self if v.phase in phases and v.snapshot in among]
        if found:
            least = min(found, key=lambda v: (phases.index(v.phase), -v.version))
            self._move(least, "given-up")

    def forget_worker(self, worker: str) -> None:
        """A worker is lost: keep no version for its sake, and owe it nothing."""
        self.left(worker, older_than=self._count + 1)
        for version in self:
            version.ends.discard(worker)
            version.waits.pop(worker, None)
            version.claims = {key: c for key, c in version.claims.items() if key[0] != worker}

    def supersede(self, latest: Version, peers: Iterable[Peer]) -> None:
        """Workers that read shared memory go on to the latest version, and need none before it.

        So its memory is free without being asked for. Who copies from it holds the kernel's lock.
        """
        for version in self._versions.values():
            if version is not latest and version.shared is not None and not version.hashing:
                self.changed |= version.left_by(*[p.name for p in peers if p.shared])

    def left_all(self, worker: str, *, but: int) -> None:
        """A worker is at no version, but perhaps at one."""
        for number, version in self._versions.items():
            if number != but and worker in version.receivers:
                self.changed |= version.left_by(worker)

    def left(self, worker: str, older_than: int) -> None:
        """A worker is no longer at any version below this number."""
        for number, version in self._versions.items():
            if number < older_than and worker in version.receivers:
                self.changed |= version.left_by(worker)  # it is kept for any as for many

    # Reading all of a version.

    def hash(self, version: Version) -> list[Effect]:
        """Have all of a version hashed, which is held: somebody needs the digest."""
        if version.hashing:
            return []
        version.hashing = True
        return [Hash(version)] if version.chunks.whole else []  # else all of it has to arrive first

    def hashed(self, version: Version) -> None:
        """All of a version is hashed."""
        version.hashing, self.changed = False, True

    def compared(self, version: Version) -> None:
        """A comparison with a version, which is held, is over: it may be lent again."""
        version.readers -= 1
        self.changed = True

    # Letting memory go.

    def freed(self) -> list[Effect]:
        """Say which memory is no longer needed since this was asked last, or may be taken."""
        latest = self.latest
        if latest is None or len(self._versions) > 1:  # there is some other
            self._prune()
        self.changed = False
        freed, self._freed = self._freed, []
        read = latest is not None and (latest.receivers or latest.hashing or latest.readers)
        if latest is not None and latest.phase == "latest" and not read:
            self._move(latest, "unread")
            freed.append(Lend(latest))
        return freed

    def _prune(self) -> None:
        """Let go of what is the newest for nobody, unless some worker is still at it."""
        kept = (self.latest, self.pending, *self._targeted.values())
        for version in [*self._versions.values()]:
            if version not in kept:
                self._move(version, "newer")
                if not version.receivers:
                    self._move(version, "unread")

    def _move(self, version: Version, event: VersionEvent) -> None:
        """Take an event; with what is gone its memory is let go of."""
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
        if digest or version.shared is None:  # who reads shared memory hashes it alone
            self._digests[version.version] = digest
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]


def _there(version: Version) -> bool:
    return version.phase != "lent" or version.snapshot.there
