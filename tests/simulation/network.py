"""The simulated network: what is on its way, what is lost, and what all come to in the end."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from weightbus.bus.effects import (
    Send,
)
from weightbus.bus.errors import ProtocolError
from weightbus.bus.headers import PAYLOAD_INDEX, Buffer, encode, from_publisher, from_worker
from weightbus.bus.lease import Lease
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Chunk, End, SealedChunk
from weightbus.bus.publisher.effects import (
    Broadcast,
)
from weightbus.bus.publisher.version import Version
from weightbus.bus.sealer import Sealer
from weightbus.bus.structs import Message
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.sealing import KEY_BYTES

from .conditions import (
    APART,
    CHAOS,
    EVENTS_MAX,
    HEALING,
    PATCHED,
    REKEYS,
    SETTLED,
    TICK,
    Faults,
    Frames,
    Link,
)
from .invariants import Invariants
from .publishers import Publisher, Stored
from .virtual_memory import VirtualSegment
from .virtual_shell import perform
from .workers import Worker


class Simulation:
    """One run."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.trace = trace
        self.now = 0.0
        self.timing = self.rng.choice([Timing(), Timing(), Timing(ping=0.25, lost_after=1.0)])
        self.faults = self.draw()
        self.invariants = Invariants()
        self.sealed = seed % 3 == 0
        self.keys = random.Random(f"group keys of {seed}")
        self.ends = random.Random(f"ends of {seed}")  # of connections
        self.patched = seed % 5 == 2
        self.changes = random.Random(f"changes of {seed}")
        self.many = random.Random(f"many of {seed}")
        self.parts = random.Random(f"parts of {seed}")
        self.grouped = seed % 7 in (3, 4, 6)  # some versions are published as one
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

    def draw(self) -> Faults:
        """Draw how bad the network is."""
        return Faults.draw(self.rng)

    @property
    def sources(self) -> Sequence[Publisher]:
        """Everything that a worker can be connected to."""
        return self.publishers

    def parents(self, _worker: Worker) -> Sequence[Publisher]:
        """Return where the address of a worker may lead to."""
        return self.publishers

    def move(self, worker: Worker, parent: Publisher) -> None:
        """Have the address of a worker lead elsewhere."""
        worker.at = parent

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

    def is_cut(self, worker: Worker) -> bool:
        return self.now < worker.cut_until

    def to_publisher(self, worker: Worker, message: Message) -> None:
        if self.is_cut(worker):
            return
        publisher, identity = worker.at, worker.at.identity(worker)
        link = (worker.process, publisher.name)
        self._deliver(link, [encode(message)], math.inf, self.at_publisher, publisher, identity)

    def word_to_publisher(self, worker: Worker, token: str, message: Message) -> bool:
        """Carry what is said on the data connection; return whether it leads anywhere."""
        reached = [p for p in self.sources if p.endpoint == worker.connected]
        if reached and not self.is_cut(worker):
            link, frames = (worker.process, worker.connected), [token.encode(), encode(message)]
            self._deliver(link, frames, math.inf, self._word_at_publisher, reached[0])
        return bool(reached)

    def _word_at_publisher(self, frames: Frames, publisher: Publisher) -> None:
        if publisher.alive:
            publisher.perform(publisher.machine.receive_report(b"".join(frames), self.now) or [])
            publisher.pump()

    def at_publisher(self, frames: Frames, publisher: Publisher, identity: bytes) -> None:
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
            self.later(0.0, self.unreachable, publisher, send.to, publisher.incarnation)
            return
        if self.is_cut(worker):
            return
        frames: list[Buffer] = [encode(send.message)]
        frames += [] if send.payload is None else [send.payload]
        link = (publisher.name, worker.process)
        self._deliver(link, frames, worker.rate, self._at_worker, worker, incarnation, False)

    def unreachable(
        self, publisher: Publisher, identity: bytes, incarnation: int, ended: str = ""
    ) -> None:
        if publisher.alive and publisher.incarnation == incarnation:
            publisher.perform(publisher.machine.unreachable(identity, self.now, ended))
            peer = publisher.machine.state.roster.by_identity(identity)
            self.met |= {"ended" if ended else "closed"} if peer is not None else set()
            assert not ended or peer is None or peer.lost, f"{identity!r} is not known to be dead"

    def _hang_up(self, worker: Worker, ended: str = "") -> None:
        """Have a connection found closed, with its process or without; or have nobody find it."""
        publisher, identity = worker.at, worker.at.identity(worker)
        delay = self.ends.choice([0.0, 0.05, 1.0])
        if publisher.alive and self.ends.random() < 0.7:
            self.later(delay, self.unreachable, publisher, identity, publisher.incarnation, ended)

    def broadcast(
        self, publisher: Publisher, effect: Broadcast, to: Sequence[Worker] | None = None
    ) -> None:
        frames: list[Buffer] = [effect.topic, encode(effect.message)]
        frames += [] if effect.payload is None else [effect.payload]
        for worker in self.workers if to is None else to:
            link = (publisher.endpoint, worker.process)
            reached = worker.alive and worker.connected == publisher.endpoint
            reached = reached and effect.topic in worker.topics
            if reached and not self.is_cut(worker) and self._queued[link] < self.faults.queue:
                incarnation = worker.incarnation
                self._deliver(link, frames, worker.rate, self._at_worker, worker, incarnation, True)

    def _at_worker(self, frames: Frames, worker: Worker, incarnation: int, pushed: bool) -> None:
        if not worker.alive or worker.incarnation != incarnation:
            return
        if self.trace:
            print(f"{self.now:8.3f} publisher -> {worker.process} {bytes(frames[pushed][:160])!r}")
        if (
            pushed
            and len(frames) > PAYLOAD_INDEX
            and not worker.receiving
            and self.rng.random() < 0.7
        ):
            self._lend(worker, frames)
            return
        receive = worker.machine.receive_published if pushed else worker.machine.receive
        worker.perform(receive([bytes(frame) for frame in frames], self.now))

    def _lend(self, worker: Worker, frames: Frames) -> None:
        """Let a payload arrive straight in its place, the beginning now and the rest later."""
        machine, payload = worker.machine, bytes(frames[PAYLOAD_INDEX])
        worker.receiving = True  # a connection carries one message at a time
        lease = machine.place(frames[:PAYLOAD_INDEX], len(payload))
        count = self.rng.randrange(len(payload) + 1)
        if lease is not None:
            lease.view[lease.count :][:count] = payload[:count]
            lease.received(count)
        self.later(
            self.rng.random() * 0.3, self._receive_leased, worker, machine, lease, frames, count
        )

    def _receive_leased(
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
        worker.receiving = False
        if self.chaotic and self.rng.random() < 0.1:
            if lease is not None:
                lease.cancel()
            return
        if lease is not None and lease.live:
            rest = bytes(frames[PAYLOAD_INDEX])[count:]
            lease.view[lease.count :][: len(rest)] = rest
            lease.received(len(rest))
        nowhere = [*map(bytes, frames[:PAYLOAD_INDEX]), b""]
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
                self.move(worker, rng.choice(self.parents(worker)))
            if worker.alive and rng.random() < faults.death * step:
                if rng.random() < 0.3:
                    worker.leave()
                worker.die()
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

    def last_parent(self, _worker: Worker) -> Publisher:
        """Return where the address of a worker leads to in the end."""
        return self.publisher

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
        peer = machine.state.roster.by_name(worker.name)
        if peer is None or peer.instance != worker.machine.identity.instance:
            return [f"{worker.process} is not on the roster"]
        lagging: list[str] = []
        for model, follower in worker.machine.followers.items():
            versions = machine.state.store.get(model)
            latest = versions.latest_for(worker.name) if versions else None
            runs = (
                (follower.running.epoch, follower.running.version) if follower.running else (0, 0)
            )
            if latest is not None and runs < latest.key and self._wants(worker, latest):
                lagging.append(f"{worker.process} runs {runs} of {model}, latest is {latest.key}")
            if peer.runs(model) != runs:
                lagging.append(f"the roster does not know that {worker.process} runs {runs}")
        return lagging

    def _unproven(self, epoch: int) -> bool:
        """Return whether nobody can know that the last publisher is later than that of an epoch."""
        older = self.invariants.started.get(epoch, math.inf)
        return epoch > self.publisher.machine.state.epoch and older > self.publisher.started - APART

    def _wants(self, worker: Worker, version: Version) -> bool:
        """Return whether a worker takes a version, and what it must apply at once with it."""
        for model, number in version.companions.items():
            follower = worker.machine.followers.get(model)
            versions = self.publisher.machine.state.store[model]
            latest = versions.latest_for(worker.name)
            runs = follower.running if follower is not None else None
            if runs is not None and (runs.epoch, runs.version) >= (version.epoch, number):
                continue
            if follower is not None and (latest is None or not self._takes(worker, latest)):
                self.met.add("companion not taken")
                return False
        return self._takes(worker, version)

    def _takes(self, worker: Worker, version: Version) -> bool:
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
            worker.cut_until = 0.0
            self.move(worker, self.last_parent(worker))
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
        if sum(w.machine.in_session for w in rivals) > 1:
            return ["two processes share a name"]
        told = ("name-taken", "stale-epoch")
        outside = [w for w in rivals if not w.machine.in_session and w.refusal not in told]
        return [f"{w.process} was not told why it is not served" for w in outside]


def _says_something(header: Buffer) -> bool:
    with suppress(ProtocolError):
        return bool(from_worker([header]))
    for payload in ([], [b""]):
        with suppress(ProtocolError):
            message, _ = from_publisher([header, *payload])
            return not isinstance(message, Chunk | SealedChunk | End)
    return False
