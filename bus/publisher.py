"""The publisher's behaviour, without sockets, threads or clocks.

Feed it what arrives (`receive`), what the user wants (`publish`) and the passing of time (`tick`);
it answers with effects. `push` gives the next chunks while `pushing` says that there are some.

    hello ──> welcome                          the worker is on the roster
    publish ──> announce, chunk..., end        pushed; or announce and end, to some workers alone
    fetch ──> chunk...  | announce, end | refuse(gone)
    staged ──> commit | abort                  once decided
    applied | staged | failed                  move the publish along; enough of them resolve it
    silence ──> lost

Nothing here assumes that the publisher is a trainer or that a worker is a leaf.
"""

import contextlib
from collections.abc import Callable, Sequence

from .catalog import Catalog, Shelf
from .effects import Broadcast, Effect, Notice, Resolve, Send
from .errors import ProtocolError, UnknownWorkerError
from .limits import INTEGER_MAX, Timing
from .messages import (
    Abort,
    Announce,
    Applied,
    Beacon,
    Buffer,
    Bye,
    Chunk,
    Commit,
    Failed,
    Fetch,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Refuse,
    Running,
    Shared,
    Staged,
    Welcome,
    control_topic,
    from_worker,
    model_of,
)
from .publication import Publication, Target
from .push import Push, end_of
from .roster import Incoming, Peer, Roster, WorkerStatus
from .version import Retired, Version


class PublisherMachine:
    """One publisher.

    Args:
        epoch: Its incarnation; workers refuse a lower one than they have applied from.
        data_endpoint: Where PUB is, as workers are told.
        timing: How long it waits.
        shared: A segment by which workers find out that they are on the same host.
    """

    def __init__(
        self,
        epoch: int,
        data_endpoint: str,
        timing: Timing | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.shared = shared
        self.epoch = epoch
        self.data_endpoint = data_endpoint
        self.timing = timing or Timing()
        self.roster = Roster(self.timing.lost_after)
        self.catalog = Catalog()
        self.malformed = 0  # messages dropped because they broke the protocol
        self._publications: dict[int, Publication] = {}
        self._pushes: list[Push] = []
        self._beacon_at = 0.0
        self._handlers: dict[type[Message], Callable[..., list[Effect]]] = {
            Fetch: self._fetch,
            Progress: self._progress,
            Staged: self._staged,
            Applied: self._applied,
            Failed: self._failed,
            Ping: self._ping,
            Pong: self._pong,
            Bye: self._bye,
        }

    # What arrives.

    def receive(self, identity: bytes, frames: Sequence[Buffer], now: float) -> list[Effect]:
        """Take one message of a worker. Never raises: whatever is malformed is refused."""
        try:
            message, _ = from_worker(frames)
        except ProtocolError as error:
            self.malformed += 1
            return [Send(Refuse(code=error.code, text=str(error)), to=identity)]
        if isinstance(message, Hello):
            return self._hello(identity, message, now)
        peer = self.roster.by_identity(identity)
        if peer is None:
            if isinstance(message, Bye):
                return []
            text = "say hello first: this publisher does not know this connection"
            return [Send(Refuse(code="unknown-worker", text=text), to=identity)]
        effects = self._heard(peer, now)
        try:
            return effects + self._handlers[type(message)](peer, message, now)
        except Retired:  # it was replaced this very moment; the worker will hear of the new one
            return effects

    def unreachable(self, identity: bytes, now: float) -> list[Effect]:
        """The connection is gone. Its worker may reconnect, unless another wants its name."""
        peer = self.roster.by_identity(identity)
        if peer is not None and peer.contested_at is not None and not peer.lost:
            return self._lose(peer, now, "its connection is gone")
        return []

    def subscribed(self, topic: bytes) -> list[Effect]:
        """Somebody has subscribed: let it hear at once that it is."""
        model = model_of(topic)
        return [self._beacon(model)] if model is not None else []

    # What the user wants.

    def publish(self, publication: Publication, now: float) -> list[Effect]:
        """Publish a version: to every worker that has the model, or to some by name.

        Raises:
            UnknownWorkerError: A name was never on the roster; nothing was published.
        """
        version, workers = publication.version, publication.workers
        peers = self._targets(version.model, workers)
        shelf = self.catalog[version.model]
        effects: list[Effect] = []
        for other in list(self._publications.values()):
            if other.version is shelf.pending:
                other.superseded = True
                effects += self._settle(other, now)
        shelf.number(version, self.epoch)
        publication.targets = {p.name: Target(p.name) for p in peers}
        version.receivers = {p.name for p in peers if not p.lost}
        for peer in peers:
            if peer.lost:
                publication.move(peer.name, "lost", now, "it was lost before the publish")
        if publication.commit == "together":
            shelf.pending = version
            shelf.prune()
        else:
            shelf.settle(version, None if workers is None else frozenset(workers))
        self._publications[publication.id] = publication
        effects += self._announce(publication, peers, now)
        return effects + self._settle(publication, now)

    def _targets(self, model: str, workers: Sequence[str] | None) -> list[Peer]:
        if workers is None:
            return [p for p in self.roster if not p.lost and model in p.hello.models]
        peers = [p for name in workers if (p := self.roster.by_name(name)) is not None]
        if len(peers) < len(workers):
            known = sorted(p.name for p in self.roster)
            unknown = sorted(set(workers) - set(known))
            raise UnknownWorkerError(
                f"no worker named {', '.join(unknown)} has joined; known are "
                f"{', '.join(known) or 'none'}: check the name, or wait_for_workers() first"
            )
        return peers

    def _announce(self, publication: Publication, peers: list[Peer], now: float) -> list[Effect]:
        version, effects = publication.version, list[Effect]()
        broadcast = publication.workers is None
        if publication.hash:
            version.digest()
        announce = announcement(version, publication)
        shelf = self.catalog[version.model]
        alone = [p for p in peers if not (p.lost or (broadcast and p.subscribed))]
        networked = [p for p in peers if p.subscribed and not (p.shared and version.shared)]
        if broadcast:
            layout = version.layout.header if version.layout.id != shelf.announced_layout else None
            shelf.announced_layout = version.layout.id
            effects.append(Broadcast(control_topic(version.model), announce, layout))
            self._pushes = [p for p in self._pushes if p.version.model != version.model]
            if networked:
                self._pushes.append(Push(version, now, self.timing.quiet))
        return effects + [Send(announce, to=peer.identity) for peer in alone]

    @property
    def pushing(self) -> bool:
        """Whether `push` has something to send now."""
        return any(push.ready for push in self._pushes)

    def push(self, now: float) -> list[Effect]:
        """Return the next chunks to publish."""
        effects: list[Effect] = []
        for push in self._pushes:
            effects += push.step(now)
        self._pushes = [push for push in self._pushes if not push.done]
        return effects

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: beacons, lost workers, deadlines."""
        effects: list[Effect] = []
        for peer in self.roster.silent(now):
            effects += self._lose(peer, now, f"silent for {now - peer.heard_at:.1f} s")
        if now >= self._beacon_at:
            self._beacon_at = now + self.timing.ping
            effects += [self._beacon(s.model) for s in self.catalog if s.latest and s.latest.alive]
        effects += self.push(now)
        for publication in list(self._publications.values()):
            effects += self._settle(publication, now)
        for shelf in self.catalog:
            shelf.prune()
        return effects

    def close(self, now: float) -> list[Effect]:
        """Resolve every call that is still open, as it stands."""
        effects: list[Effect] = []
        for publication in list(self._publications.values()):
            publication.deadline = now
            effects += self._settle(publication, now)
        return effects

    def status(self, now: float) -> tuple[WorkerStatus, ...]:
        """Return who is there, and who runs which version."""
        return tuple(self._status(peer, now) for peer in self.roster)

    def _status(self, peer: Peer, now: float) -> WorkerStatus:
        slow = [i for i in peer.incoming.values() if now - i.since >= self.timing.stuck_after]
        return WorkerStatus(
            name=peer.name,
            state="lost" if peer.lost else "stuck" if slow else "live",
            models=tuple(peer.hello.models),
            running={m: (r.epoch, r.version) for m, r in peer.running.items()},
            phase={m: self._phase(m, i, now) for m, i in peer.incoming.items()},
            silent_s=now - peer.heard_at,
            client=peer.hello.client,
            host=peer.hello.host,
            pid=peer.hello.pid,
        )

    def _phase(self, model: str, incoming: Incoming, now: float) -> str:
        text = f"{incoming.phase} version {incoming.version}"
        if incoming.phase == "receiving":
            version = self.catalog[model].get(incoming.version)
            count = f" of {version.plan.count}" if version is not None else ""
            text += f", {incoming.chunks}{count} chunks here"
        idle = now - incoming.since
        return text + (f", no progress for {idle:.1f} s" if idle >= self.timing.quiet else "")

    # Joining and leaving.

    def _hello(self, identity: bytes, hello: Hello, now: float) -> list[Effect]:
        if hello.epoch > self.epoch and not self._outgrow(hello.epoch):
            text = (
                f"this publisher is of epoch {self.epoch}, but {hello.name} runs weights of the "
                f"later epoch {hello.epoch}: another publisher has taken over; stop this one, or "
                "restart it so that it takes a new epoch"
            )
            return [
                Send(Refuse(code="stale-epoch", text=text), to=identity),
                Notice("stale-epoch", text, hello.name),
            ]
        admission, peer = self.roster.admit(identity, hello, now)
        match admission:
            case "contested" if peer is not None:
                return [Send(Ping(token=0), to=peer.identity)]
            case "taken" if peer is not None:
                return [Send(Refuse(code="name-taken", text=_name_taken(peer)), to=identity)]
            case "full":
                text = "the roster is full: stop some workers, or start another publisher"
                return [Send(Refuse(code="limit", text=text), to=identity)]
            case _:
                assert peer is not None  # noqa: S101 - the other admissions have one
                return self._welcome(peer, admission, now)

    def _outgrow(self, epoch: int) -> bool:
        """Take a later epoch than the one a worker knows, if nothing was published in ours yet."""
        if any(True for _ in self.catalog) or epoch >= INTEGER_MAX:
            return False
        self.epoch = epoch + 1
        return True

    def _welcome(self, peer: Peer, admission: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        peer.subscribed, peer.contested_at = False, None
        if peer.lost or admission != "known":
            peer.lost = False
            effects.append(Notice("joined", f"worker {peer.name} joined", peer.name))
        peer.incoming.clear()
        peer.running = {
            model: running
            for model, running in peer.hello.models.items()
            if running is not None and self._plausible(model, running)
        }
        for publication in self._publications.values():
            publication.move(peer.name, "behind", now)
        for model in peer.running:
            effects += self._arrived(peer, model, now)
        welcome = Welcome(
            epoch=self.epoch,
            data=self.data_endpoint,
            ping_ms=max(1, round(self.timing.ping * 1000)),
            lost_ms=max(2, round(self.timing.lost_after * 1000)),
            models=self._latest(peer),
            shared=self.shared,
        )
        return [Send(welcome, to=peer.identity), *effects]

    def _latest(self, peer: Peer) -> dict[str, int]:
        """Return the newest version that there is for a worker, of each of its models."""
        latest: dict[str, int] = {}
        for model in peer.hello.models:
            shelf = self.catalog.get(model)
            version = shelf.latest_for(peer.name) if shelf else None
            if version is not None:
                latest[model] = version.version
        return latest

    def _heard(self, peer: Peer, now: float) -> list[Effect]:
        peer.heard_at = now
        if not peer.lost:
            return []
        peer.lost = False
        for publication in self._publications.values():
            publication.move(peer.name, "behind", now)
        return [Notice("returned", f"worker {peer.name} answers again", peer.name)]

    def _lose(self, peer: Peer, now: float, why: str) -> list[Effect]:
        phases = "; ".join(self._phase(m, i, now) for m, i in peer.incoming.items())
        detail = why + (f" while {phases}" if phases else "")
        peer.lost, peer.subscribed = True, False
        for shelf in self.catalog:
            shelf.forget(peer.name)
        effects: list[Effect] = [Notice("lost", f"worker {peer.name} is lost: {detail}", peer.name)]
        for publication in list(self._publications.values()):
            publication.move(peer.name, "lost", now, detail)
            effects += self._settle(publication, now)
        peer.incoming.clear()
        return effects

    def _bye(self, peer: Peer, _message: Bye, now: float) -> list[Effect]:
        effects = self._lose(peer, now, "it said goodbye")
        self.roster.remove(peer)
        return effects

    def _ping(self, peer: Peer, message: Ping, _now: float) -> list[Effect]:
        peer.subscribed, peer.shared = message.subscribed, message.shared
        pong = Pong(token=message.token, epoch=self.epoch, models=self._latest(peer))
        return [Send(pong, to=peer.identity)]

    def _pong(self, _peer: Peer, _message: Pong, _now: float) -> list[Effect]:
        return []

    # Giving versions out.

    def _fetch(self, peer: Peer, fetch: Fetch, now: float) -> list[Effect]:
        shelf = self.catalog.get(fetch.model)
        version = shelf.get(fetch.version) if shelf and fetch.epoch == self.epoch else None
        if version is None and shelf and fetch.version == 0 and fetch.epoch == self.epoch:
            version = shelf.latest_for(peer.name)
        try:
            if shelf is None or version is None:
                return self._gone(peer, fetch, shelf)
            if fetch.count == 0:
                end = fetch.version > 0 and not fetch.layout  # asked for by one who has all chunks
                return self._describe(peer, version, layout=fetch.layout, end=end)
            return self._chunks(peer, version, fetch, now)
        except Retired:
            return self._gone(peer, fetch, shelf)

    def _gone(self, peer: Peer, fetch: Fetch, shelf: Shelf | None) -> list[Effect]:
        text = f"version {fetch.version} of epoch {fetch.epoch} is not to be had here"
        refuse = Refuse(
            code="gone", text=text, model=fetch.model, epoch=fetch.epoch, version=fetch.version
        )
        effects: list[Effect] = [Send(refuse, to=peer.identity)]
        latest = shelf.latest_for(peer.name) if shelf else None
        if latest is not None and (latest.key != (fetch.epoch, fetch.version)):
            with contextlib.suppress(Retired):  # being replaced now: the new one will be announced
                effects += self._describe(peer, latest)
        return effects

    def _describe(
        self, peer: Peer, version: Version, *, layout: bool = False, end: bool = False
    ) -> list[Effect]:
        """Announce a version to one worker; add the end unless it reads shared memory."""
        header = version.layout.header if layout else None
        announce = announcement(version, self._undecided(version))
        version.receivers.add(peer.name)
        effects: list[Effect] = [Send(announce, header, to=peer.identity)]
        if end or not (peer.shared and version.shared):
            effects.append(Send(end_of(version), to=peer.identity))
        return effects

    def _undecided(self, version: Version) -> Publication | None:
        for publication in self._publications.values():
            if publication.version is version and publication.decision != "commit":
                return publication
        return None

    def _chunks(self, peer: Peer, version: Version, fetch: Fetch, now: float) -> list[Effect]:
        last = fetch.first + fetch.count
        if last > version.plan.count or fetch.version != version.version:
            text = (
                f"chunks {fetch.first} to {last - 1} of version {version.version}, which has "
                f"{version.plan.count}"
            )
            refuse = Refuse(
                code="range",
                text=text,
                model=fetch.model,
                epoch=fetch.epoch,
                version=fetch.version,
            )
            return [Send(refuse, to=peer.identity)]
        version.receivers.add(peer.name)
        self._note(peer, fetch.model, fetch.version, "receiving", None, now)
        effects: list[Effect] = []
        for index in range(fetch.first, last):
            crc, payload = version.chunk(index)
            chunk = Chunk(
                model=fetch.model, epoch=fetch.epoch, version=fetch.version, index=index, crc=crc
            )
            effects.append(Send(chunk, payload, to=peer.identity))
        return effects

    # What workers report.

    def _note(
        self, peer: Peer, model: str, version: int, phase: str, chunks: int | None, now: float
    ) -> None:
        """Remember what a worker is doing, and since when it has not moved."""
        old = peer.incoming.get(model)
        same = old is not None and (old.version, old.phase) == (version, phase)
        if old is not None and same:
            if chunks is not None and chunks != old.chunks:
                old.chunks, old.since = chunks, now
            return
        peer.incoming[model] = Incoming(version, phase, chunks or 0, now)
        self.catalog[model].left(peer.name, older_than=version)

    def _progress(self, peer: Peer, message: Progress, now: float) -> list[Effect]:
        shelf = self.catalog.get(message.model)
        if shelf is None or message.epoch != self.epoch or shelf.get(message.version) is None:
            return []
        self._note(peer, message.model, message.version, message.phase, message.chunks, now)
        if message.phase != "receiving":
            shelf.left(peer.name, older_than=message.version + 1)
        for push in self._pushes:
            if (push.version.model, push.version.version) == (message.model, message.version):
                push.report(message.chunks, now)
        return []

    def _mine(self, message: Staged | Applied | Failed) -> bool:
        return message.epoch == self.epoch and self.catalog.get(message.model) is not None

    def _staged(self, peer: Peer, message: Staged, now: float) -> list[Effect]:
        if not self._mine(message):
            return []
        shelf = self.catalog[message.model]
        version = shelf.get(message.version)
        if version is None:
            return [self._abort(peer, message, "the version was aborted or superseded")]
        if version.digest() != message.digest:
            return self._wrong_digest(peer, message)
        self._note(peer, message.model, message.version, "staged", None, now)
        shelf.left(peer.name, older_than=message.version + 1)
        effects: list[Effect] = []
        for publication in list(self._publications.values()):
            if publication.version is version:
                publication.move(peer.name, "staged", now)
                effects += self._settle(publication, now)
        if version is not shelf.pending and version.alive:
            effects.append(Send(commit_of(version), to=peer.identity))
        return effects

    def _abort(self, peer: Peer, message: Staged, text: str) -> Effect:
        abort = Abort(model=message.model, epoch=message.epoch, version=message.version, text=text)
        return Send(abort, to=peer.identity)

    def _applied(self, peer: Peer, message: Applied, now: float) -> list[Effect]:
        running = Running(message.epoch, message.version, message.digest)
        if message.model not in peer.hello.models:
            return []
        if not self._plausible(message.model, running):
            return self._wrong_digest(peer, message)
        if peer.runs(message.model) >= (message.epoch, message.version):
            return []
        peer.running[message.model] = running
        if message.epoch < self.epoch:
            return []
        incoming = peer.incoming.get(message.model)
        if incoming is not None and incoming.version <= message.version:
            del peer.incoming[message.model]
        self.catalog[message.model].left(peer.name, older_than=message.version + 1)
        return self._arrived(peer, message.model, now)

    def _plausible(self, model: str, running: Running) -> bool:
        """Return whether a worker may run what it says it runs.

        It may if that is of an older epoch, or too long ago to say, or there is such a version and
        the worker did not hash it, or it reports the digest of that version.
        """
        shelf = self.catalog.get(model)
        if running.epoch != self.epoch or shelf is None:
            return running.epoch < self.epoch
        if not running.digest:
            return shelf.had(running.version)
        return shelf.known_digest(running.version) in ("", running.digest)

    def _arrived(self, peer: Peer, model: str, now: float) -> list[Effect]:
        """A worker runs a version: move every publish of that version and of older ones."""
        runs, effects = peer.runs(model), list[Effect]()
        for publication in list(self._publications.values()):
            version = publication.version
            if version.model != model or version.key > runs:
                continue
            if version.key == runs:
                publication.move(peer.name, "applied", now)
            elif version.key < runs:
                publication.move(peer.name, "skipped", now, f"it runs version {runs[1]}")
            effects += self._settle(publication, now)
        return effects

    def _wrong_digest(self, peer: Peer, message: Staged | Applied) -> list[Effect]:
        """A worker's bytes are not the published ones; it must never count as done."""
        shelf = self.catalog.get(message.model)
        published = shelf.known_digest(message.version) if shelf is not None else None
        text = (
            f"worker {peer.name} reports digest {message.digest} for version {message.version} of "
            f"{message.model}; published was {published or 'no such version'}"
        )
        return [Notice("wrong-digest", text, peer.name)]

    def _failed(self, peer: Peer, message: Failed, now: float) -> list[Effect]:
        if not self._mine(message):
            return []
        shelf, effects = self.catalog[message.model], list[Effect]()
        shelf.left(peer.name, older_than=message.version + 1)
        for publication in list(self._publications.values()):
            v = publication.version
            if (v.model, v.version) == (message.model, message.version):
                fresh = publication.targets.get(peer.name)
                if fresh is not None and fresh.state in ("behind", "staged"):
                    detail = f"{message.code}: {message.text}"
                    text = f"worker {peer.name} failed version {v.version} of {v.model}: {detail}"
                    effects.append(Notice("failed", text, peer.name))
                    publication.move(peer.name, "failed", now, detail)
                effects += self._settle(publication, now)
        incoming = peer.incoming.get(message.model)
        if incoming is not None and incoming.version == message.version:
            del peer.incoming[message.model]
        return effects

    # Deciding and resolving.

    def _settle(self, publication: Publication, now: float) -> list[Effect]:
        """Commit or abort if that is due, and resolve the call if it is over."""
        effects: list[Effect] = []
        if publication.decision == "open" and publication.decide(now) != "open":
            effects += self._decided(publication)
        achieved = publication.verdict(now)
        if achieved is not None and not publication.resolved:
            publication.resolved = True
            self._explain(publication, now)
            receipt = publication.receipt(now, publication.version.known_digest)
            effects.append(Resolve(publication.id, receipt, achieved))
        if publication.resolved and (
            publication.commit == "auto" or publication.decision != "open"
        ):
            self._publications.pop(publication.id, None)
        return effects

    def _decided(self, publication: Publication) -> list[Effect]:
        version = publication.version
        shelf = self.catalog[version.model]
        peers = [
            p
            for n in publication.targets
            if (p := self.roster.by_name(n)) is not None and not p.lost
        ]
        if publication.decision == "commit":
            targets = None if publication.workers is None else frozenset(publication.workers)
            shelf.settle(version, targets)
            staged = [p for p in peers if publication.targets[p.name].state == "staged"]
            return [Send(commit_of(version), to=p.identity) for p in staged]
        shelf.drop(version)
        self._pushes = [p for p in self._pushes if p.version is not version]
        text = "superseded by a newer publish" if publication.superseded else "not enough staged"
        abort = Abort(model=version.model, epoch=version.epoch, version=version.version, text=text)
        return [Send(abort, to=p.identity) for p in peers]

    def _explain(self, publication: Publication, now: float) -> None:
        """Say of every target that is not there yet what it is doing."""
        model = publication.version.model
        for target in publication.targets.values():
            peer = self.roster.by_name(target.name)
            if target.state not in publication.done and peer is not None and not target.detail:
                incoming = peer.incoming.get(model)
                doing = self._phase(model, incoming, now) if incoming else "nothing heard of it yet"
                target.detail = f"{doing}; last heard {now - peer.heard_at:.1f} s ago"

    def _beacon(self, model: str) -> Broadcast:
        shelf = self.catalog.get(model)
        latest = shelf.latest if shelf is not None else None
        version = latest.version if latest is not None and latest.alive else 0
        beacon = Beacon(model=model, epoch=self.epoch, version=version)
        return Broadcast(control_topic(model), beacon)


def announcement(version: Version, publication: Publication | None) -> Announce:
    """Return the announcement of a version; a committed one is for everybody to apply at once."""
    together = publication is not None and publication.commit == "together"
    staged = publication is not None and (together or publication.wait == "staged")
    return Announce(
        model=version.model,
        epoch=version.epoch,
        version=version.version,
        layout=version.layout.id,
        layout_bytes=len(version.layout.header),
        nbytes=version.layout.nbytes,
        chunk_bytes=version.plan.chunk_bytes,
        commit="together" if together else "auto",
        acknowledge="staged" if staged else "applied",
        encoding="raw",
        shared=version.shared,
        hash=publication is not None and publication.hash,
    )


def commit_of(version: Version) -> Commit:
    """Return the message that lets workers apply a version."""
    return Commit(
        model=version.model, epoch=version.epoch, version=version.version, digest=version.digest()
    )


def _name_taken(peer: Peer) -> str:
    return (
        f"the name {peer.name!r} belongs to a living worker (host {peer.hello.host or 'unknown'}, "
        f"process {peer.hello.pid}): give this one another name, or stop that one"
    )
