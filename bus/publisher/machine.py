"""The publisher's behaviour, without sockets, threads or clocks.

Feed it what arrives (`receive`), what the user wants (`publish`) and the passing of time (`tick`);
it answers with effects. `push` gives the next chunks while `pushing` says of what there are some.

    hello ──> welcome                          the worker is on the roster
    publish ──> announce, chunk..., end        pushed; or announce and end, to some workers alone
    fetch ──> chunk...  | announce, end | refuse(gone)
    staged ──> commit | abort                  once decided
    applied | staged | failed                  move the publish along; enough of them resolve it
    silence ──> lost

Nothing here assumes that the publisher is a trainer or that a worker is a leaf.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Sequence

import msgspec

from ..effects import Notice, Send
from ..epochs import epoch_above
from ..errors import ProtocolError, UnknownWorkerError
from ..limits import WHOLE_BYTES_MAX, Timing
from ..memory.version import Retired, Version
from ..messages import (
    MAPPING,
    RENAMING,
    Announce,
    Applied,
    Beacon,
    Buffer,
    Bye,
    Failed,
    Fetch,
    Hello,
    Message,
    Ping,
    Pong,
    Prepare,
    Progress,
    Refuse,
    Rename,
    Running,
    Shared,
    Staged,
    Welcome,
    control_topic,
    from_worker,
    model_of,
)
from .absent import Absent
from .effects import Broadcast, Effect, HangUp, Settled, Withdraw
from .offers import abort_of, announcement, chunk_of, commit_of, end_of, refusal_of, whole_of
from .patience import DEAR, Patience, cost_of
from .publication import Publication
from .publications import Calls
from .push import Push
from .roster import Incoming, Peer, Roster
from .shelf import Catalog
from .status import WorkerStatus, is_stuck, phase_of, status_of


class PublisherMachine:
    """One publisher.

    Args:
        epoch: Its incarnation; workers refuse a lower one than they have applied from.
        age: Says for how many seconds it has been running, by a clock that never stops; with it the
            epoch may be raised where that is sound. None: the epoch is final.
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
        age: Callable[[], float] | None = None,
    ) -> None:
        self.shared = shared
        self.epoch = epoch
        self._age = age
        self._renewed_at = -math.inf
        self.data_endpoint = data_endpoint
        self.timing = timing or Timing()
        self.roster = Roster(self.timing.lost_after)
        self.catalog = Catalog()
        self._patience = Patience(self.timing)
        self._prepared: dict[str, Prepare] = {}  # by model, until its first version is published
        self.malformed = 0  # messages dropped because they broke the protocol
        self._absent = Absent()
        self._calls = Calls(self.roster, self.catalog, self.timing, self._absent)
        self._pushes: list[Push] = []
        self._beacon_at = 0.0
        # Functions, not methods of ours: what holds itself is collected late.
        self._handlers: dict[type[Message], Callable[..., list[Effect]]] = {
            Fetch: PublisherMachine._fetch,
            Progress: PublisherMachine._progress,
            Staged: PublisherMachine._staged,
            Applied: PublisherMachine._applied,
            Failed: PublisherMachine._failed,
            Ping: PublisherMachine._ping,
            Pong: PublisherMachine._pong,
        }

    # What arrives.

    def receive(self, identity: bytes, frames: Sequence[Buffer], now: float) -> list[Effect]:
        """Take one message of a worker. Never raises: whatever is malformed is refused."""
        if not self._patience.hears(identity):
            return []
        nbytes = len(frames[0]) if frames else 0
        peer = self.roster.by_identity(identity)
        if peer is None and not self._patience.has_time(now):
            return [] if self._patience.bears(identity, DEAR, nbytes, now) else [HangUp()]
        try:
            message, _ = from_worker(frames)
        except ProtocolError as error:
            self.malformed += 1
            if not self._patience.bears(identity, DEAR, nbytes, now):
                return [HangUp()]
            return [Send(Refuse(code=error.code, text=str(error)), to=identity)]
        cost = cost_of(message, known=peer is not None)
        if not self._patience.bears(identity, cost, nbytes, now):
            return [HangUp()]
        if isinstance(message, Hello):
            return self._hello(identity, message, now)
        if isinstance(message, Bye):
            return self._leave(peer, "it said goodbye", now) if peer is not None else []
        if peer is None:
            text = "say hello first: this publisher does not know this connection"
            return [Send(Refuse(code="unknown-worker", text=text), to=identity)]
        effects = self._heard(peer, now)
        try:
            return effects + self._handlers[type(message)](self, peer, message, now)
        except Retired:  # it was replaced this very moment; the worker will hear of the new one
            return effects

    def unreachable(self, identity: bytes, now: float) -> list[Effect]:
        """The connection is gone. Its worker may reconnect, unless another wants its name."""
        peer = self.roster.by_identity(identity)
        if peer is not None and peer.contested_at is not None and not peer.lost:
            return self._lose(peer, now, "its connection is gone")
        return []

    def subscribed(self, topic: bytes) -> Beacon | None:
        """Somebody has subscribed: what to tell it at once, so that it knows it is heard."""
        model = model_of(topic)
        return self._beacon(model) if model is not None else None

    # What the user wants.

    def offer(self, version: Version) -> None:
        """Have a version of an earlier publisher as the latest, before anybody is there."""
        shelf = self.catalog[version.model]
        shelf.number(version, self.epoch)
        shelf.settle(version, None)

    def publish(self, publication: Publication, now: float) -> list[Effect]:
        """Publish a version: to every worker that has the model, or to some by name.

        Raises:
            UnknownWorkerError: A name was never on the roster; nothing was published.
        """
        version, workers = publication.version, publication.workers
        peers = self._targets(version.model, workers)
        shelf = self.catalog[version.model]
        effects = self._calls.give_up(shelf.pending, "superseded by a newer publish", now)
        shelf.number(version, self.epoch)
        self._prepared.pop(version.model, None)
        publication.aim(p.name for p in peers)
        for peer in peers:
            if peer.lost:
                publication.move(peer.name, "lost", now, "it was lost before the publish")
            elif peer.told_at is None:
                peer.told_at = now
        quiet = self.timing.quiet
        version.receivers = {p.name for p in peers if not (p.lost or p.mute(now, quiet))}
        if publication.commit == "together":
            shelf.pending = version
            shelf.prune()
        else:
            shelf.settle(version, None if workers is None else frozenset(workers))
            effects += [Settled(version)] if workers is None else []
        effects += self._announce(publication, peers, now)
        self._calls.add(publication)
        return effects + self._calls.settle(publication, now)

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
            with contextlib.suppress(
                Retired
            ):  # a newer one has its memory already: it is announced
                version.digest()
        announce = announcement(version, publication)
        alone = [p for p in peers if not (p.lost or (broadcast and p.subscribed))]
        networked = [p for p in peers if p.subscribed and not (p.shared and version.shared)]
        if broadcast:
            effects.append(Withdraw(version.model))
            effects.append(self._publish(version, announce, now, push=bool(networked)))
        return effects + [Send(announce, to=peer.identity) for peer in alone]

    def _publish(
        self, version: Version, announce: Announce, now: float, *, push: bool
    ) -> Broadcast:
        """Announce a version to all; begin to push it, unless it is so small that it goes along."""
        shelf, topic = self.catalog[version.model], control_topic(version.model)
        self._pushes = [p for p in self._pushes if p.version.model != version.model]
        known = version.layout.id == shelf.announced_layout
        shelf.announced_layout = version.layout.id
        small = version.plan.count == 1 and version.layout.nbytes <= WHOLE_BYTES_MAX
        if push and known and small and version.receivers:
            with contextlib.suppress(Retired):
                return Broadcast(topic, *whole_of(version, announce))
        if push:
            self._pushes.append(Push(version, now, self.timing.quiet))
        return Broadcast(topic, announce, None if known else version.layout.header)

    def prepare(self, model: str, shared: Shared, nbytes: int) -> list[Effect]:
        """Tell workers of this host where the first version of a model will lie."""
        prepared = Prepare(model=model, epoch=self.epoch, nbytes=nbytes, shared=shared)
        self._prepared[model] = prepared
        here = [peer for peer in self.roster if peer.shared]
        return [effect for peer in here for effect in self._tell_prepared(peer, prepared)]

    @property
    def pushing(self) -> list[bytes]:
        """The topics for which `push` has something to send now."""
        return [push.topic for push in self._pushes if push.ready]

    def push(self, now: float, topics: Collection[bytes] | None = None) -> list[Effect]:
        """Return the next chunks to publish, of some topics alone if they are given."""
        effects: list[Effect] = []
        for push in self._pushes:
            chosen = topics is None or push.topic in topics
            if chosen and push.version.alive:  # it may have been aborted meanwhile
                effects += push.step(now)
        self._pushes = [push for push in self._pushes if push.version.alive and not push.done]
        return effects

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: beacons, lost workers, deadlines."""
        effects: list[Effect] = []
        self._patience.tick(now)
        for peer in self.roster.silent(now):
            effects += self._lose(peer, now, f"silent for {now - peer.heard_at:.1f} s")
        effects += [self._moved(p, now) for p in self.roster if self._turned(p, now)]
        if now >= self._beacon_at:
            self._beacon_at = now + self.timing.ping
            models = [s.model for s in self.catalog if s.latest and s.latest.alive]
            effects += [Broadcast(control_topic(m), self._beacon(m)) for m in models]
        self._forget_mute(now)
        effects += self.push(now)
        effects += self._calls.settle_all(now)
        for shelf in self.catalog:
            shelf.prune()
        return effects

    def _forget_mute(self, now: float) -> None:
        """Keep nothing for those who say nothing but what they were heard to be at."""
        for peer in self.roster:
            if not peer.lost and peer.mute(now, self.timing.quiet):
                for shelf in self.catalog:
                    incoming = peer.incoming.get(shelf.model)
                    shelf.forget(peer.name, but=incoming.version if incoming is not None else 0)

    def close(self, now: float) -> list[Effect]:
        """Resolve every call that is still open, as it stands."""
        return self._calls.close(now)

    @property
    def busy(self) -> bool:
        """Whether a publish is under way. Any thread may ask."""
        return self._calls.any_open

    def status(self, now: float) -> tuple[WorkerStatus, ...]:
        """Return who is there, and who runs which version."""
        return tuple(status_of(peer, self.catalog, self.timing, now) for peer in self.roster)

    def status_of(self, name: str, now: float) -> WorkerStatus | None:
        """Return how things stand with one worker; None if there is none of that name."""
        peer = self.roster.by_name(name)
        return None if peer is None else status_of(peer, self.catalog, self.timing, now)

    # Joining and leaving.

    def _hello(self, identity: bytes, hello: Hello, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._runs_another(hello):
            epoch = epoch_above(hello, None if self._age is None else self._age())
            if epoch is None:
                return self._turn_away(identity, hello, "stale-epoch", self._stale(hello), now)
            if now - self._renewed_at < self.timing.lost_after:
                return []  # it says hello again; whatever is said, workers start anew only so often
            effects = self._renew(epoch, hello, now)
        other = self.roster.by_identity(identity)
        if other is not None and other.name != hello.name:
            effects += self._leave(other, "its connection has taken another name", now)
        return effects + self._admit(identity, hello, now)

    def _admit(self, identity: bytes, hello: Hello, now: float) -> list[Effect]:
        admission, peer = self.roster.admit(identity, hello, now)
        match admission:
            case "contested" if peer is not None:
                return [Send(Ping(token=0), to=peer.identity)]
            case "taken" if peer is not None:
                return self._turn_away(identity, hello, "name-taken", _name_taken(peer), now)
            case "full":
                text = "the roster is full: stop some workers, or start another publisher"
                return self._turn_away(identity, hello, "limit", text, now)
            case _:
                assert peer is not None  # noqa: S101 - the other admissions have one
                return self._welcome(peer, admission, now)

    def _turn_away(
        self, identity: bytes, hello: Hello, code: str, text: str, now: float
    ) -> list[Effect]:
        """Refuse a worker; say so once, though it asks again and again."""
        effects: list[Effect] = [Send(Refuse(code=code, text=text), to=identity)]
        told = f"worker {hello.name} is refused ({code}): {text}"
        if self._absent.note(hello.name, hello.models, code, told, now):
            effects.append(Notice("refused", told, hello.name, warning=True))
        return effects

    # Who comes first.

    def _runs_another(self, hello: Hello) -> bool:
        """Return whether a worker runs weights of a publisher that may be later than this one."""
        return hello.epoch > self.epoch or any(
            running is not None and running.epoch == self.epoch and not self._had(model, running)
            for model, running in hello.models.items()
        )

    def _had(self, model: str, running: Running) -> bool:
        shelf = self.catalog.get(model)
        return shelf is not None and shelf.had(running.version)

    def _stale(self, hello: Hello) -> str:
        chosen = (
            "its epoch was chosen, and stays"
            if self._age is None
            else "it did not start after that"
        )
        return (
            f"this publisher is of epoch {self.epoch}, but {hello.name} runs weights of epoch "
            f"{hello.epoch}, from another publisher, and {chosen}: if the other one is the newer, "
            "stop this one; if not, stop the other and restart this one, which then takes over"
        )

    def _renew(self, epoch: int, hello: Hello, now: float) -> list[Effect]:
        """Take a later epoch. For workers it is as if the publisher had restarted."""
        text = (
            f"epoch {self.epoch} becomes {epoch}: {hello.name} runs weights of epoch "
            f"{hello.epoch}, whose publisher started before this one; one of two clocks is wrong"
        )
        effects: list[Effect] = [Notice("renewed", text, warning=True)]
        for shelf in self.catalog:
            effects += self._calls.give_up(shelf.pending, "its publisher takes a new epoch", now)
            effects.append(Withdraw(shelf.model))
            shelf.renew(epoch)
            effects += [Settled(shelf.latest)] if shelf.latest and shelf.latest.alive else []
        self.epoch, self._renewed_at = epoch, now
        self._calls.renewed(epoch)
        self._pushes.clear()
        self._prepared = {
            model: msgspec.structs.replace(prepared, epoch=epoch)
            for model, prepared in self._prepared.items()
        }
        for peer in self.roster:
            peer.subscribed = False
            peer.incoming.clear()
        return effects + [  # of another epoch than theirs: they say hello
            Send(Pong(epoch=epoch), to=peer.identity) for peer in self.roster if not peer.lost
        ]

    def _welcome(self, peer: Peer, admission: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        peer.subscribed, peer.contested_at, peer.told_at = False, None, None
        self._absent.forget(peer.name)
        if admission != "known":
            effects.append(Notice("joined", f"worker {peer.name} joined", peer.name))
        peer.incoming.clear()
        peer.running = {
            model: running
            for model, running in peer.hello.models.items()
            if running is not None and self._plausible(model, running)
        }
        effects += self._back(peer, now)
        for model in peer.running:
            if peer.runs(model)[0] == self.epoch:
                effects += self._calls.arrived(peer, model, now)
        welcome = Welcome(
            epoch=self.epoch,
            data=self.data_endpoint,
            ping_ms=max(1, round(self.timing.ping * 1000)),
            lost_ms=max(2, round(self.timing.lost_after * 1000)),
            models=self._latest(peer),
            shared=self.shared,
            age_ms=0 if self._age is None else math.floor(self._age() * 1000),
        )
        prepared = self._prepared.values()
        told = [e for each in prepared for e in self._tell_prepared(peer, each)]
        return [Send(welcome, to=peer.identity), *self._rename(peer), *told, *effects]

    def _latest(self, peer: Peer) -> dict[str, int]:
        """Return the newest version that there is for a worker, of each of its models."""
        latest: dict[str, int] = {}
        for model in peer.hello.models:
            shelf = self.catalog.get(model)
            version = shelf.latest_for(peer.name) if shelf else None
            if version is not None:
                latest[model] = version.version
        return latest

    def _rename(self, peer: Peer) -> list[Effect]:
        """Tell a worker which of the versions that it runs are the latest under another name."""
        effects: list[Effect] = []
        for model, running in peer.running.items() if RENAMING in peer.hello.features else ():
            shelf = self.catalog.get(model)
            version = shelf.latest_for(peer.name) if shelf else None
            if version is None or version.key <= peer.runs(model):
                continue
            unproven = not running.digest and self._calls.must_hash(model, version.version)
            if version.is_known_as(running) and not unproven:
                epoch, number = version.key
                rename = Rename(model=model, epoch=epoch, version=number, was=running)
                effects.append(Send(rename, to=peer.identity))
        return effects

    def _tell_prepared(self, peer: Peer, prepared: Prepare) -> list[Effect]:
        """Tell a worker that understands it where the first version of its model will lie."""
        wanted = prepared.model in peer.hello.models and MAPPING in peer.hello.features
        return [Send(prepared, to=peer.identity)] if wanted and not peer.lost else []

    def _heard(self, peer: Peer, now: float) -> list[Effect]:
        peer.heard_at, peer.told_at = now, None
        return self._back(peer, now) if peer.lost else []

    def _back(self, peer: Peer, now: float) -> list[Effect]:
        """A worker is there, and may have missed what others were told."""
        effects: list[Effect] = []
        if peer.lost:
            peer.lost = False
            effects.append(Notice("back", f"worker {peer.name} answers again", peer.name))
        for version in self._calls.returned(peer, now):
            with contextlib.suppress(Retired):
                effects += self._describe(peer, version)
        return effects

    def _lose(self, peer: Peer, now: float, why: str) -> list[Effect]:
        phases = self._doing(peer, now)
        detail = why + (f" while {phases}" if phases else "")
        peer.lost, peer.stuck = True, False
        self._forget(peer)
        notice = Notice("lost", f"worker {peer.name} is lost: {detail}", peer.name)
        return [notice, *self._calls.lost(peer, detail, now)]

    def _turned(self, peer: Peer, now: float) -> bool:
        """Return whether a worker is stuck and was not, or the other way round."""
        return not peer.lost and peer.stuck != is_stuck(peer, self.timing, now)

    def _moved(self, peer: Peer, now: float) -> Notice:
        peer.stuck = not peer.stuck
        if not peer.stuck:
            return Notice("back", f"worker {peer.name} moves again", peer.name)
        return Notice("stuck", f"worker {peer.name} is stuck: {self._doing(peer, now)}", peer.name)

    def _doing(self, peer: Peer, now: float) -> str:
        return "; ".join(
            phase_of(m, i, self.catalog, self.timing, now) for m, i in peer.incoming.items()
        )

    def _forget(self, peer: Peer) -> None:
        """A worker is no longer there: nothing is kept for its sake."""
        peer.subscribed = False
        for shelf in self.catalog:
            shelf.forget(peer.name)
        peer.incoming.clear()

    def _leave(self, peer: Peer, why: str, now: float) -> list[Effect]:
        """A worker leaves in order: nobody waits for it."""
        self._forget(peer)
        self.roster.remove(peer)
        text = f"worker {peer.name} has left: {why}"
        self._absent.note(peer.name, peer.hello.models, "left", text, now)
        return [Notice("left", text, peer.name), *self._calls.left(peer, now)]

    def _ping(self, peer: Peer, message: Ping, _now: float) -> list[Effect]:
        peer.subscribed, peer.shared = message.subscribed, message.shared
        pong = Pong(token=message.token, epoch=self.epoch, models=self._latest(peer))
        return [Send(pong, to=peer.identity)]

    def _pong(self, _peer: Peer, _message: Pong, _now: float) -> list[Effect]:
        return []

    # Giving versions out.

    def _fetch(self, peer: Peer, fetch: Fetch, now: float) -> list[Effect]:
        shelf = self.catalog.get(fetch.model) if fetch.epoch == self.epoch else None
        version = shelf.get(fetch.version) if shelf else None
        if version is None and shelf and fetch.version == 0:
            version = shelf.latest_for(peer.name)
        code, text = refusal_of(fetch, version)
        try:
            if version is None or code:
                return self._turn_down(peer, fetch, code, text)
            if fetch.count:
                return self._give(peer, version, fetch, now)
            end = fetch.version > 0 and not fetch.layout  # asked for by one who has all chunks
            return self._describe(peer, version, layout=fetch.layout, end=end)
        except Retired:
            return self._turn_down(peer, fetch, *refusal_of(fetch, None))

    def _turn_down(self, peer: Peer, fetch: Fetch, code: str, text: str) -> list[Effect]:
        """Refuse a fetch; if what it asked for is gone, say what there is instead."""
        refuse = Refuse(
            code=code, text=text, model=fetch.model, epoch=fetch.epoch, version=fetch.version
        )
        effects: list[Effect] = [Send(refuse, to=peer.identity)]
        shelf = self.catalog.get(fetch.model)
        latest = shelf.latest_for(peer.name) if shelf and code == "gone" else None
        if latest is not None and latest.key != (fetch.epoch, fetch.version):
            with contextlib.suppress(Retired):  # being replaced now: the new one will be announced
                effects += self._describe(peer, latest)
        return effects

    def _describe(
        self, peer: Peer, version: Version, *, layout: bool = False, end: bool = False
    ) -> list[Effect]:
        """Announce a version to one worker; add the end unless it reads shared memory."""
        header = version.layout.header if layout else None
        announce = announcement(version, self._calls.undecided(version))
        version.receivers.add(peer.name)
        effects: list[Effect] = [Send(announce, header, to=peer.identity)]
        if end or not (peer.shared and version.shared):
            effects.append(Send(end_of(version), to=peer.identity))
        return effects

    def _give(self, peer: Peer, version: Version, fetch: Fetch, now: float) -> list[Effect]:
        version.receivers.add(peer.name)
        self._note(peer, fetch.model, fetch.version, "receiving", None, now)
        indexes = range(fetch.first, fetch.first + fetch.count)
        return [Send(*chunk_of(version, index), to=peer.identity) for index in indexes]

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
        if shelf is None or message.epoch != self.epoch or not shelf.had(message.version):
            return []
        version = shelf.get(message.version)
        if message.phase == "receiving" and version is None:
            return []  # what it applies may be gone by now, if that takes so long
        self._note(peer, message.model, message.version, message.phase, message.chunks, now)
        if message.phase != "receiving":
            shelf.left(peer.name, older_than=message.version + 1)
        elif version is not None and peer.runs(message.model) < version.key:
            version.receivers.add(peer.name)
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
            text = "the version was aborted or superseded"
            abort = abort_of(message.model, message.epoch, message.version, text)
            return [Send(abort, to=peer.identity)]
        if version.digest() != message.digest:
            return self._wrong_digest(peer, message)
        self._note(peer, message.model, message.version, "staged", None, now)
        shelf.left(peer.name, older_than=message.version + 1)
        effects = self._calls.staged(peer, version, now)
        if version is not shelf.pending and version.alive:
            effects.append(Send(commit_of(version), to=peer.identity))
        return effects

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
        return self._calls.arrived(peer, message.model, now)

    def _plausible(self, model: str, running: Running) -> bool:
        """Return whether a worker may run what it says it runs.

        It may if that is of an older epoch, or too long ago to say, or there is such a version and
        it reports its digest. None need be reported of a version that lay in shared memory, unless
        the caller asked for it.
        """
        shelf = self.catalog.get(model)
        if running.epoch != self.epoch or shelf is None:
            return running.epoch < self.epoch
        if not running.digest:
            if self._calls.must_hash(model, running.version):
                return False
            version = shelf.get(running.version)
            unhashed = version is None or version.shared is not None or bool(version.names)
            return shelf.had(running.version) and unhashed
        return shelf.known_digest(running.version) in ("", running.digest)

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
        if not message.intact:
            peer.running.pop(message.model, None)
        if not self._mine(message):
            return []
        self.catalog[message.model].left(peer.name, older_than=message.version + 1)
        incoming = peer.incoming.get(message.model)
        if incoming is not None and incoming.version == message.version:
            del peer.incoming[message.model]
        return self._calls.failed(peer, message, now)

    def _beacon(self, model: str) -> Beacon:
        shelf = self.catalog.get(model)
        latest = shelf.latest if shelf is not None else None
        version = latest.version if latest is not None and latest.alive else 0
        return Beacon(model=model, epoch=self.epoch, version=version)


def _name_taken(peer: Peer) -> str:
    return (
        f"the name {peer.name!r} belongs to a living worker (host {peer.hello.host or 'unknown'}, "
        f"process {peer.hello.pid}): give this one another name, or stop that one"
    )
