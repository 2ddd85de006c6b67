"""A simulated network around the real machines: one seed, one run, the same every time.

    python tests/simulate.py --seeds 5000          many seeds, on all cores
    python tests/simulate.py --seed 17 --trace     one seed, every delivery printed

First comes chaos: messages are lost, delayed, doubled, reordered and damaged, links are slow and
their queues short, workers are cut off, both sides are killed or closed and started again, users
apply late or fail to, before or after bytes of the model have changed, some refuse what does not
fit them, two processes want one name, and the trainer publishes in every way there is. Workers on
the publisher's host copy from its memory, and are stopped in the middle of it with their locks
held, while the trainer fills other segments, or that one if it can. A third of the runs is sealed,
under group keys that change. In a fifth little changes from version to version, which goes to most
workers as patches. Clocks are wrong; in some runs
a second publisher takes over while the first lives on, and workers wander between the two. Then the
network heals, all go to the publisher that started last, and everybody must end up with its latest
version. `invariants.py` says what must hold all along.
"""

import argparse
import heapq
import itertools
import math
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from weightbus.bus.effects import (
    Connect,
    Copy,
    Decode,
    Effect,
    Notice,
    Ready,
    Refused,
    Rejected,
    Renamed,
    Send,
    Subscribe,
)
from weightbus.bus.errors import ProtocolError, UnknownWorkerError
from weightbus.bus.lease import Lease
from weightbus.bus.limits import APPLIES_MAX, SNAPSHOTS_MAX, STAGING_BYTES_MAX, Timing
from weightbus.bus.memory import snapshots
from weightbus.bus.memory.snapshots import MakeRoom, Pool, Snapshot, nobody
from weightbus.bus.memory.staging import copying, patching
from weightbus.bus.messages import (
    DELTA,
    PAYLOAD,
    RENAMING,
    TOKEN_BYTES,
    UPSTREAM,
    Announce,
    Applied,
    Buffer,
    Chunk,
    Commit,
    End,
    Failed,
    Hello,
    Message,
    Progress,
    Refuse,
    SealedChunk,
    Shared,
    Staged,
    Welcome,
    encode,
    from_publisher,
    from_worker,
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
from weightbus.bus.publisher.publication import Publication
from weightbus.bus.publisher.version import Version
from weightbus.bus.sealer import Sealer
from weightbus.bus.staged import Copying, OverwrittenError, Patching, StagedVersion, StaleError
from weightbus.bus.worker.events import Copied, Decoded, Outcome, Report, Wanted
from weightbus.bus.worker.keyring import Keyring
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.reports import Identity
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.errors import WeightBusError
from weightbus.codecs.layout import Layout
from weightbus.codecs.sealing import KEY_BYTES
from weightbus.python_client.models import Bases
from weightbus.python_client.settings import BASES, Encoding
from weightbus.tests import pooling
from weightbus.tests.invariants import Invariants, Key
from weightbus.tests.performing import done
from weightbus.tests.virtual_memory import Lives, VirtualSegment, VirtualView
from weightbus.tests.virtual_shell import hash_all, perform

TICK = 0.1  # seconds of virtual time between two ticks of a machine
CHAOS = 12.0  # seconds of faults
HEALING = 90.0  # seconds after them in which everybody must catch up
APART = 3.0  # seconds between two starts that are told apart, whatever delays the network has
REKEYS = 0.2  # a second, of a publisher that seals
SETTLED = 3.0  # seconds without faults after which catching up is checked
BLOCK = 20  # seeds that one process takes at a time
EVENTS_MAX = 100_000  # in one run; a sound one takes a few thousand
CHUNK = 16  # bytes
SIZES = (0, 1, 40, 40, 640, 640, 1600)  # bytes of a model
PATCHED = (*[640] * 12, 1600, 16)  # where there are patches: of one layout, mostly

T = TypeVar("T")

Steps = Generator[None, None, T]  # what takes long
Link = tuple[str, str]  # from, to
Frames = Sequence[Buffer]


@dataclass(frozen=True)
class Faults:
    """How bad a network is, as probabilities per message or per second."""

    loss: float
    double: float
    damage: float
    delay: float  # mean seconds
    cut: float  # partitions, per worker and second
    death: float  # kills, per process and second
    apply: float  # failures of users, per version
    reorder: bool
    queue: int  # messages on their way to one subscriber before PUB drops more
    rates: tuple[float, ...]  # bytes per second to a worker, each worker draws one
    impostor: bool  # a second process takes the name of the first worker
    successor: bool  # a second publisher starts somewhere while the first one lives
    skew: float  # how many seconds wall clocks are off, either way
    hurry: float  # of trainers: how probable another publish is, every quarter of a second
    sizes: tuple[int, ...]  # bytes of models; of one size, memory is used again
    whims: float  # of users who want one version and no other
    stops: float  # of threads that copy, per step: they are stopped, and hold their locks

    @staticmethod
    def draw(rng: random.Random) -> "Faults":
        """Draw one network."""
        return Faults(
            loss=rng.choice([0.0, 0.02, 0.1, 0.4]),
            double=rng.choice([0.0, 0.05, 0.2]),
            damage=rng.choice([0.0, 0.0, 0.02, 0.1]),
            delay=rng.choice([0.001, 0.01, 0.1]),
            cut=rng.choice([0.0, 0.05, 0.2]),
            death=rng.choice([0.0, 0.05, 0.15]),
            apply=rng.choice([0.0, 0.02, 0.02, 0.5]),
            reorder=rng.random() < 0.5,
            queue=rng.choice([2, 8, 64, 64]),
            rates=rng.choice([(math.inf,), (math.inf, 10_000.0, 3_000.0), (20_000.0,)]),
            impostor=rng.random() < 0.2,
            successor=rng.random() < 0.3,
            skew=rng.choice([0.0, 0.0, 20.0]),
            hurry=rng.choice([0.3, 0.3, 0.9]),
            sizes=rng.choice([SIZES, SIZES, (640,)]),
            whims=rng.choice([0.0, 0.0, 0.3]),
            stops=rng.choice([0.0, 0.03, 0.2]),
        )


class Worker:
    """One worker process: the machine, and a user who applies when it pleases.

    Some users refuse models of one byte, some have room for small models only.
    """

    machine: WorkerMachine

    def __init__(self, sim: "Simulation", name: str, process: str) -> None:
        self.sim, self.name, self.process = sim, name, process
        self.incarnation = 0
        self.alive = False
        self.at = sim.publishers[0]  # where its address leads to
        self.rate = sim.rng.choice(sim.faults.rates)
        self.local = sim.rng.random() < 0.5  # on the publisher's host
        self.local &= not sim.patched or sim.changes.random() < 0.3
        self.picky = sim.rng.random() < 0.15
        self.bytes_max = sim.rng.choice([STAGING_BYTES_MAX] * 6 + [SIZES[-1] - 1])

    def start(self) -> None:
        self.incarnation += 1
        self.alive, self.cut_until = True, 0.0
        instance = f"{self.sim.rng.getrandbits(128):032x}"
        features: tuple[str, ...] = (RENAMING, UPSTREAM) if self.name != "w1" else ()
        features += (DELTA,) if self.sim.patched and self.name != "w2" else ()
        identity = Identity(self.name, instance, features=features)
        models = ["a", "b"] if self.name == "w0" else ["a"]
        keyring = Keyring() if self.sim.sealed else None
        self.machine = WorkerMachine(
            identity, models, self.objection, self.bytes_max, self.sim.timing, keyring=keyring
        )
        self.topics: set[bytes] = set()
        self.views: dict[str, VirtualView] = {}  # by token, what it has opened
        self.connected, self.lent = "", False
        self.refusal = ""
        self.contents: dict[str, bytes] = {}  # of its models, what lies in their memory
        self.names: dict[str, Key] = {}  # of its models, what it calls what lies there
        self.written = 0  # the greatest epoch of which anything was written there
        self.ready: dict[str, StagedVersion] = {}
        self.only: dict[str, tuple[int, int]] = {}  # of a model, what its user wants and no other
        self.applying: set[str] = set()
        self.sim.every_tick(self.incarnation, self, self.tick)

    def open(self, shared: Shared, nbytes: int) -> VirtualView | None:
        segment = self.sim.segments.get(shared.token) if self.local else None
        if segment is None or segment.data.nbytes != nbytes:
            return None
        if shared.token not in self.views:
            if not segment.lives():  # nobody can open it any more
                return None
            self.views[shared.token] = segment.open(lives(self))
        return self.views[shared.token]

    def objection(self, _model: str, layout: Layout) -> str:
        return "one byte is no model" if self.picky and layout.nbytes == 1 else ""

    def takes(self, layout: Layout) -> bool:
        return layout.nbytes <= self.bytes_max and not self.objection("", layout)

    def copy(self, staged: StagedVersion, before: tuple[int, int]) -> Steps[list[Effect]]:
        """Copy a version into the model, in two steps: somebody may want its memory meanwhile."""
        half, digest = staged.data.nbytes // 2, staged.digest
        try:
            with staged.reading():
                whole = staged.data[:half].tobytes()
                yield
                whole += staged.data[half:].tobytes()
                if staged.hash_chunks:
                    digest = digest_of(staged.layout.id, staged.data, staged.hash_chunks)
        except OverwrittenError:
            raise AssertionError(f"{staged.key} was overwritten under a lock") from None
        except StaleError:
            self.sim.met.add("stale")
            return self.report(staged, "stale")
        self.sim.invariants.on_apply(self.name, before, staged, whole)
        self.contents[staged.model] = whole
        self.names[staged.model] = (staged.model, *staged.key)
        self.written = max(self.written, staged.epoch)
        process = f"{self.process}#{self.incarnation} of {staged.model}"
        self.sim.invariants.on_follow(process, before[0], staged.epoch)
        return self.report(staged, "applied", digest)

    def go_on(self, steps: Steps[T], then: Callable[[T], None], incarnation: int) -> None:
        """Do a step of what takes long, then others: a thread may be stopped at any time."""
        if incarnation != self.incarnation or not self.alive:
            return
        try:
            next(steps)
        except StopIteration as end:
            then(end.value)
            return
        pause = self.sim.rng.choice([0.0, 0.0, 0.01, 0.3]) if self.sim.chaotic else 0.0
        stopped = self.sim.chaotic and self.sim.rng.random() < self.sim.faults.stops
        self.sim.later(4.0 if stopped else pause, self.go_on, steps, then, incarnation)

    def copied(self, copy: Copying, crcs: NDArray[np.uint32] | None) -> None:
        """A copy from shared memory into staging has ended."""
        self.sim.met.add("overtaken" if not copy.live else "late" if crcs is None else "copied")
        self.sim.invariants.on_copy(self.name, copy, crcs)
        self.perform(self.machine.happened(Copied(copy, crcs), self.sim.now))
        if self.sim.faults.damage == 0:
            self.sim.invariants.on_arriving(self.name, self.machine.slots.values())

    def decoded(self, job: Patching, fault: str) -> None:
        """A patch was decoded, or is of no use."""
        self.sim.met.add("overtaken patch" if not job.live else "bad patch" if fault else "patched")
        self.perform(self.machine.happened(Decoded(job, fault, 0.25), self.sim.now))

    def report(
        self, staged: StagedVersion, what: Outcome, digest: str = "", *, still: bool = False
    ) -> list[Effect]:
        kept = staged.own if what == "applied" else None
        report = Report(staged.model, staged.key, what, "no", digest, still, kept)
        return self.machine.happened(report, self.sim.now)

    def fail(self, staged: StagedVersion, *, still: bool) -> list[Effect]:
        """Fail to apply: before a byte has changed, or half-way; `still`: there is no time left."""
        torn = self.sim.rng.random() < 0.5
        if torn:
            self.contents[staged.model] = b"torn" + staged.data.tobytes()
            self.written = max(self.written, staged.epoch)
        effects = self.report(staged, "torn" if torn else "declined", still=still)
        if not torn or self.machine.slots[staged.model].applying.torn >= APPLIES_MAX:
            self.sim.spoiled.add((self.process, staged.model, *staged.key))
        return effects

    def leave(self) -> None:
        """Close as a user does, with a goodbye."""
        self.perform(self.machine.close())
        self.alive = False

    def tick(self) -> None:
        self.perform(self.machine.tick(self.sim.now))
        self.perform(self.machine.connected(self.sim.now))
        self.sim.invariants.on_slots(self.process, self.machine.slots.values())
        self.sim.invariants.on_contents(self.process, self.machine.slots.values(), self.contents)
        self.sim.invariants.on_bases(self.process, self.machine.slots.values())

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in done(self.machine, list(effects), self.sim.now, self.open):
            match effect:
                case Copy(copy):
                    then = partial(self.copied, copy)
                    self.sim.later(0.0, self.go_on, copying(copy), then, self.incarnation)
                case Decode(job):
                    ended = partial(self.decoded, job)
                    self.sim.later(0.0, self.go_on, patching(job), ended, self.incarnation)
                case Notice("unpatched"):
                    self.sim.met.add("unpatched")
                case Send():
                    self.sim.invariants.on_report(self.name, effect.message)
                    self.sim.invariants.on_claim(self.name, effect.message, self.contents)
                    if isinstance(effect.message, Hello):
                        assert effect.message.epoch == self.written, "it forgot whom it followed"
                    token = self.machine.upstream if effect.upstream else ""
                    if not (token and self.sim.word_to_publisher(self, token, effect.message)):
                        self.sim.to_publisher(self, effect.message)
                case Rejected(model, epoch, version, "gone"):
                    self.sim.met.add("gone")
                    self.want_latest(model, (epoch, version), self.incarnation)
                case Refused():
                    self.refusal = effect.code
                case Connect():
                    self.connected = effect.endpoint
                case Subscribe():
                    known = effect.topic in self.topics
                    (self.topics.add if effect.on else self.topics.discard)(effect.topic)
                    if effect.on and not known:
                        self.sim.subscribed(self, effect.topic)
                case Ready():
                    self.hand_over(effect.staged)
                case Renamed(model, epoch, version):
                    key = (model, epoch, version)
                    self.sim.invariants.on_rename(self.name, key, self.names[model], self.contents)
                    self.names[model] = key
                    self.written = max(self.written, epoch)
                case _:
                    pass

    def want(self) -> None:
        """The user wants one version and no other, for a while: a new one or an old one."""
        model = self.sim.rng.choice([*self.machine.slots])
        heard = self.machine.slots[model].asking.heard
        if model not in self.only and heard[1]:
            key = (heard[0], max(1, heard[1] + self.sim.rng.choice([-2, -1, 0, 0, 1, 1])))
            self.only[model] = key
            self.sim.met.add("wanted")
            self.perform(self.machine.happened(Wanted(model, key), self.sim.now))
            pause = self.sim.rng.choice([0.5, 3.0])
            self.sim.later(pause, self.want_latest, model, key, self.incarnation)

    def want_latest(self, model: str, key: tuple[int, int], incarnation: int) -> None:
        """What was wanted is there, or is not to be had, or was wanted for long enough."""
        if incarnation == self.incarnation and self.alive and self.only.get(model) == key:
            del self.only[model]
            self.perform(self.machine.happened(Wanted(model, None), self.sim.now))
            if model in self.ready and model not in self.applying:
                self.apply_later(model)

    def hand_over(self, staged: StagedVersion) -> None:
        only = self.only.get(staged.model, staged.key)
        decided = staged.say_staged and staged.key < only  # all apply it together, or none (W14)
        assert decided or staged.key == only, f"{self.name} wants {only} alone, not {staged.key}"
        older = self.ready.pop(staged.model, None)
        assert older is None or older.key != only or older.key == staged.key, "it was pinned"
        self.ready[staged.model] = staged
        if older is not None:
            self.perform(self.report(older, "newer"))
        if staged.model not in self.applying:
            self.apply_later(staged.model)

    def apply_later(self, model: str) -> None:
        """The user comes by after a while and takes what is ready then."""
        self.applying.add(model)
        pause = self.sim.rng.choice([0.0, 0.0, 0.05, 1.0]) if self.sim.chaotic else 0.0
        self.sim.later(pause, self.take, model, self.incarnation)

    def take(self, model: str, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        if self.ready[model].key != self.only.get(model, self.ready[model].key):
            self.applying.discard(model)
            return
        staged = self.ready.pop(model)
        self.perform(self.report(staged, "taken"))
        pause = self.sim.rng.choice([0.0, 0.02, 0.3]) if self.sim.chaotic else 0.0
        self.sim.later(pause, self.apply, staged, incarnation)

    def apply(self, staged: StagedVersion, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        if self.sim.chaotic and self.sim.rng.random() < self.sim.faults.apply:
            late = self.sim.rng.random() < 0.3
            effects = self.fail(staged, still=late)
            if late:
                self.sim.met.add("hung")
                self.perform(effects)
                self.sim.later(self.sim.rng.choice([0.1, 3.0]), self.returned, staged, incarnation)
            else:
                self.done_with(staged, effects)
            return
        running = self.machine.slots[staged.model].running
        before = (running.epoch, running.version) if running else (0, 0)
        self.go_on(self.copy(staged, before), partial(self.done_with, staged), incarnation)

    def returned(self, staged: StagedVersion, incarnation: int) -> None:
        """The user is back, too late: what that says does not matter."""
        if incarnation == self.incarnation and self.alive:
            self.done_with(staged, self.report(staged, self.sim.rng.choice(["applied", "torn"])))

    def done_with(self, staged: StagedVersion, effects: Sequence[Effect]) -> None:
        """The user has applied a version, or has not."""
        self.applying.discard(staged.model)
        self.perform(effects)
        if self.only.get(staged.model) == staged.key:
            running = self.machine.slots[staged.model].running
            if running is not None and (running.epoch, running.version) == staged.key:
                self.sim.met.add("exact")
                self.want_latest(staged.model, staged.key, self.incarnation)
        if staged.model in self.ready and staged.model not in self.applying:
            self.apply_later(staged.model)


def lives(process: "Worker | Publisher") -> Lives:
    """Return what says whether a process is still the one that it is now."""
    incarnation = process.incarnation
    return lambda: process.alive and process.incarnation == incarnation


@dataclass(frozen=True)
class Stored:
    """A version on disk."""

    model: str
    layout: Layout
    data: bytes
    digest: str
    names: set[tuple[int, int]]  # under which it was published or offered


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
        probe = self.segment(0).shared
        drift = sim.rng.uniform(0.9999, 1.0001)
        self.sealer = sealer = sim.sealer()
        self.machine = PublisherMachine(
            epoch,
            self.endpoint,
            sim.timing,
            probe,
            age=lambda: (sim.now - started) * drift,
            secret=lambda: sim.rng.randbytes(TOKEN_BYTES // 2).hex(),
            keys=None if sealer is None else lambda _: sealer.keys,
            recorded=None if self.disk is None else lambda _: sim.changes.random() < 0.5,
        )
        self.listened: dict[str, str] = {}  # what a listener knows of workers
        self.pools: dict[str, Pool] = {}
        self.bases: dict[str, Bases] = {}  # by model
        self.before: dict[str, bytes] = {}  # by model, what its trainer published last
        self.copying: set[str] = set()  # models of which the trainer makes a snapshot
        self.open = {}
        self.peers: dict[bytes, tuple[Worker, int]] = {}
        for stored in (self.disk or {}).values():
            self.offer_again(stored)
        self.promised: dict[tuple[bytes, str], Key] = {}  # by worker and model, in its welcome
        self.unheard: dict[bytes, float] = {}  # since when those who were told say nothing
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
        version = self.version(stored.model, stored.layout, snapshot)
        version.restored(stored.digest, frozenset(stored.names))
        self.perform(self.machine.offer(version))
        stored.names.add(version.key)
        now, ids = self.sim.now, self.sim.ids
        self.sim.invariants.on_publish(
            Publication(next(ids), version, None, 0, "none", "auto", now, now), stored.data
        )

    def segment(self, nbytes: int, _check: Callable[[], None] | None = None) -> VirtualSegment:
        """Make a segment: how `snapshots` takes memory."""
        segment = VirtualSegment(len(self.sim.segments), nbytes, lives(self))
        self.sim.segments[segment.shared.token] = segment
        return segment

    def take(
        self, model: str, nbytes: int, make_room: MakeRoom = nobody, *, replaces_latest: bool
    ) -> Snapshot:
        """Take memory for a version, and begin to fill it."""
        pool = self.pools.setdefault(model, Pool(model, patience=0.0, share=True))
        with patch.object(snapshots, "Segment", self.segment):
            snapshot = pool.take(nbytes, make_room, replaces_latest=replaces_latest)
        assert len(pool) <= SNAPSHOTS_MAX + (BASES if self.sim.patched else 0)
        snapshot.data[: nbytes // 2] = 255
        return snapshot

    def version(self, model: str, layout: Layout, snapshot: Snapshot) -> Version:
        """Return a version whose bytes workers of this host may read, mostly."""
        where = snapshot.shared if self.sim.rng.random() < 0.9 else None
        return Version(model, layout, CHUNK, snapshot, where)

    def identity(self, worker: Worker) -> bytes:
        return f"{worker.process}#{worker.incarnation}".encode()

    def tick(self) -> None:
        self.forget_promises_to_the_silent()
        self.perform(self.machine.tick(self.sim.now))
        for publication in self.open.values():
            late = self.sim.now - publication.deadline
            assert late < 2 * TICK, f"publish {publication.id} is open {late:.1f} s past its time"
        self.pump()
        self.sim.invariants.on_roster(self.machine, self.listened, self.sim.now)

    def receive(self, identity: bytes, frames: Frames) -> None:
        epoch = self.machine.epoch
        self.heard(identity, frames)
        effects = self.machine.receive(identity, frames, self.sim.now)
        if self.machine.epoch != epoch:
            for version in (v for versions in self.machine.store for v in versions):
                self.sim.invariants.on_renewal(version)
            hello = from_worker(frames)[0]
            assert isinstance(hello, Hello)
            self.sim.invariants.on_outbid(hello.epoch, self.machine.epoch, self.started)
        self.perform(effects)
        self.pump()

    def heard(self, identity: bytes, frames: Frames) -> None:
        """A worker that has a version, or wants none, need not find it here any more."""
        self.unheard.pop(identity, None)
        with suppress(ProtocolError):
            message = from_worker(frames)[0]
            if isinstance(message, Progress) and message.phase == "receiving":
                return
            if isinstance(message, Progress | Staged | Applied | Failed):
                self.promised.pop((identity, message.model), None)

    def told(self, send: Send) -> None:
        """What a welcome names can be had until there is another, or a worker is lost."""  # P9
        match send.message:
            case Welcome(epoch=epoch, models=models):
                for model, version in models.items():
                    self.promised[send.to, model] = (model, epoch, version)
            case Refuse(code="gone", version=0, model=model, epoch=epoch):
                promised = self.promised.get((send.to, model or ""), ("", 0, 0))
                kept = promised[1] == epoch == self.machine.epoch  # else it has another name
                assert not kept, f"{send.to!r} was welcomed with {promised}: it is gone"
            case Announce(model=model):
                self.unheard.setdefault(send.to, self.sim.now)
                if model in self.copying and (send.to, model) in self.promised:
                    self.sim.met.add("kept though the next one is copied")
            case Commit(model=model):  # another is the latest from now on
                self.discharge(model)
            case _:
                pass

    def forget_promises_to_the_silent(self) -> None:
        """Keep nothing for whoever was told of a version and says nothing: it may be stopped."""
        quiet = self.machine.timing.quiet
        silent = {each for each, since in self.unheard.items() if self.sim.now - since >= quiet}
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
        while self.machine.pushing:
            self.perform(self.machine.push(self.sim.now))

    def perform(self, effects: Sequence[PublisherEffect]) -> None:
        self.epochs.add(self.machine.epoch)  # it may have risen: recorded before it is told
        rng, now = self.sim.rng, self.sim.now
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
                        self.unheard.setdefault(identity, self.sim.now)
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
                if self.sim.rng.random() < 0.8:  # else the disk is slow, or the end comes first
                    published = self.sim.invariants.published[version.model, *version.key]
                    self.disk[version.model] = Stored(
                        version.model,
                        version.layout,
                        published.data,
                        published.digest,
                        {version.key, *version.names},
                    )
            case _:
                pass

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
            peer = self.machine.roster.by_name(notice.worker)
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
        names = [p.name for p in self.machine.roster]
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
        version = self.version(model, layout, snapshot)
        require = rng.choice([None, None, 0, 1, 2])
        expected = workers is None and require is None and rng.random() < 0.2
        publication = Publication(
            id=next(sim.ids),
            version=version,
            workers=workers,
            require=require,
            expect=rng.choice([1, 2, 5]) if expected else 0,
            grace=rng.choice([0.0, 0.3, sim.timing.lost_after]),
            grace_of_gone=sim.ends.choice([0.0, 0.3]),
            alive=require is None and sim.ends.random() < 0.3,
            wait=rng.choice(["applied", "applied", "staged", "none"]),
            commit="together" if together else "auto",
            hash=rng.random() < 0.2,
            started=sim.now,
            deadline=sim.now + rng.choice([0.5, 3.0, 10.0]),
        )
        self.copying.add(model)
        pause = rng.choice([0.0, 0.0, 0.01, 0.5]) if sim.chaotic else 0.0
        if pause:  # meanwhile the machine may find out that its latest version is gone
            sim.later(pause, self.submit, publication, snapshot, self.incarnation)
        else:
            self.submit(publication, snapshot, self.incarnation)
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

    def offer_patches(self, publication: Publication) -> None:
        """Make patches, as the publisher does in the thread that copies."""
        version = publication.version
        if not self.sim.patched:
            return
        shared = version.shared is not None
        takers = self.machine.roster.takers(version.model, publication.workers, shared=shared)
        encoding: Encoding = "delta" if self.sim.changes.random() < 0.9 else "raw"
        bases = self.bases.setdefault(version.model, Bases(version.model))
        bases.offer(version, encoding, takers)
        self.sim.met |= {f"{len(version.patches)} patches"}

    def withdraw_patches(self) -> None:
        """Have no patches any more, of whatever is given out."""
        for version in (v for versions in self.machine.store for v in versions):
            version.patches = ()

    def make_room(
        self, model: str, among: Collection[Snapshot], replaces_latest: bool, _left: float
    ) -> bool:
        effects = self.machine.make_room(model, among, replaces_latest=replaces_latest)
        self.discharge(model)
        self.perform(effects)
        return any(isinstance(effect, Release) for effect in effects)

    def submit(self, publication: Publication, snapshot: Snapshot, incarnation: int) -> None:
        """The trainer has copied its weights."""
        if not self.alive or incarnation != self.incarnation:
            return
        model = publication.version.model
        self.copying.discard(model)
        data = self.trained(model, self.sim.rng.randbytes(snapshot.data.nbytes))
        snapshot.data[:] = np.frombuffer(data, np.uint8)
        if self.sim.chaotic and self.sim.rng.random() < 0.05:  # it fails half-way
            snapshot.release()
            return
        self.offer_patches(publication)
        self.discharge(model)
        self.open[publication.id] = publication
        try:
            effects = self.machine.publish(publication, self.sim.now)
        except UnknownWorkerError:
            there = {p.name for p in self.machine.roster}
            assert not set(publication.workers or ()) <= there
            del self.open[publication.id]
            snapshot.release()
            return
        self.sim.invariants.on_publish(publication, data)
        self.perform(effects)
        self.pump()


class Simulation:
    """One run."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.trace = trace
        self.now = 0.0
        self.timing = self.rng.choice([Timing(), Timing(), Timing(ping=0.25, lost_after=1.0)])
        self.faults = Faults.draw(self.rng)
        self.invariants = Invariants()
        self.sealed = seed % 3 == 0
        self.keys = random.Random(f"group keys of {seed}")
        self.ends = random.Random(f"ends of {seed}")  # of connections
        self.patched = seed % 5 == 2
        self.changes = random.Random(f"changes of {seed}")
        if self.patched:
            self.faults = replace(self.faults, sizes=PATCHED)
        self.spoiled: set[tuple[str, str, int, int]] = set()  # users failed to apply these
        self.ids = itertools.count()
        self.segments: dict[str, VirtualSegment] = {}  # by token
        self.met: set[str] = set()  # what has happened that is rare
        # What publishers leave behind, if they leave anything, and all their epochs with it.
        self.disk: dict[str, Stored] | None = {} if seed % 2 else None
        self.chaotic = True
        self.events = 0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._arrives: dict[Link, float] = {}  # when the last message on a link does
        self._busy: dict[Link, float] = {}  # until when the bytes before take up a link
        self._queued: Counter[Link] = Counter()
        self.publishers = [Publisher(self, "p0")]
        names = [f"w{i}" for i in range(self.rng.randint(1, 4))]
        self.workers = [Worker(self, name, name) for name in names]
        for worker in self.workers:
            worker.start()
        if self.faults.impostor:
            self.workers.append(Worker(self, "w0", "impostor"))
            self.later(self.rng.uniform(0.0, CHAOS), self._restart, self.workers[-1])
        self.publishers[0].start()
        if self.faults.successor:
            self.publishers.append(Publisher(self, "p1"))
            self.later(self.rng.uniform(0.0, CHAOS), self._restart, self.publishers[-1])

    # Time.

    def sealer(self) -> Sealer | None:
        """Return what a publisher seals with, if the run is sealed."""
        if not self.sealed:
            return None
        draw = partial(self.keys.randbytes, KEY_BYTES)
        return Sealer(draw, lambda _model, nbytes: np.zeros(nbytes, np.uint8))

    def later(self, delay: float, act: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._order), act, args))

    def every_tick(
        self, incarnation: int, process: Worker | Publisher, act: Callable[[], None]
    ) -> None:
        def tick() -> None:
            if process.alive and process.incarnation == incarnation:
                act()
                self.later(TICK, tick)

        self.later(self.rng.random() * TICK, tick)

    def run_until(self, end: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._agenda and self._agenda[0][0] <= end and not done():
            self.now, _, act, args = heapq.heappop(self._agenda)
            self.events += 1
            assert self.events < EVENTS_MAX, "the machines never come to rest"
            act(*args)
        self.now = max(self.now, min(end, self.now if done() else end))

    # The network.

    def _deliver(
        self, link: Link, frames: Frames, rate: float, act: Callable[..., None], *args: object
    ) -> None:
        """Carry a message, badly. Its payload is not copied: ZeroMQ copies none, either."""
        faults = self.faults
        if self.chaotic and self.rng.random() < faults.loss:
            return
        sent = self._busy[link] = (
            max(self.now, self._busy.get(link, 0.0)) + sum(map(len, frames)) / rate
        )
        copies = 2 if self.chaotic and self.rng.random() < faults.double else 1
        for _ in range(copies):
            carried = frames
            if self.chaotic and self.rng.random() < faults.damage:
                carried = self._damage(frames)
            at = sent + (self.rng.expovariate(1 / faults.delay) if self.chaotic else 0.001)
            if not (faults.reorder and self.chaotic):
                at = self._arrives[link] = max(at, self._arrives.get(link, 0.0))
            self._queued[link] += 1
            self.later(at - self.now, self._arrive, link, carried, act, *args)

    def _arrive(self, link: Link, frames: Frames, act: Callable[..., None], *args: object) -> None:
        self._queued[link] -= 1
        act(frames, *args)

    def _damage(self, frames: Frames) -> Frames:
        """Flip a bit.

        A header that still says something afterwards is left whole: nobody could tell that (another
        name or version, say) from the truth. TCP's checksum stands against it. But what speaks of
        bytes, the digest stands against.
        """
        frames = list(frames)
        which = self.rng.randrange(len(frames))
        if not frames[which]:
            return frames
        damaged = bytearray(frames[which])
        damaged[self.rng.randrange(len(damaged))] ^= 1 << self.rng.randrange(8)
        if not _says_something(damaged):
            frames[which] = bytes(damaged)
        return frames

    def _cut(self, worker: Worker) -> bool:
        return self.now < worker.cut_until

    def to_publisher(self, worker: Worker, message: Message) -> None:
        if self._cut(worker):
            return
        publisher, identity = worker.at, worker.at.identity(worker)
        link = (worker.process, publisher.name)
        self._deliver(link, [encode(message)], math.inf, self._at_publisher, publisher, identity)

    def word_to_publisher(self, worker: Worker, token: str, message: Message) -> bool:
        """Carry what is said on the data connection; return whether it leads anywhere."""
        reached = [p for p in self.publishers if p.endpoint == worker.connected]
        if reached and not self._cut(worker):
            link, frames = (worker.process, worker.connected), [token.encode(), encode(message)]
            self._deliver(link, frames, math.inf, self._word_at_publisher, reached[0])
        return bool(reached)

    def _word_at_publisher(self, frames: Frames, publisher: Publisher) -> None:
        if publisher.alive:
            publisher.perform(publisher.machine.receive_word(b"".join(frames), self.now) or [])
            publisher.pump()

    def _at_publisher(self, frames: Frames, publisher: Publisher, identity: bytes) -> None:
        if self.trace:
            what = bytes(frames[0][:160])
            print(f"{self.now:8.3f} {identity.decode()} -> {publisher.name} {what!r}")
        if publisher.alive:
            publisher.peers.setdefault(identity, self._who(identity))
            publisher.receive(identity, frames)

    def _who(self, identity: bytes) -> tuple[Worker, int]:
        process, incarnation = identity.decode().split("#")
        return next(w for w in self.workers if w.process == process), int(incarnation)

    def to_worker(self, publisher: Publisher, send: Send) -> None:
        worker, incarnation = publisher.peers[send.to]
        if not worker.alive or worker.incarnation != incarnation or worker.at is not publisher:
            self.later(0.0, self._unreachable, publisher, send.to, publisher.incarnation)
            return
        if self._cut(worker):
            return
        frames: list[Buffer] = [encode(send.message)]
        frames += [] if send.payload is None else [send.payload]
        link = (publisher.name, worker.process)
        self._deliver(link, frames, worker.rate, self._at_worker, worker, incarnation, False)

    def _unreachable(
        self, publisher: Publisher, identity: bytes, incarnation: int, ended: str = ""
    ) -> None:
        if publisher.alive and publisher.incarnation == incarnation:
            publisher.perform(publisher.machine.unreachable(identity, self.now, ended))
            peer = publisher.machine.roster.by_identity(identity)
            self.met |= {"ended" if ended else "closed"} if peer is not None else set()
            assert not ended or peer is None or peer.lost, f"{identity!r} is not known to be dead"

    def _hang_up(self, worker: Worker, ended: str = "") -> None:
        """Have a connection found closed, with its process or without; or have nobody find it."""
        publisher, identity = worker.at, worker.at.identity(worker)
        delay = self.ends.choice([0.0, 0.05, 1.0])
        if publisher.alive and self.ends.random() < 0.7:
            self.later(delay, self._unreachable, publisher, identity, publisher.incarnation, ended)

    def broadcast(
        self, publisher: Publisher, effect: Broadcast, to: Sequence[Worker] | None = None
    ) -> None:
        frames: list[Buffer] = [effect.topic, encode(effect.message)]
        frames += [] if effect.payload is None else [effect.payload]
        for worker in self.workers if to is None else to:
            link = (publisher.endpoint, worker.process)
            reached = worker.alive and worker.connected == publisher.endpoint
            reached = reached and effect.topic in worker.topics
            if reached and not self._cut(worker) and self._queued[link] < self.faults.queue:
                incarnation = worker.incarnation
                self._deliver(link, frames, worker.rate, self._at_worker, worker, incarnation, True)

    def _at_worker(self, frames: Frames, worker: Worker, incarnation: int, pushed: bool) -> None:
        if not worker.alive or worker.incarnation != incarnation:
            return
        if self.trace:
            print(f"{self.now:8.3f} publisher -> {worker.process} {bytes(frames[pushed][:160])!r}")
        if pushed and len(frames) > PAYLOAD and not worker.lent and self.rng.random() < 0.7:
            self._lend(worker, frames)
            return
        receive = worker.machine.receive_published if pushed else worker.machine.receive
        worker.perform(receive([bytes(frame) for frame in frames], self.now))

    def _lend(self, worker: Worker, frames: Frames) -> None:
        """Let a payload arrive straight in its place, the beginning now and the rest later."""
        machine, payload = worker.machine, bytes(frames[PAYLOAD])
        worker.lent = True  # a connection carries one message at a time
        lease = machine.place(frames[:PAYLOAD], len(payload))
        count = self.rng.randrange(len(payload) + 1)
        if lease is not None:
            lease.room()[:count] = payload[:count]
            lease.received(count)
        self.later(self.rng.random() * 0.3, self._lent, worker, machine, lease, frames, count)

    def _lent(
        self,
        worker: Worker,
        machine: WorkerMachine,
        lease: Lease | None,
        frames: Frames,
        count: int,
    ) -> None:
        """The rest of a payload is here, unless the connection broke."""
        if worker.machine is not machine or not worker.alive:
            return
        worker.lent = False
        if self.chaotic and self.rng.random() < 0.1:
            if lease is not None:
                lease.cancel()
            return
        if lease is not None and lease.live:
            rest = bytes(frames[PAYLOAD])[count:]
            lease.room()[: len(rest)] = rest
            lease.received(len(rest))
        nowhere = [*map(bytes, frames[:PAYLOAD]), b""]
        worker.perform(machine.receive_published(lease or nowhere, self.now))

    def subscribed(self, worker: Worker, topic: bytes) -> None:
        self.later(0.001, self._subscribed, worker, worker.at, topic)

    def _subscribed(self, worker: Worker, publisher: Publisher, topic: bytes) -> None:
        beacon = publisher.machine.subscribed(topic) if publisher.alive else None
        if beacon is not None:
            for said in perform(
                publisher.machine, [Broadcast(topic, beacon)], self.now, publisher.sealer
            ):
                assert isinstance(said, Broadcast)
                self.broadcast(publisher, said, [worker])

    # The course of events.

    def chaos(self) -> None:
        """Let one second's worth of bad luck happen, then come back."""
        if not self.chaotic:
            return
        rng, faults, step = self.rng, self.faults, 0.25
        for worker in self.workers:
            if rng.random() < faults.cut * step:
                worker.cut_until = self.now + rng.choice([0.5, 2.0, 8.0])
                self._hang_up(worker)
            if worker.alive and rng.random() < faults.whims * step:
                worker.want()
            if rng.random() < 0.3 * step:
                worker.at = rng.choice(self.publishers)
            if worker.alive and rng.random() < faults.death * step:
                if rng.random() < 0.3:
                    worker.leave()
                worker.alive = False
                self._hang_up(worker, self.ends.choice(["", "its process has ended"]))
                self.later(rng.choice([0.0, 0.5, 7.0]), self._restart, worker)
        for publisher in self.publishers:
            if publisher.alive and rng.random() < faults.death * step / 2:
                if rng.random() < 0.3:
                    publisher.stop()
                publisher.alive = False
                self.later(rng.choice([0.0, 1.0, 7.0]), self._restart, publisher)
            if publisher.alive and self.keys.random() < REKEYS * step:
                publisher.rekey()
            if publisher.alive and self.patched and self.changes.random() < step:
                publisher.withdraw_patches()
            if publisher.alive and rng.random() < faults.hurry:
                publisher.publish()
        self.later(step, self.chaos)

    @property
    def publisher(self) -> Publisher:
        """The one that started last."""
        return max((p for p in self.publishers if p.incarnation), key=lambda p: p.started)

    def _restart(self, process: Worker | Publisher) -> None:
        late = isinstance(process, Publisher) and not self.chaotic
        if not process.alive and not late:
            if self.trace:
                print(f"{self.now:8.3f} restart {getattr(process, 'name', 'publisher')}")
            process.start()

    def behind(self) -> list[str]:
        """Return who does not run the latest version meant for it."""
        lagging: list[str] = []
        for name in {w.name for w in self.workers}:
            found = [self._lag(w) for w in self.workers if w.name == name]
            if all(found):  # of two processes with one name, one must be served
                lagging += found[0]
        return lagging

    def _lag(self, worker: Worker) -> list[str]:
        machine = self.publisher.machine
        if self._unproven(worker.machine.applied_epoch):
            # It follows another publisher, and cannot tell which of the two is the later one.
            told = worker.refusal == "stale-epoch"
            return [] if told else [f"{worker.process} was not told that the epoch is stale"]
        peer = machine.roster.by_name(worker.name)
        if peer is None or peer.instance != worker.machine.identity.instance:
            return [f"{worker.process} is not on the roster"]
        lagging: list[str] = []
        for model, slot in worker.machine.slots.items():
            versions = machine.store.get(model)
            latest = versions.latest_for(worker.name) if versions else None
            runs = (slot.running.epoch, slot.running.version) if slot.running else (0, 0)
            if latest is not None and runs < latest.key and self._wants(worker, latest):
                lagging.append(f"{worker.process} runs {runs} of {model}, latest is {latest.key}")
            if peer.runs(model) != runs:
                lagging.append(f"the roster does not know that {worker.process} runs {runs}")
        return lagging

    def _unproven(self, epoch: int) -> bool:
        """Return whether nobody can know that the last publisher is later than that of an epoch."""
        older = self.invariants.started.get(epoch, math.inf)
        return epoch > self.publisher.machine.epoch and older > self.publisher.started - APART

    def _wants(self, worker: Worker, version: Version) -> bool:
        spoiled = (worker.process, version.model, *version.key) in self.spoiled
        return not spoiled and worker.takes(version.layout)

    def run(self) -> "Simulation":
        """Run to the end.

        Raises:
            AssertionError: Something that must hold did not.
        """
        self.later(0.0, self.chaos)
        self.run_until(CHAOS)
        self.chaotic = False
        for process in self.workers:
            if not process.alive:
                process.start()
        if not self.publisher.alive:
            self.publisher.start()
        for worker in self.workers:
            worker.cut_until, worker.at = 0.0, self.publisher
        self.run_until(CHAOS + 1.0)
        for _ in range(4 if self.patched else 1):
            while not self.publisher.publish():
                self.run_until(self.now + TICK)
                assert self.now < CHAOS + HEALING, "there is never memory for another version"
            self.run_until(self.now + self.changes.choice([0.1, 1.0]) * self.patched)
        self.run_until(self.now + SETTLED)
        self.run_until(CHAOS + HEALING, lambda: not self.publisher.open and not self.behind())
        assert not self.behind(), "; ".join(self.behind())
        self.run_until(CHAOS + 2 * HEALING, lambda: not self._untold())
        assert not self._untold(), "; ".join(self._untold())
        return self

    def _untold(self) -> list[str]:
        """Return who is not served, and does not know why: of two processes with one name, one."""
        rivals = [w for w in self.workers if w.name == "w0"]
        if sum(w.machine.inside for w in rivals) > 1:
            return ["two processes share a name"]
        told = ("name-taken", "stale-epoch")
        outside = [w for w in rivals if not w.machine.inside and w.refusal not in told]
        return [f"{w.process} was not told why it is not served" for w in outside]


def _says_something(header: Buffer) -> bool:
    with suppress(ProtocolError):
        return bool(from_worker([header]))
    for payload in ([], [b""]):
        with suppress(ProtocolError):
            message, _ = from_publisher([header, *payload])
            return not isinstance(message, Chunk | SealedChunk | End)
    return False


def check(seed: int) -> str:
    """Run one seed; return what went wrong, nothing if all was well."""
    try:
        Simulation(seed).run()
    except Exception as error:  # any exception of a machine is a finding
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


def summary(failures: Sequence[str], seeds: int) -> str:
    """Say which seeds failed, and how to see one of them fail again."""
    lines = [*failures, f"{seeds - len(failures)} of {seeds} seeds passed"]
    return "\n".join([*lines, *map(replay, failures[:1])])


def replay(text: str) -> str:
    """Say how to see a seed fail again."""
    seed = text.split()[1].rstrip(":")
    return f"replay: .venv/bin/python tests/simulate.py --trace --seed {seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds; return how many failed, capped at 1."""
    parser = argparse.ArgumentParser(description="Run the machines on simulated networks.")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--trace", action="store_true", help="print every delivery")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        simulation = Simulation(options.seed, trace=options.trace)
        print(simulation.faults)
        simulation.run()
        print(f"seed {options.seed} is fine: {simulation.events} events, {simulation.now:.1f} s")
        return 0
    return run_seeds(range(options.first, options.first + options.seeds))


def run_seeds(seeds: Sequence[int]) -> int:
    """Run seeds on all cores, and say at once which fail; return how many did, capped at 1."""
    begun, failures, done = time.monotonic(), list[str](), 0
    try:
        for text in pooling.each(check, seeds, "seeds", BLOCK):
            done += 1
            if text:
                failures.append(text)
                print(f"{text}\n{replay(text)}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(summary(sorted(failures), done))
    print(f"{time.monotonic() - begun:.0f} s on {multiprocessing.cpu_count()} cores")
    return 1 if failures or done < len(seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
