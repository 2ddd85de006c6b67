"""A publisher process and its trainer, on a simulated network."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import numpy as np

from weightbus.bus.effects import (
    Notice,
    Send,
)
from weightbus.bus.errors import ProtocolError, UnknownWorkerError
from weightbus.bus.headers import TOKEN_BYTES, from_worker
from weightbus.bus.limits import SNAPSHOTS_MAX
from weightbus.bus.memory import snapshots
from weightbus.bus.memory.snapshots import MakeRoom, Pool, Snapshot, no_room
from weightbus.bus.messages import (
    Announce,
    Applied,
    Commit,
    Failed,
    Fetch,
    Hello,
    Progress,
    Refuse,
    Staged,
    Welcome,
)
from weightbus.bus.publisher.effects import (
    Broadcast,
    HangUp,
    Hash,
    Release,
    Resolve,
    Settled,
)
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import Publication, PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.codecs.errors import WeightBusError
from weightbus.codecs.layout import Layout
from weightbus.python_client.publishing.models import Bases
from weightbus.python_client.settings import BASES, Encoding

from .conditions import CHUNK, TICK, Frames
from .invariants import Key
from .virtual_memory import VirtualSegment
from .virtual_shell import hash_all, perform
from .workers import Worker, lives

if TYPE_CHECKING:
    from .network import Simulation


@dataclass(frozen=True)
class Stored:
    """A version on disk."""

    model: str
    layout: Layout
    data: bytes
    digest: str
    names: set[tuple[int, int]]  # under which it was published or offered
    companions: frozenset[str] = frozenset()  # models whose versions it was published as one with


class Publisher:
    """One publisher process and its trainer."""

    machine: PublisherMachine
    open: dict[int, Publication]

    def __init__(self, sim: "Simulation", name: str) -> None:
        self.sim, self.name, self.incarnation = sim, name, 0
        self.endpoint = f"tcp://{name}"
        self.alive = False
        self.epochs: set[int] = set()
        self.disk = sim.disk if name == "p0" else None  # nobody else has this folder

    def stop(self) -> None:
        """Close as a user does: every open call is answered."""
        self.perform(self.machine.close(self.sim.now))
        assert not self.open, f"{len(self.open)} publishes are open after close()"
        self.alive = False

    def start(self) -> None:
        self.incarnation += 1
        self.alive = True
        sim = self.sim
        self.started = started = sim.now
        epoch = 100_000 + int((started + sim.rng.uniform(-1, 1) * sim.faults.skew) * 1000)
        if self.disk is not None:
            epoch = max(epoch, *self.epochs, 0) + 1
        while epoch in sim.invariants.started:
            epoch += 1
        sim.invariants.on_epoch(epoch, started)
        probe = self.segment(0).shared if self.incarnation % 3 != 2 else None  # not every system's
        drift = sim.rng.uniform(0.9999, 1.0001)
        self.sealer = sealer = sim.sealer()
        self.machine = PublisherMachine(
            PublisherState(
                epoch,
                self.endpoint,
                sim.timing,
                probe,
                age=lambda: (sim.now - started) * drift,
                secret=lambda: sim.rng.randbytes(TOKEN_BYTES // 2).hex(),
                keys=None if sealer is None else lambda _: sealer.keys,
                recorded=None if self.disk is None else lambda _: sim.changes.random() < 0.5,
            )
        )
        self.known = self.machine.view()
        self.listened: dict[str, str] = {}  # what a listener knows of workers
        self.pools: dict[str, Pool] = {}
        self.bases: dict[str, Bases] = {}  # by model
        self.before: dict[str, bytes] = {}  # by model, what its trainer published last
        self.copying: set[str] = set()  # models of which the trainer makes a snapshot
        self.open = {}
        self.settled: dict[str, Version] = {}  # by model, what is to be written to disk
        self.peers: dict[bytes, tuple[Worker, int]] = {}
        for stored in (self.disk or {}).values():
            self.offer_again(stored)
        self.promised: dict[tuple[bytes, str], Key] = {}  # by worker and model, in its welcome
        self.unreached_models: dict[bytes, float] = {}  # since when those who were told say nothing
        if self.disk and sim.chaotic:  # its trainer goes on at once, while workers come back
            pause = sim.changes.choice([0.0, 0.05, 0.3, 2.0])
            sim.later(pause, self.go_on, self.incarnation)
        sim.every_tick(self.incarnation, self, self.tick)

    def go_on(self, incarnation: int) -> None:
        if self.alive and self.incarnation == incarnation:
            self.publish()

    def offer_again(self, stored: Stored) -> None:
        """Offer what a publisher before has left on disk."""
        snapshot = self.take(stored.model, stored.layout.nbytes, replaces_latest=True)
        snapshot.data[:] = np.frombuffer(stored.data, np.uint8)
        offer = self.made(stored.model, stored.layout, snapshot)
        offer.chunks.fill(stored.digest)
        offer.names = frozenset(stored.names)
        beside = [(self.disk or {}).get(model) for model in stored.companions]
        if all(each is not None and stored.model in each.companions for each in beside):
            offer.companions = dict.fromkeys(stored.companions, 1)
        version, effects = self.machine.offer(offer)
        self.perform(effects)
        stored.names.add(version.key)
        now, ids = self.sim.now, self.sim.ids
        terms = PublishTerms(require=0, wait="none", timeout=0.0)
        publication = Publication(next(ids), version, terms, now, ())
        self.sim.invariants.on_publish(publication, stored.data)

    def segment(self, nbytes: int, _check: Callable[[], None] | None = None) -> VirtualSegment:
        """Make a segment: how `snapshots` takes memory."""
        segment = VirtualSegment(len(self.sim.segments), nbytes, lives(self))
        self.sim.segments[segment.shared.token] = segment
        return segment

    def take(
        self, model: str, nbytes: int, make_room: MakeRoom = no_room, *, replaces_latest: bool
    ) -> Snapshot:
        """Take memory for a version, and begin to fill it."""
        pool = self.pools.setdefault(model, Pool(model, patience=0.0, share=True))
        with patch.object(snapshots, "Segment", self.segment):
            snapshot = pool.take(nbytes, make_room, replaces_latest=replaces_latest)
        assert len(pool) <= SNAPSHOTS_MAX + (BASES if self.sim.patched else 0)
        snapshot.data[: nbytes // 2] = 255
        return snapshot

    def made(self, model: str, layout: Layout, snapshot: Snapshot) -> VersionOffer:
        """Return an offer whose bytes workers of this host may read, mostly."""
        where = snapshot.shared if self.sim.rng.random() < 0.9 else None
        return VersionOffer.of(model, layout, CHUNK, snapshot, where)

    def identity(self, worker: Worker) -> bytes:
        return f"{worker.process}#{worker.incarnation}".encode()

    def tick(self) -> None:
        self.forget_promises_to_the_silent()
        self.perform(self.machine.tick(self.sim.now))
        for publication in self.open.values():
            late = self.sim.now - publication.deadline
            assert late < 2 * TICK, f"publish {publication.number}: {late:.1f} s past its time"
        now = replace(self.machine.view(), malformed=self.known.malformed)  # that may lag
        assert self.known == now, "other threads know otherwise"
        self.pump()
        self.sim.invariants.on_roster(self.machine, self.listened, self.sim.now)

    def receive(self, identity: bytes, frames: Frames) -> None:
        epoch = self.machine.state.epoch
        self.heard(identity, frames)
        effects = self.machine.receive(identity, frames, self.sim.now)
        if self.machine.state.epoch != epoch:
            for version in (v for versions in self.machine.state.store.values() for v in versions):
                self.sim.invariants.on_renewal(version)
            hello = from_worker(frames)[0]
            assert isinstance(hello, Hello)
            self.sim.invariants.on_outbid(hello.epoch, self.machine.state.epoch, self.started)
        self.perform(effects)
        self.pump()

    def heard(self, identity: bytes, frames: Frames) -> None:
        """A worker that has a version, or wants none, need not find it here any more."""
        self.unreached_models.pop(identity, None)
        with suppress(ProtocolError):
            message = from_worker(frames)[0]
            if isinstance(message, Fetch | Progress):
                promised = self.promised.get((identity, message.model), ("", 0, 0))
                if (message.epoch, message.version) > promised[1:]:  # it is at a later one
                    self.promised.pop((identity, message.model), None)
            if isinstance(message, Progress) and message.phase == "receiving":
                return
            if isinstance(message, Progress | Staged | Applied | Failed):
                self.promised.pop((identity, message.model), None)

    def told(self, send: Send) -> None:
        """What a welcome names can be had until there is another, or a worker is lost."""  # P9
        match send.message:
            case Welcome(epoch=epoch, models=models):
                peer = self.machine.state.roster.by_identity(send.to)
                for model, version in models.items():
                    if peer is None or peer.runs(model) < (epoch, version):  # else it has it
                        self.promised[send.to, model] = (model, epoch, version)
            case Refuse(code="gone", version=0, model=model, epoch=epoch):
                promised = self.promised.get((send.to, model or ""), ("", 0, 0))
                kept = promised[1] == epoch == self.machine.state.epoch  # else it has another name
                assert not kept, f"{send.to!r} was welcomed with {promised}: it is gone"
            case Announce(model=model):
                self.unreached_models.setdefault(send.to, self.sim.now)
                if model in self.copying and (send.to, model) in self.promised:
                    self.sim.met.add("kept though the next one is copied")
            case Commit(model=model):  # another is the latest from now on
                self.discharge(model)
            case _:
                pass

    def forget_promises_to_the_silent(self) -> None:
        """Keep nothing for whoever was told of a version and says nothing: it may be stopped."""
        quiet = self.machine.state.timing.quiet
        silent = {
            each for each, since in self.unreached_models.items() if self.sim.now - since >= quiet
        }
        self.promised = {key: said for key, said in self.promised.items() if key[0] not in silent}

    def discharge(self, model: str) -> None:
        """Another version is there for all or some, or the memory is needed for one."""
        self.promised = {key: said for key, said in self.promised.items() if key[1] != model}

    def hashed(self, version: Version, incarnation: int) -> None:
        """All of a version is hashed, a while after it was asked for."""
        if self.alive and self.incarnation == incarnation and not version.gone:
            hash_all(version)
            self.perform(self.machine.hashed(version, self.sim.now))
            self.pump()

    def pump(self) -> None:
        while self.machine.ready:
            self.perform(self.machine.push(self.sim.now))

    def perform(self, effects: Sequence[PublisherEffect]) -> None:
        self.epochs.add(self.machine.state.epoch)  # it may have risen: recorded before it is told
        rng, now = self.sim.rng, self.sim.now
        if self.machine.state.view_outdated:
            self.known = self.machine.view()
        for effect in effects:
            match effect:
                case Hash(version):
                    pause = rng.choice([0.0, 0.001, 0.3])
                    self.sim.later(pause, self.hashed, version, self.incarnation)
                    continue
                case _:
                    pass
            for each in perform(self.machine, [effect], now, self.sealer):
                self.do(each)

    def do(self, effect: PublisherEffect) -> None:
        match effect:
            case Send():
                self.told(effect)
                self.sim.to_worker(self, effect)
            case Broadcast():
                if isinstance(effect.message, Announce):
                    for identity, _ in self.promised:
                        self.unreached_models.setdefault(identity, self.sim.now)
                self.sim.broadcast(self, effect)
            case HangUp():
                raise AssertionError("a worker was taken for a flood")
            case Notice():
                self.listen(effect)
            case Resolve():
                publication = self.open.pop(effect.publication)
                invariants = self.sim.invariants
                invariants.on_receipt(publication, effect.receipt, effect.achieved)
            case Settled(version) if self.disk is not None:
                self.settled[version.model] = version
                if version.companions.keys() <= self.settled.keys():
                    if self.sim.rng.random() < 0.8:  # else the disk is slow, or the end comes first
                        self.disk |= {v.model: self.stored(v) for v in self.settled.values()}
                    self.settled.clear()
            case _:
                pass

    def stored(self, version: Version) -> Stored:
        """Return a version as it is on disk."""
        published = self.sim.invariants.published[version.model, *version.key]
        names, about = {version.key, *version.names}, (published.data, published.digest)
        return Stored(version.model, version.layout, *about, names, frozenset(version.companions))

    def rekey(self) -> None:
        """Have another group key."""
        if self.sealer is not None:
            self.sealer.rekey(self.sim.now)
            self.sim.met.add("rekeyed")
            self.perform(self.machine.rekeyed())

    def listen(self, notice: Notice) -> None:
        """Do as a user who is told what becomes of workers."""
        if notice.kind in ("joined", "back"):
            self.listened[notice.worker] = "live"
        elif notice.kind in ("lost", "stuck"):
            self.listened[notice.worker] = notice.kind
            peer = self.machine.state.roster.by_name(notice.worker)
            lost = peer.identity if peer is not None and peer.lost else b""
            self.promised = {k: said for k, said in self.promised.items() if k[0] != lost}
        elif notice.kind == "left":
            del self.listened[notice.worker]

    def publish(self) -> bool:
        """Publish in one way or another; return whether there was memory for it."""
        rng, sim = self.sim.rng, self.sim
        model = rng.choice("aaab")
        size = rng.choice(sim.faults.sizes)
        together = rng.random() < 0.3
        names = [p.name for p in self.machine.state.roster if not p.relay]
        workers = tuple(rng.sample(names, rng.randint(1, len(names)))) if names else None
        if rng.random() < 0.6 or not sim.chaotic:
            workers = None
        elif rng.random() < 0.1:
            workers = ("nobody",)
        layout = Layout.plan([("w", "U8", (size,))])
        if sim.patched:
            layout = Layout.plan([("w", "BF16", (size // 2,))])
        if model in self.copying:
            return False
        everybody = workers is None and not together
        try:
            make_room = partial(self.make_room, model)
            snapshot = self.take(model, size, make_room, replaces_latest=everybody)
        except WeightBusError:
            return False
        offer = self.made(model, layout, snapshot)
        require = rng.choice([None, None, 0, 1, 2])
        expected = workers is None and require is None and rng.random() < 0.2
        terms = PublishTerms(
            workers=workers,
            require=require,
            expect=rng.choice([1, 2, 5]) if expected else 0,
            grace=rng.choice([0.0, 0.3, sim.timing.lost_after]),
            grace_of_gone=sim.ends.choice([0.0, 0.3]),
            alive=require is None and sim.ends.random() < 0.3,
            wait=rng.choice(["applied", "applied", "staged", "none"]),
            commit="together" if together else "auto",
            hash=rng.random() < 0.2,
            timeout=rng.choice([0.5, 3.0, 10.0]),
        )
        about = next(sim.ids), offer, terms, sim.now
        if sim.grouped and together and "b" not in self.copying and self.publish_many(*about):
            return True
        self.copying.add(model)
        pause = rng.choice([0.0, 0.0, 0.01, 0.5]) if sim.chaotic else 0.0
        if pause:  # meanwhile the machine may find out that its latest version is gone
            sim.later(pause, self.submit, *about, snapshot, self.incarnation)
        else:
            self.submit(*about, snapshot, self.incarnation)
        return True

    def publish_many(
        self, number: int, offer: VersionOffer, terms: PublishTerms, started: float
    ) -> bool:
        """Publish a version of each model as one; return whether there was memory for the other."""
        other = "b" if offer.model == "a" else "a"
        size = self.sim.many.choice(self.sim.faults.sizes)
        if other in self.copying:
            return False
        try:
            make_room = partial(self.make_room, other)
            snapshot = self.take(other, size, make_room, replaces_latest=False)
        except WeightBusError:
            return False
        beside = self.made(other, Layout.plan([("w", "U8", (size,))]), snapshot)
        offers, data = [offer, beside], list[bytes]()
        for each in offers:
            memory = cast("Snapshot", each.snapshot).data
            data.append(self.trained(each.model, self.sim.rng.randbytes(memory.nbytes)))
            memory[:] = np.frombuffer(data[-1], np.uint8)
            self.offer_patches(each, terms.workers)
            self.discharge(each.model)
        numbers = number, next(self.sim.ids)
        try:
            named = dict(zip(numbers, offers, strict=True))
            parts, effects = self.machine.publish_as_one(named, terms, started, self.sim.now)
        except UnknownWorkerError:
            for each in offers:
                each.snapshot.release()
            return True
        self.sim.met.add("published as one")
        for part, what in zip(parts, data, strict=True):
            self.open[part.number] = part
            self.sim.invariants.on_publish(part, what)
        self.perform(effects)
        self.pump()
        return True

    def trained(self, model: str, data: bytes) -> bytes:
        """Return what is published: random bytes; or, where there are patches, few other ones."""
        before, rng = self.before.get(model, b""), self.sim.changes
        if self.sim.patched and len(before) == len(data) and rng.random() < 0.9:
            changed = bytearray(before)
            for _ in range(rng.choice([0, 3, 30])):
                changed[rng.randrange(len(changed))] ^= rng.choice([1, 3, 255])
            data = bytes(changed)
        self.before[model] = data
        return data

    def offer_patches(self, offer: VersionOffer, workers: Collection[str] | None) -> None:
        """Make patches, as the publisher does in the thread that copies."""
        if not self.sim.patched:
            return
        shared = offer.shared is not None
        patch_candidates = self.machine.state.roster.patch_candidates(
            offer.model, workers, shared=shared
        )
        encoding: Encoding = "delta" if self.sim.changes.random() < 0.9 else "raw"
        bases = self.bases.setdefault(offer.model, Bases(offer.model))
        bases.offer(offer, encoding, patch_candidates)
        self.sim.met |= {f"{len(offer.patches)} patches"}

    def withdraw_patches(self) -> None:
        """Have no patches any more, of whatever is given out."""
        for version in (v for versions in self.machine.state.store.values() for v in versions):
            version.patches = ()

    def make_room(
        self, model: str, among: Collection[Snapshot], replaces_latest: bool, _left: float
    ) -> bool:
        effects = self.machine.make_room(model, among, replaces_latest=replaces_latest)
        self.discharge(model)
        self.perform(effects)
        return any(isinstance(effect, Release) for effect in effects)

    def submit(
        self,
        number: int,
        offer: VersionOffer,
        terms: PublishTerms,
        started: float,
        snapshot: Snapshot,
        incarnation: int,
    ) -> None:
        """The trainer has copied its weights."""
        if not self.alive or incarnation != self.incarnation:
            return
        model = offer.model
        self.copying.discard(model)
        data = self.trained(model, self.sim.rng.randbytes(snapshot.data.nbytes))
        snapshot.data[:] = np.frombuffer(data, np.uint8)
        if self.sim.chaotic and self.sim.rng.random() < 0.05:  # it fails half-way
            snapshot.release()
            return
        self.offer_patches(offer, terms.workers)
        self.discharge(model)
        try:
            publication, effects = self.machine.publish(number, offer, terms, started, self.sim.now)
        except UnknownWorkerError:
            there = {p.name for p in self.machine.state.roster}
            assert not set(terms.workers or ()) <= there
            snapshot.release()
            return
        self.open[number] = publication
        self.sim.invariants.on_publish(publication, data)
        self.perform(effects)
        self.pump()
