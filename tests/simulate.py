"""A simulated network around the real machines: one seed, one run, the same every time.

    python tests/simulate.py --seeds 5000          many seeds, on all cores
    python tests/simulate.py --seed 17 --trace     one seed, every delivery printed

First comes chaos: messages are lost, delayed, doubled, reordered and damaged, workers are cut off,
both sides are killed and started again, users apply late or fail to, and the trainer publishes in
every way there is. Then the network heals, and everybody must end up with the latest version.

What must hold (`Invariants`): what is applied is what was published, byte for byte; versions never
go back; a receipt claims only what happened; an aborted version is never applied; every publish
is over by its deadline.
"""

import argparse
import heapq
import itertools
import multiprocessing
import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weightbus.bus.arena import Arenas
from weightbus.bus.effects import Broadcast, Connect, Effect, Ready, Resolve, Send, Subscribe
from weightbus.bus.errors import ProtocolError
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Message, Shared, encode, from_worker
from weightbus.bus.publication import Publication
from weightbus.bus.publisher import PublisherMachine
from weightbus.bus.receipt import Receipt
from weightbus.bus.staging import StagedVersion, StaleError
from weightbus.bus.worker import Identity, WorkerMachine
from weightbus.codecs.errors import WeightBusError
from weightbus.codecs.layout import Layout

TICK = 0.1  # seconds of virtual time between two ticks of a machine
CHAOS = 12.0  # seconds of faults
HEALING = 90.0  # seconds after them in which everybody must catch up
SETTLED = 3.0  # seconds without faults after which catching up is checked
CHUNK = 16  # bytes


@dataclass(frozen=True)
class Faults:
    """How bad a network is, as probabilities per message or per second."""

    loss: float
    double: float
    damage: float
    delay: float  # mean seconds
    cut: float  # partitions, per worker and second
    death: float  # kills, per process and second
    reorder: bool

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
            reorder=rng.random() < 0.5,
        )


@dataclass
class Invariants:
    """What has happened, and what may not."""

    published: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    applied: dict[str, set[tuple[str, int, int]]] = field(default_factory=dict)
    aborted: set[tuple[str, int, int]] = field(default_factory=set)
    spoiled: set[tuple[str, str, int, int]] = field(default_factory=set)  # users failed to apply it

    def on_apply(self, name: str, running: tuple[int, int], staged: StagedVersion) -> None:
        key = (staged.model, staged.epoch, staged.version)
        assert staged.data.tobytes() == self.published[key], f"{name} applied other bytes as {key}"
        assert staged.key > running, f"{name} went back from {running} to {staged.key}"
        assert key not in self.aborted, f"{name} applied {key}, which was aborted"
        self.applied.setdefault(name, set()).add(key)

    def on_receipt(self, publication: Publication, receipt: Receipt, achieved: bool) -> None:
        key = (receipt.model, receipt.epoch, receipt.version)
        for worker in receipt.workers.values():
            applied = self.applied.get(worker.name, set())
            newest = max((k for k in applied if k[0] == receipt.model), default=("", 0, 0))
            if worker.state == "applied":
                assert key in applied, f"{worker.name} never applied {key}"
            if worker.state == "skipped":
                assert newest > key, f"{worker.name} runs {newest}, nothing newer than {key}"
        if publication.decision == "abort":
            self.aborted.add(key)
            assert not achieved
            assert not any(key in keys for keys in self.applied.values()), f"{key} was applied"
        if achieved and publication.wait != "none":
            done = ["applied", "skipped"] + (["staged"] if publication.wait == "staged" else [])
            there = sum(w.state in done for w in receipt.workers.values())
            needed = len(receipt.workers) if publication.require is None else publication.require
            assert there >= needed, f"achieved with {there} of {needed}: {receipt}"


class Memory:
    """A segment of shared memory: an arena's bytes, and what they are."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self.stamp = ("", 0, 0)

    @contextmanager
    def reading(self, model: str, epoch: int, version: int) -> Generator[None]:
        if (model, epoch, version) != self.stamp:
            raise StaleError
        yield


class Worker:
    """One worker process: the machine, and a user who applies when it pleases."""

    def __init__(self, sim: "Simulation", name: str) -> None:
        self.sim, self.name = sim, name
        self.incarnation = 0
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self.alive, self.cut_until = True, 0.0
        instance = f"{self.sim.rng.getrandbits(128):032x}"
        identity = Identity(self.name, instance)
        models = ["a", "b"] if self.name == "w0" else ["a"]
        self.local = self.sim.rng.random() < 0.4  # on the publisher's host
        self.machine = WorkerMachine(
            identity, models, lambda _m, _l: "", timing=self.sim.timing, opens=self.open
        )
        self.topics: set[bytes] = set()
        self.connected = False
        self.ready: dict[str, StagedVersion] = {}
        self.applying: set[str] = set()
        self.sim.every_tick(self.incarnation, self, self.tick)

    def open(self, shared: Shared, nbytes: int) -> Memory | None:
        memory = self.sim.memories.get(shared.token) if self.local else None
        return memory if memory is not None and memory.data.nbytes == nbytes else None

    def tick(self) -> None:
        self.perform(self.machine.tick(self.sim.now))
        self.perform(self.machine.connected(self.sim.now))

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.sim.to_publisher(self, effect.message)
                case Connect():
                    self.connected = True
                case Subscribe():
                    known = effect.topic in self.topics
                    (self.topics.add if effect.on else self.topics.discard)(effect.topic)
                    if effect.on and not known:
                        self.sim.subscribed(effect.topic)
                case Ready():
                    self.hand_over(effect.staged)
                case _:
                    pass

    def hand_over(self, staged: StagedVersion) -> None:
        older = self.ready.pop(staged.model, None)
        self.ready[staged.model] = staged
        if older is not None:
            self.perform(self.machine.dropped(older.model, older.key, self.sim.now))
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
        staged = self.ready.pop(model)
        self.machine.taken(model, staged.key)
        pause = self.sim.rng.choice([0.0, 0.02, 0.3]) if self.sim.chaotic else 0.0
        self.sim.later(pause, self.apply, staged, incarnation)

    def apply(self, staged: StagedVersion, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        self.applying.discard(staged.model)
        if self.sim.chaotic and self.sim.rng.random() < 0.02:
            self.sim.invariants.spoiled.add((self.name, staged.model, *staged.key))
            effects = self.machine.failed(staged.model, staged.key, "no", self.sim.now)
        else:
            running = self.machine.slots[staged.model].running
            before = (running.epoch, running.version) if running else (0, 0)
            try:
                with staged.reading():
                    self.sim.invariants.on_apply(self.name, before, staged)
                now, digest = self.sim.now, staged.digest
                effects = self.machine.applied(staged.model, staged.key, digest, now)
            except StaleError:
                effects = self.machine.stale(staged.model, staged.key, self.sim.now)
        self.perform(effects)
        if staged.model in self.ready and staged.model not in self.applying:
            self.apply_later(staged.model)


class Publisher:
    """One publisher process and its trainer."""

    def __init__(self, sim: "Simulation") -> None:
        self.sim, self.incarnation = sim, 0
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self.alive = True
        sim = self.sim
        epoch = int(sim.now * 1000) + 1
        if sim.rng.random() < 0.2:  # the clock of the new host is behind
            epoch = max(1, epoch - sim.rng.randrange(5000))
        while epoch in sim.epochs:
            epoch += 1
        sim.epochs.add(epoch)
        probe = sim.share(np.empty(0, np.uint8))
        self.machine = PublisherMachine(epoch, "tcp://data", sim.timing, probe)
        self.arenas: dict[str, Arenas] = {}
        self.open: dict[int, Publication] = {}
        self.peers: dict[bytes, tuple[Worker, int]] = {}
        sim.every_tick(self.incarnation, self, self.tick)

    def identity(self, worker: Worker) -> bytes:
        return f"{worker.name}#{worker.incarnation}".encode()

    def tick(self) -> None:
        self.perform(self.machine.tick(self.sim.now))
        for publication in self.open.values():
            late = self.sim.now - publication.deadline
            assert late < 2 * TICK, f"publish {publication.id} is open {late:.1f} s past its time"
        self.pump()

    def pump(self) -> None:
        while self.machine.pushing:
            self.perform(self.machine.push(self.sim.now))

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.sim.to_worker(effect)
                case Broadcast():
                    self.sim.broadcast(effect)
                case Resolve():
                    publication = self.open.pop(effect.publication)
                    invariants = self.sim.invariants
                    invariants.on_receipt(publication, effect.receipt, effect.achieved)
                case _:
                    pass

    def publish(self) -> None:
        rng, sim = self.sim.rng, self.sim
        model = rng.choice("aaab")
        size = rng.choice([0, 1, 40, 40, 640, 640])
        layout = Layout.plan([("w", "U8", (size,))])
        together = rng.random() < 0.3
        names = [p.name for p in self.machine.roster]
        workers = tuple(rng.sample(names, rng.randint(1, len(names)))) if names else None
        if rng.random() < 0.6 or not sim.chaotic:
            workers = None
        arenas = self.arenas.setdefault(model, Arenas(model, CHUNK))
        try:
            version, arena = arenas.take(layout, replaces_latest=workers is None and not together)
        except WeightBusError:
            return
        data = arena.data
        data[:] = np.frombuffer(rng.randbytes(size), np.uint8)
        shared = sim.share(data)
        version.shared = shared if rng.random() < 0.9 else None
        publication = Publication(
            id=next(sim.ids),
            version=version,
            workers=workers,
            require=rng.choice([None, None, 0, 1, 2]),
            wait=rng.choice(["applied", "applied", "staged", "none"]),
            commit="together" if together else "auto",
            started=sim.now,
            deadline=sim.now + rng.choice([0.5, 3.0, 10.0]),
        )
        self.open[publication.id] = publication
        effects = self.machine.publish(publication, sim.now)
        sim.memories[shared.token].stamp = (model, *version.key)
        sim.invariants.published[(model, version.epoch, version.version)] = data.tobytes()
        self.perform(effects)
        self.pump()


class Simulation:
    """One run."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.trace = trace
        self.now = 0.0
        self.timing = Timing()
        self.faults = Faults.draw(self.rng)
        self.invariants = Invariants()
        self.ids = itertools.count()
        self.epochs: set[int] = set()
        self.memories: dict[str, Memory] = {}
        self.chaotic = True
        self.events = 0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._link_free: dict[tuple[str, str], float] = {}
        self.workers = [Worker(self, f"w{i}") for i in range(self.rng.randint(1, 4))]
        self.publisher = Publisher(self)

    def share(self, data: NDArray[np.uint8]) -> Shared:
        """Return where workers find these bytes; what was there before is stale."""
        token = next((t for t, m in self.memories.items() if m.data is data), None)
        if token is None:
            token = f"{len(self.memories):032x}"
            self.memories[token] = Memory(data)
        self.memories[token].stamp = ("", 0, 0)
        return Shared("/proc/1/fd/1", token)

    # Time.

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
            act(*args)
        self.now = max(self.now, min(end, self.now if done() else end))

    # The network.

    def _deliver(
        self, link: tuple[str, str], frames: list[bytes], act: Callable[..., None], *args: object
    ) -> None:
        """Carry a message, badly."""
        faults = self.faults
        if self.chaotic and self.rng.random() < faults.loss:
            return
        copies = 2 if self.chaotic and self.rng.random() < faults.double else 1
        for _ in range(copies):
            carried = frames
            if self.chaotic and self.rng.random() < faults.damage:
                carried = self._damage(frames)
            at = self.now + (self.rng.expovariate(1 / faults.delay) if self.chaotic else 0.001)
            if not (faults.reorder and self.chaotic):
                at = self._link_free[link] = max(at, self._link_free.get(link, 0.0))
            self.later(at - self.now, act, carried, *args)

    def _damage(self, frames: list[bytes]) -> list[bytes]:
        """Flip a bit.

        A worker's report that is still a report afterwards is left whole: nobody could tell what
        it then says (another name, say) from the truth. TCP's checksum stands against that.
        """
        frames = list(frames)
        which = self.rng.randrange(len(frames))
        if not frames[which]:
            return frames
        damaged = bytearray(frames[which])
        damaged[self.rng.randrange(len(damaged))] ^= 1 << self.rng.randrange(8)
        try:
            from_worker([damaged])
        except ProtocolError:
            frames[which] = bytes(damaged)
        return frames

    def _cut(self, worker: Worker) -> bool:
        return self.now < worker.cut_until

    def to_publisher(self, worker: Worker, message: Message) -> None:
        if self._cut(worker):
            return
        identity = self.publisher.identity(worker)
        self.publisher.peers[identity] = (worker, worker.incarnation)
        self._deliver((worker.name, "pub"), [encode(message)], self._at_publisher, identity)

    def _at_publisher(self, frames: list[bytes], identity: bytes) -> None:
        if self.trace:
            print(f"{self.now:8.3f} {identity.decode()} -> publisher {frames[0][:160]!r}")
        if self.publisher.alive:
            self.publisher.peers.setdefault(identity, self._who(identity))
            self.publisher.perform(self.publisher.machine.receive(identity, frames, self.now))
            self.publisher.pump()

    def _who(self, identity: bytes) -> tuple[Worker, int]:
        name, incarnation = identity.decode().split("#")
        return next(w for w in self.workers if w.name == name), int(incarnation)

    def to_worker(self, send: Send) -> None:
        worker, incarnation = self.publisher.peers[send.to]
        if not worker.alive or worker.incarnation != incarnation:
            self.later(0.0, self._unreachable, send.to, self.publisher.incarnation)
            return
        if self._cut(worker):
            return
        frames = [encode(send.message)] + (
            [bytes(send.payload)] if send.payload is not None else []
        )
        self._deliver(("pub", worker.name), frames, self._at_worker, worker, incarnation, False)

    def _unreachable(self, identity: bytes, incarnation: int) -> None:
        if self.publisher.alive and self.publisher.incarnation == incarnation:
            self.publisher.perform(self.publisher.machine.unreachable(identity, self.now))

    def broadcast(self, effect: Broadcast) -> None:
        header = encode(effect.message)
        payload = [bytes(effect.payload)] if effect.payload is not None else []
        for worker in self.workers:
            if (
                worker.alive
                and worker.connected
                and effect.topic in worker.topics
                and not self._cut(worker)
            ):
                self._deliver(
                    ("dat", worker.name),
                    [effect.topic, header, *payload],
                    self._at_worker,
                    worker,
                    worker.incarnation,
                    True,
                )

    def _at_worker(
        self, frames: list[bytes], worker: Worker, incarnation: int, pushed: bool
    ) -> None:
        if not worker.alive or worker.incarnation != incarnation:
            return
        if self.trace:
            print(f"{self.now:8.3f} publisher -> {worker.name} {frames[pushed][:160]!r}")
        receive = worker.machine.receive_published if pushed else worker.machine.receive
        worker.perform(receive(frames, self.now))

    def subscribed(self, topic: bytes) -> None:
        self.later(0.001, self._subscribed, topic)

    def _subscribed(self, topic: bytes) -> None:
        if self.publisher.alive:
            self.publisher.perform(self.publisher.machine.subscribed(topic))

    # The course of events.

    def chaos(self) -> None:
        """Let one second's worth of bad luck happen, then come back."""
        if not self.chaotic:
            return
        rng, faults, step = self.rng, self.faults, 0.25
        for worker in self.workers:
            if rng.random() < faults.cut * step:
                worker.cut_until = self.now + rng.choice([0.5, 2.0, 8.0])
            if worker.alive and rng.random() < faults.death * step:
                worker.alive = False
                self.later(rng.choice([0.0, 0.5, 7.0]), self._restart, worker)
        if self.publisher.alive and rng.random() < faults.death * step / 2:
            self.publisher.alive = False
            self.later(rng.choice([0.0, 1.0, 7.0]), self._restart, self.publisher)
        if self.publisher.alive and rng.random() < 0.3:
            self.publisher.publish()
        self.later(step, self.chaos)

    def _restart(self, process: Worker | Publisher) -> None:
        if not process.alive:
            if self.trace:
                print(f"{self.now:8.3f} restart {getattr(process, 'name', 'publisher')}")
            process.start()

    def behind(self) -> list[str]:
        """Return who does not run the latest version meant for it."""
        lagging: list[str] = []
        for worker in self.workers:
            if worker.machine.applied_epoch > self.publisher.machine.epoch:
                continue  # it follows a later publisher than this one, whose clock is behind
            for model, slot in worker.machine.slots.items():
                shelf = self.publisher.machine.catalog.get(model)
                latest = shelf.latest_for(worker.name) if shelf else None
                runs = (slot.running.epoch, slot.running.version) if slot.running else (0, 0)
                spoiled = latest and (worker.name, model, *latest.key) in self.invariants.spoiled
                if latest is not None and runs < latest.key and not spoiled:
                    lagging.append(f"{worker.name} runs {runs} of {model}, latest is {latest.key}")
                peer = self.publisher.machine.roster.by_name(worker.name)
                if peer is None or peer.runs(model) != runs:
                    lagging.append(f"the roster does not know that {worker.name} runs {runs}")
        return lagging

    def run(self) -> "Simulation":
        """Run to the end.

        Raises:
            AssertionError: Something that must hold did not.
        """
        self.later(0.0, self.chaos)
        self.run_until(CHAOS)
        self.chaotic = False
        processes: list[Worker | Publisher] = [*self.workers, self.publisher]
        for process in processes:
            if not process.alive:
                process.start()
        for worker in self.workers:
            worker.cut_until = 0.0
        self.run_until(CHAOS + 1.0)
        self.publisher.publish()
        self.run_until(CHAOS + SETTLED)
        self.run_until(CHAOS + HEALING, lambda: not self.publisher.open and not self.behind())
        assert not self.behind(), "; ".join(self.behind())
        return self


def check(seed: int) -> str:
    """Run one seed; return what went wrong, nothing if all was well."""
    try:
        Simulation(seed).run()
    except Exception as error:  # any exception of a machine is a finding
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds; return how many failed, capped at 1."""
    parser = argparse.ArgumentParser(description="Run the machines on simulated networks.")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds, from 0")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--trace", action="store_true", help="print every delivery")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        simulation = Simulation(options.seed, trace=options.trace)
        print(simulation.faults)
        simulation.run()
        print(f"seed {options.seed} is fine: {simulation.events} events, {simulation.now:.1f} s")
        return 0
    with multiprocessing.get_context("spawn").Pool() as pool:
        failures = [text for text in pool.imap_unordered(check, range(options.seeds), 20) if text]
    print("\n".join(sorted(failures)))
    print(f"{options.seeds - len(failures)} of {options.seeds} seeds passed")
    for text in failures[:1]:
        print(f"replay: python tests/simulate.py --trace --seed {text.split()[1].rstrip(':')}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
