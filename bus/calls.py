"""The calls of publish that are open: what workers do moves them along, until they are resolved.

A call is open from `add` until its future can be resolved. One that commits together stays, even
when nobody waits for it any more, until it is decided.
"""

from collections.abc import Iterator

from .catalog import Catalog
from .effects import Effect, Notice, Resolve, Send, Settled
from .limits import Timing
from .messages import Failed
from .offers import abort_of, commit_of
from .publication import Publication
from .roster import Peer, Roster
from .status import phase_of
from .version import Version


class Calls:
    """The open calls of one publisher."""

    def __init__(self, roster: Roster, catalog: Catalog, timing: Timing) -> None:
        self._roster, self._catalog, self._timing = roster, catalog, timing
        self._open: dict[int, Publication] = {}

    def __iter__(self) -> Iterator[Publication]:
        return iter(list(self._open.values()))

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
        return any(
            p.hash and (p.version.model, p.version.version) == (model, version) for p in self
        )

    # What happens.

    def supersede(self, pending: Version | None, now: float) -> list[Effect]:
        """A newer version comes: give up the one that waits for its commit."""
        effects: list[Effect] = []
        for publication in self:
            if publication.version is pending:
                publication.superseded = True
                effects += self.settle(publication, now)
        return effects

    def returned(self, peer: Peer, now: float) -> None:
        """A worker that was lost is back."""
        for publication in self:
            publication.move(peer.name, "behind", now)

    def lost(self, peer: Peer, detail: str, now: float) -> list[Effect]:
        """A worker is lost."""
        effects: list[Effect] = []
        for publication in self:
            publication.move(peer.name, "lost", now, detail)
            effects += self.settle(publication, now)
        return effects

    def staged(self, peer: Peer, version: Version, now: float) -> list[Effect]:
        """A worker has staged a version."""
        effects: list[Effect] = []
        for publication in self:
            if publication.version is version:
                publication.move(peer.name, "staged", now)
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
                effects.append(Notice("failed", text, peer.name))
                publication.move(peer.name, "failed", now, detail)
            effects += self.settle(publication, now)
        return effects

    def arrived(self, peer: Peer, model: str, now: float) -> list[Effect]:
        """A worker runs a version: move every publish of that version and of older ones."""
        runs, effects = peer.runs(model), list[Effect]()
        for publication in self:
            version = publication.version
            if version.model != model or version.key > runs:
                continue
            if version.key == runs:
                publication.move(peer.name, "applied", now)
            elif version.key < runs:
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
            publication.deadline = now
        return self.settle_all(now)

    def settle(self, publication: Publication, now: float) -> list[Effect]:
        """Commit or abort if that is due, and resolve the call if it is over."""
        effects: list[Effect] = []
        if publication.decision == "open" and publication.decide(now) != "open":
            effects += self._decided(publication)
        achieved = publication.verdict(now)
        if achieved is not None and not publication.resolved:
            publication.resolved = True
            self._explain(publication, now)
            receipt = publication.receipt(now, publication.version.known_digest)
            effects.append(Resolve(publication.id, receipt, achieved, publication.done))
        if publication.resolved and (
            publication.commit == "auto" or publication.decision != "open"
        ):
            self._open.pop(publication.id, None)
        return effects

    def _decided(self, publication: Publication) -> list[Effect]:
        version = publication.version
        shelf = self._catalog[version.model]
        peers = [
            p
            for n in publication.targets
            if (p := self._roster.by_name(n)) is not None and not p.lost
        ]
        if publication.decision == "commit":
            targets = None if publication.workers is None else frozenset(publication.workers)
            shelf.settle(version, targets)
            staged = [p for p in peers if publication.targets[p.name].state == "staged"]
            settled = [Settled(version)] if targets is None else list[Effect]()
            return [*settled, *(Send(commit_of(version), to=p.identity) for p in staged)]
        shelf.drop(version)
        text = "superseded by a newer publish" if publication.superseded else "not enough staged"
        abort = abort_of(version.model, version.epoch, version.version, text)
        return [Send(abort, to=p.identity) for p in peers]

    def _explain(self, publication: Publication, now: float) -> None:
        """Say of every target that is not there yet what it is doing."""
        model = publication.version.model
        for target in publication.targets.values():
            peer = self._roster.by_name(target.name)
            if target.state not in publication.done and peer is not None and not target.detail:
                incoming = peer.incoming.get(model)
                doing = (
                    phase_of(model, incoming, self._catalog, self._timing, now)
                    if incoming
                    else "nothing heard of it yet"
                )
                target.detail = f"{doing}; last heard {now - peer.heard_at:.1f} s ago"
