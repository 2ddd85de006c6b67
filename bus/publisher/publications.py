"""The calls of publish that are open: what workers do moves them along, until they are resolved.

A call is open from `add` until its future can be resolved. One that commits together stays, even
when nobody waits for it any more, until it is decided.
"""

from collections.abc import Iterator

from ..effects import Notice, Send
from ..limits import Timing
from ..messages import Applied, Failed, Staged
from ..units import span
from .absent import Absent, others_want
from .effects import Effect, Resolve, Settled
from .offers import abort_of, commit_of
from .phases import TargetEvent
from .publication import Publication
from .roster import Peer, Roster
from .status import phase_of, reason_of
from .store import Store
from .version import Version, VersionPatch


class Publications:
    """The open calls of one publisher.

    Attributes:
        absent: Who is not there, and why.
        unheard: Models of which it was said that nobody gets them.
    """

    def __init__(self, roster: Roster, store: Store, timing: Timing, absent: Absent) -> None:
        self._roster, self._store, self._timing, self.absent = roster, store, timing, absent
        self._open: dict[int, Publication] = {}
        self.unheard: set[str] = set()  # models of which it was said that nobody gets them
        self.told: set[str] = set()  # and what workers want in their place

    def __iter__(self) -> Iterator[Publication]:
        return iter([*self._open.values()])

    def add(self, publication: Publication) -> None:
        """Open a call."""
        self._open[publication.id] = publication

    @property
    def any_open(self) -> bool:
        """Whether a call is open."""
        return bool(self._open)

    def undecided(self, version: Version) -> Publication | None:
        """Return the call that published a version, unless it is committed."""
        for publication in self:
            if publication.version is version and publication.decision != "commit":
                return publication
        return None

    def must_hash(self, model: str, version: int) -> bool:
        """Return whether an open call wants workers to hash a version."""
        for publication in self._open.values():
            named = publication.version
            if publication.hash and (named.model, named.version) == (model, version):
                return True
        return False

    def carried(
        self, peer: Peer, said: Staged | Applied, version: Version | None, now: float
    ) -> None:
        """A worker says how a version came to it. (D11)"""
        by = version.find(said.patch) if version is not None else None
        road = version is not None and version.shared is not None and peer.shared
        if by is None or road or not said.digest:
            return
        # One of a chunk is there as soon as anything can be, however fast the link.
        whole = isinstance(by, Version) and by.plan.count > 1 and isinstance(said, Applied)
        if isinstance(by, VersionPatch) and isinstance(said, Applied):
            peer.decoded(said.decode_us / 1e6, by.work, classes=by.classes)
        for publication in self._open.values():
            if publication.version is version:
                publication.carried(peer.name, by)
                if whole:
                    peer.link.brought(by.plan.nbytes, now - publication.started)

    # What happens.

    def give_up(self, pending: Version | None, why: str, now: float) -> list[Effect]:
        """The version that waits for its commit is not to have it."""
        effects: list[Effect] = []
        for publication in self:
            if publication.version is pending:
                publication.ended = why
                effects += self.settle(publication, now)
        return effects

    def renewed(self, epoch: int) -> None:
        """What is still given out has the number of a later epoch."""
        for publication in self:
            if publication.version.epoch == epoch:
                publication.renew()

    def returned(self, peer: Peer, now: float) -> list[Version]:
        """A worker is there (again); return what it has to stage, and may not have heard of."""
        self.unheard.difference_update(peer.hello.models)
        waiting: list[Version] = []
        for publication in self:
            version = publication.version
            if publication.workers is None and version.model in peer.hello.models:
                publication.welcome(peer.name)
            publication.move(peer.name, "returned", now)
            target = publication.targets.get(peer.name)
            undecided = publication.commit == "together" and publication.decision == "open"
            if undecided and not version.gone and target is not None and target.state == "behind":
                waiting.append(version)
        return waiting

    def lost(self, peer: Peer, now: float, *, gone: bool) -> list[Effect]:
        """A worker is lost; `gone`: it is known that it is not there."""
        effects: list[Effect] = []
        for publication in self:
            publication.lose(peer.name, now, peer.why, gone=gone)
            effects += self.settle(publication, now)
        return effects

    def move(
        self, peer: Peer, event: TargetEvent, now: float, version: Version | None = None
    ) -> list[Effect]:
        """A worker has staged a version; or has left, whatever the version is."""
        effects: list[Effect] = []
        for publication in self:
            if version is None or publication.version is version:
                publication.move(peer.name, event, now)
                effects += self.settle(publication, now)
        return effects

    def failed(self, peer: Peer, message: Failed, now: float) -> list[Effect]:
        """A worker will not run a version."""
        effects: list[Effect] = []
        for publication in self:
            v = publication.version
            if (v.model, v.version) != (message.model, message.version):
                continue
            target = publication.targets.get(peer.name)
            if target is not None and target.state in ("behind", "staged"):
                detail = f"{message.code}: {message.text}"
                if not message.intact:
                    detail += "; it runs no version now, until one is applied"
                text = f"worker {peer.name} failed version {v.version} of {v.model}: {detail}"
                _, before = peer.seen.failed.get(v.model, (0, ""))
                news = before != reason_of(message)
                effects.append(Notice("failed", text, peer.name, warning=news))
                publication.move(peer.name, "failed", now, detail)
            effects += self.settle(publication, now)
        return effects

    def arrived(self, peer: Peer, model: str, now: float) -> list[Effect]:
        """A worker runs a version: move every publish of that version and of older ones."""
        runs, effects = peer.runs(model), list[Effect]()
        for publication in [*self._open.values()]:
            key = publication.version.key
            if publication.version.model != model or key > runs:
                continue
            if key == runs:
                publication.move(peer.name, "applied", now)
            else:
                publication.move(peer.name, "skipped", now, f"it runs version {runs[1]}")
            effects += self.settle(publication, now)
        return effects

    # Deciding and resolving.

    def settle_all(self, now: float) -> list[Effect]:
        """Do what is due."""
        return [effect for publication in self for effect in self.settle(publication, now)]

    def close(self, now: float) -> list[Effect]:
        """Resolve every call as it stands."""
        for publication in self:
            publication.deadline = now  # P20
        return self.settle_all(now)

    def settle(self, publication: Publication, now: float) -> list[Effect]:
        """Commit or abort if that is due, and resolve the call if it is over."""
        effects: list[Effect] = []
        undecided = publication.commit == "together" and publication.decision == "open"
        if undecided and publication.decide(now) != "open":
            effects += self._decided(publication)
        achieved = publication.verdict(now)
        if achieved is not None and not publication.resolved:
            publication.resolved = True
            self._explain(publication, now)
            receipt = publication.receipt(now, publication.version.digest)
            missing, require = publication.missing, publication.require
            why = "" if achieved else self._why(publication)
            done = publication.done
            effects.append(Resolve(publication.id, receipt, achieved, done, missing, require, why))
            if achieved and publication.nobody:
                effects += self._to_nobody(publication)
        if publication.resolved and (
            publication.commit == "auto" or publication.decision != "open"
        ):
            self._open.pop(publication.id, None)
        return effects

    def _decided(self, publication: Publication) -> list[Effect]:
        version = publication.version
        versions = self._store[version.model]
        peers = [
            p
            for n in publication.targets
            if (p := self._roster.by_name(n)) is not None and not p.lost
        ]
        if publication.decision == "commit":
            targets = None if publication.workers is None else frozenset(publication.workers)
            versions.settle(version, targets)
            staged = [p for p in peers if publication.targets[p.name].state == "staged"]
            settled = [Settled(version)] if targets is None else list[Effect]()
            return [*settled, *(Send(commit_of(version), to=p.identity) for p in staged)]
        versions.drop(version)
        text = publication.ended or "not enough staged"
        abort = abort_of(version.model, version.epoch, version.version, text)
        return [Send(abort, to=p.identity) for p in peers]

    def _away(self, publication: Publication) -> list[str]:
        """Say of everybody who wants the model, and is none of those that are there, why."""
        model = publication.version.model
        lost = [p for p in self._roster if p.lost and model in p.hello.models]
        others = [p for p in lost if publication.alive or p.name not in publication.targets]
        return [f"worker {p.name} is lost: {p.why}" for p in others] + self.absent.of(model)

    def _wanted(self, model: str) -> str:
        """Say what others want that are there, where none of them wants this model."""
        wanted = {m for peer in self._roster if not peer.lost for m in peer.hello.models}
        return "" if model in wanted or not wanted else others_want(model, sorted(wanted))

    def _why(self, publication: Publication) -> str:
        """Say why a call is given up, and of workers that were expected where they are."""
        said = [publication.ended] if publication.ended else []
        if publication.missing:
            away = self._away(publication)
            what = "are missing" if away else "never came"
            why = "; ".join(away) or self._wanted(publication.version.model)
            why = why or "nobody was refused, is lost or has left"
            said.append(f"{publication.missing} of {publication.expect} workers {what} ({why})")
        return "; ".join(said)

    def _to_nobody(self, publication: Publication) -> list[Effect]:
        """Say that nobody is there; once, until somebody is."""
        version = publication.version
        if version.model in self.unheard:
            return []
        self.unheard.add(version.model)
        away, wanted = self._away(publication), self._wanted(version.model)
        if wanted and not away:
            self.told.add(version.model)
        why = "; ".join(away) or wanted or "no worker has joined"
        text = (
            f"version {version.version} of {version.model} was published to nobody: {why}. It "
            "waits for those that join; publish(expect=N) waits for N workers"
        )
        return [Notice("nobody", text, warning=True)]

    def _explain(self, publication: Publication, now: float) -> None:
        """Say of every target that is not there yet what it is doing."""
        model = publication.version.model
        for target in publication.targets.values():
            if target.state in publication.done or target.detail:
                continue
            peer = self._roster.by_name(target.name)
            if peer is not None:
                incoming = peer.incoming.get(model)
                doing = (
                    phase_of(model, incoming, self._store, self._timing, now)
                    if incoming
                    else "nothing heard of it yet"
                )
                if incoming and incoming.phase == "staged" and publication.commit == "auto":
                    doing += ", and waits for start() or receive() there"
                target.detail = f"{doing}; last heard {span(now - peer.heard_at)} ago"
