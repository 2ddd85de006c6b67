"""What workers say that they do with versions, and how far a publisher believes it."""

from ..effects import Notice, Send
from ..messages import Applied, Failed, Progress, Running, Staged
from .effects import Effect
from .offers import abort_of, commit_of, end_of
from .publications import Publications
from .push import Pushes
from .roster import Peer, Roster
from .store import Store, Versions
from .version import Version


class Reports:
    """What the workers of one publisher report."""

    def __init__(
        self, roster: Roster, store: Store, publications: Publications, pushes: Pushes
    ) -> None:
        self._roster, self._store, self._pushes = roster, store, pushes
        self._publications = publications

    def progress(self, peer: Peer, message: Progress, now: float) -> list[Effect]:
        """A worker says how far it is with a version."""  # P14
        versions = self._of(message)
        if versions is None or not versions.had(message.version):
            return []
        self._pushes.report(message, now)
        if peer.runs(message.model) >= (message.epoch, message.version):
            return []  # P19: what it said on the data connection was faster
        receiving = message.phase == "receiving"
        version = versions.get(message.version) if receiving else None
        if receiving and version is None:
            return []  # what it applies may be gone by now, if that takes so long
        coming = version.find(message.patch) if version is not None else None
        if coming is not None:
            peer.learn(message, coming.plan, now)
        peer.note(message.model, message.version, message.phase, message.chunks, now)
        incoming = peer.incoming[message.model]
        incoming.patch, incoming.waits = message.patch, message.waits
        versions.left(peer.name, older_than=message.version + (not receiving))
        if version is not None:
            version.receivers.add(peer.name)
        return []

    def staged(self, peer: Peer, message: Staged, now: float) -> list[Effect]:
        """A worker says that it has staged a version."""  # P11
        versions = self._of(message)
        if versions is None:
            return []
        version = versions.get(message.version)
        if version is None:
            text = "the version was aborted or superseded"
            abort = abort_of(message.model, message.epoch, message.version, text)
            return [Send(abort, to=peer.identity)]
        if not version.digest:
            return self._check_later(peer, version, message)
        if version.digest != message.digest:
            return self._wrong_digest(peer, message)
        if peer.runs(message.model) < version.key:  # P19
            peer.note(message.model, message.version, "staged", None, now)
        versions.left(peer.name, older_than=message.version + 1)
        self._publications.carried(peer, message, version, now)
        effects = self._publications.move(peer, "staged", now, version)
        if version is not versions.pending and not version.gone:
            effects.append(Send(commit_of(version), to=peer.identity))
        return effects

    def applied(self, peer: Peer, message: Applied, now: float) -> list[Effect]:
        """A worker says that it runs a version."""  # P12
        running = Running(message.epoch, message.version, message.digest)
        if message.model not in peer.hello.models:
            return []
        if not self.plausible(message.model, running):
            unchecked = self._unchecked(message.model, running)
            if unchecked is not None:
                return self._check_later(peer, unchecked, message)
            return self._wrong_digest(peer, message)
        runs = peer.running.get(message.model)
        if runs is not None and (runs.epoch, runs.version) >= (message.epoch, message.version):
            return []  # P19
        peer.running[message.model] = running
        if message.epoch < self._store.epoch:
            return []
        incoming = peer.incoming.get(message.model)
        if incoming is not None and incoming.version <= message.version:
            del peer.incoming[message.model]
        versions = self._store[message.model]
        self._publications.carried(peer, message, versions.find(message.version), now)
        versions.left(peer.name, older_than=message.version + 1)
        return self._publications.arrived(peer, message.model, now)

    def failed(self, peer: Peer, message: Failed, now: float) -> list[Effect]:
        """A worker says that it will not run a version."""  # P13
        if message.model not in peer.hello.models:
            return []
        if not message.intact:
            peer.running.pop(message.model, None)
            peer.torn.add(message.model)
        versions = self._of(message)
        if versions is None:
            return []
        versions.left(peer.name, older_than=message.version + 1)
        incoming = peer.incoming.get(message.model)
        if incoming is not None and incoming.version == message.version:
            del peer.incoming[message.model]
        return self._publications.failed(peer, message, now)

    def hashed(self, version: Version, now: float) -> list[Effect]:
        """The digest of a version is known: say it to those who wait, and check what was said."""
        effects: list[Effect] = []
        ends, version.ends = version.ends, set()
        claims, version.claims = version.claims, {}
        for name in sorted(ends):
            peer = self._roster.by_name(name)
            if peer is not None and not peer.lost:
                effects.append(Send(end_of(version), to=peer.identity))
        for (name, _), message in claims.items():
            peer = self._roster.by_name(name)
            if peer is not None and not peer.lost:
                match message:
                    case Staged():
                        effects += self.staged(peer, message, now)
                    case Applied():
                        effects += self.applied(peer, message, now)
        return effects

    def plausible(self, model: str, running: Running) -> bool:
        """Return whether a worker may run what it says it runs.

        It may if that is of an older epoch, or too long ago to say, or there is such a version and
        it reports its digest. None need be reported of a version that lay in shared memory, unless
        the caller asked for it.
        """
        versions = self._store.get(model)
        if running.epoch != self._store.epoch or versions is None:
            return running.epoch < self._store.epoch
        version = versions.find(running.version)
        if not running.digest:
            if self._publications.must_hash(model, running.version):
                return False
            unhashed = version is None or version.shared is not None or bool(version.names)
            return versions.had(running.version) and unhashed
        if version is not None:  # as long as nobody has hashed it, it is not: it says it again
            return version.digest == running.digest
        known = versions.known_digest(running.version)
        if known == "":
            return not self._publications.must_hash(model, running.version)
        return known == running.digest

    def _of(self, message: Progress | Staged | Failed) -> Versions | None:
        """Return the versions of a message's model, if it speaks of this epoch."""
        return self._store.get(message.model) if message.epoch == self._store.epoch else None

    def _unchecked(self, model: str, running: Running) -> Version | None:
        """Return the version that a worker says it has hashed, if nobody here has."""
        versions = self._store.get(model)
        if versions is None or running.epoch != self._store.epoch or not running.digest:
            return None
        version = versions.find(running.version)
        return None if version is None or version.digest else version

    def _check_later(self, peer: Peer, version: Version, message: Staged | Applied) -> list[Effect]:
        if not self._store.hold(version):
            return self._wrong_digest(peer, message)  # too late: nobody was told what it hashes to
        version.claims[peer.name, type(message)] = message
        return self._store.hash(version)

    def _wrong_digest(self, peer: Peer, message: Staged | Applied) -> list[Effect]:
        """A worker's bytes are not the published ones; it must never count as done."""  # P15
        versions = self._store.get(message.model)
        published = versions.known_digest(message.version) if versions is not None else None
        text = (
            f"worker {peer.name} reports digest {message.digest} for version {message.version} of "
            f"{message.model}; published was {published or 'no such version'}"
        )
        return [Notice("wrong-digest", text, peer.name)]
