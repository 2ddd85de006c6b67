"""Write the transcripts of the protocol's pages, or check those that stand there.

    python tests/vectors/transcripts.py            write
    python tests/vectors/transcripts.py --check    compare; exit status 1 if they differ

Publishers and workers are the machines of the package, and of level 1 the example: they play with a
clock that does not run by itself and a network that delivers everything a millisecond later. So the
same lines come out each time.
"""

import argparse
import heapq
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from weightbus.bus.effects import Copy, Decode, Effect, Examine, Ready, Send, Subscribe
from weightbus.bus.headers import Buffer, control_topic, encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Checked, Chunk, Hello, Observe, Running, Shared, Verify
from weightbus.bus.net.copier import copying, decoded
from weightbus.bus.publisher.effects import Broadcast
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.reporting import BelowReports
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import OfferedPatch, Version, VersionOffer
from weightbus.bus.sealer import Sealer
from weightbus.bus.staged import StagedVersion
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Copied, Decoded, Examined, Report
from weightbus.bus.worker.keyring import Keyring
from weightbus.bus.worker.layouts import Boxes, Expected
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.delta.encoding import encode as encode_patch
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.tests.simulation.performing import another_host, done
from weightbus.tests.simulation.virtual_memory import VirtualSegment
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "protocol"
EPOCH, MODEL = 1000, "policy"
DELAY, TICK = 0.001, 0.01  # seconds
NOISE = {"ping": 1, "pong": 0, "beacon": 1}  # how many of a sender are shown
LEFT_OUT = {
    *("wbp", "model", "instance", "text", "data", "ping_ms", "lost_ms", "age_ms"),
    *("layout", "layout_bytes", "nbytes", "chunk_bytes", "encoding"),
}
WITHIN = "epoch", "encoding"  # fields of objects that are left out
NAMES_EPOCHS = {"hello", "welcome", "rename"}  # messages that are about more than one
BLOCK = re.compile(
    r"^( *)<!-- transcript: (\w+) -->\n\1```\n(.*?)^\1```$", re.MULTILINE | re.DOTALL
)
LEVEL_1 = (ROOT / "examples" / "level1_worker.py").read_text().partition("\nworker = Worker(")[0]
"""The example's source, without the lines that start it."""


def without(value: Any, *names: str) -> Any:
    """Return a JSON value without the fields of these names, at any depth."""
    match value:
        case dict():
            return {n: without(v, *names) for n, v in value.items() if n not in names}
        case list():
            return [without(each, *names) for each in value]
        case _:
            return value


class OverError(Exception):
    """A scene is over."""


class Scene:
    """A clock, a network, and what was sent.

    Args:
        brief: Leave out pongs, pings and beacons of each sender after the first, and the fields
            `LEFT_OUT`.
    """

    def __init__(self, *, brief: bool = True) -> None:
        self.now, self.brief = 0.0, brief
        self.lines: list[str] = []
        self._seen: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after so many seconds."""
        heapq.heappush(self._events, (round(self.now + seconds, 6), next(self._order), act))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end

    def every(self, act: Callable[[], None]) -> None:
        """Do something again and again."""

        def again() -> None:
            act()
            self.later(TICK, again)

        self.later(0.0, again)

    def note(self, who: str, arrow: str, header: Buffer, payload: Buffer | None = None) -> None:
        """Write a line."""
        fields = json.loads(bytes(header))
        kind = f"{who}{arrow}{fields['type']}"
        self._seen[kind] += 1
        if self.brief and fields["type"] in NOISE and self._seen[kind] > NOISE[fields["type"]]:
            return
        if self.brief:
            out = LEFT_OUT | (set() if fields["type"] in NAMES_EPOCHS else {"epoch"})
            usual = {"commit": "auto", "acknowledge": "applied"}.items()
            fields = {n: v for n, v in fields.items() if n not in out and (n, v) not in usual}
            if fields["type"] not in NAMES_EPOCHS:
                fields = {n: without(v, *WITHIN) for n, v in fields.items()}
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
        text = re.sub(r"([0-9a-f]{4})[0-9a-f]{12,}", r"\1...", text)
        text = re.sub(r'("sealed":"[\w+/]{4})[\w+/=]+', r"\1...", text)
        more = "" if payload is None else f" + {len(bytes(payload))} bytes"
        self.lines.append(f"{self.now:.3f} {who}{arrow} {text}{more}")

    def say(self, text: str) -> None:
        """Write down what happens beside."""
        self.lines.append(f"{self.now:.3f} ({text})")


class Trainer:
    """A publisher: its machine, and the memory of versions."""

    def __init__(
        self,
        scene: Scene,
        *,
        epoch: int = EPOCH,
        ping: float = 1.0,
        shared: bool = False,
        sealed: bool = False,
        origin: bool = True,
    ) -> None:
        self.scene, self.workers, self.shared = scene, dict[bytes, Any](), shared
        self.started, self._numbers = scene.now, itertools.count()
        self.segments: dict[str, VirtualSegment] = {}
        self.loses = set[tuple[int, int]]()  # versions and chunks
        self.delays: dict[tuple[int, int], float] = {}  # by version and chunk: all that follows
        self._not_before = 0.0
        self.sealer = Sealer(lambda: bytes(range(32, 64)), _room) if sealed else None
        sealer, probe = self.sealer, self.segment(0).shared if shared else None
        self.machine = PublisherMachine(
            PublisherState(
                epoch,
                "tcp://*:5556",
                Timing(ping=ping),
                probe,
                age=lambda: 60 + scene.now - self.started,
                keys=None if sealer is None else lambda _: sealer.keys,
                origin=origin,
            )
        )
        self.alive = True
        scene.every(self.tick)

    def segment(self, nbytes: int) -> VirtualSegment:
        segment = VirtualSegment(len(self.segments) + 9, nbytes, lambda: True)
        self.segments[segment.shared.token] = segment
        return segment

    def tick(self) -> None:
        if self.alive:
            self.do(self.machine.tick(self.scene.now))
            self.do(self.machine.push(self.scene.now))

    def receive(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        if self.alive:
            self.do(self.machine.receive(identity, frames, self.scene.now))
            self.do(self.machine.push(self.scene.now))

    def do(self, effects: Sequence[PublisherEffect]) -> None:
        for effect in perform(self.machine, effects, self.scene.now, self.sealer):
            match effect:
                case Send(message, payload, to) if to in self.workers:
                    frames = _frames(_encoded(message), payload)
                    self.scene.later(DELAY, partial(self.workers[to].hear, frames))
                case Broadcast(topic, message, payload):
                    which = (
                        (message.version, message.index) if isinstance(message, Chunk) else (0, 0)
                    )
                    if which in self.loses:
                        continue
                    now = self.scene.now
                    self._not_before = max(self._not_before, now + self.delays.get(which, DELAY))
                    for worker in self.workers.values():
                        if topic in worker.topics:
                            frames = _frames(topic, encode(message), payload)
                            wait = self._not_before - now
                            self.scene.later(wait, partial(worker.hear_published, frames))
                case _:
                    pass

    def publish(
        self,
        layout: Layout,
        data: bytes,
        *,
        chunk_bytes: int = 16,
        commit: Literal["auto", "together"] = "auto",
        require: int | None = None,
        base: tuple[Version, bytes] | None = None,
        keep: bool = False,
    ) -> Version:
        """Publish a version to all."""
        content: Any = PlainSnapshot(data)
        where: Shared | None = None
        if self.shared:
            segment = self.segment(len(data))
            segment.data[:] = np.frombuffer(data, np.uint8)
            content, where = _Stamping(data, segment), segment.shared
        offer = VersionOffer.of(MODEL, layout, chunk_bytes, content, where)
        hash_all(offer)
        offer.keep = keep
        if base is not None:
            was, old = base
            digests = was.chunks.digest, offer.chunks.digest
            arrays = np.frombuffer(old, np.uint8), np.frombuffer(data, np.uint8)
            patch = encode_patch(layout, *arrays, digests=digests, chunk_bytes=chunk_bytes)
            offer.patches = (OfferedPatch("delta-1", _running(was), patch),)
        terms = PublishTerms(commit=commit, require=require, wait="applied", timeout=10.0)
        number = next(self._numbers)
        now = self.scene.now
        call, effects = self.machine.publish(number, offer, terms, now, now)
        self.do(effects)
        self.do(self.machine.push(now))
        return call.version

    def offer(self, stored: Version, data: bytes) -> None:
        """Offer a version of an earlier publisher."""
        offer = VersionOffer.of(MODEL, stored.layout, 16, PlainSnapshot(data))
        offer.chunks.fill(stored.chunks.digest)
        offer.names = frozenset({stored.key})
        self.do(self.machine.offer(offer)[1])


class _Stamping(PlainSnapshot):
    """Bytes that lie in a segment."""

    def __init__(self, data: bytes, segment: VirtualSegment) -> None:
        super().__init__(data)
        self.segment = segment

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        self.segment.release(model, epoch, version)
        return super().stamp(model, epoch, version)


class Pupil:
    """A worker of all levels: the machine of the package, and a user who applies at once."""

    def __init__(
        self,
        scene: Scene,
        name: str,
        *,
        features: tuple[str, ...] = (),
        local: bool = False,
        sealed: bool = False,
        label: str = "",
        refuses: Callable[[Layout], str] = lambda _: "",
        boxes: Boxes | None = None,
    ) -> None:
        self.scene, self.label, self.local = scene, f"{label} " if label else "", local
        identity = Hello(name=name, instance=f"{name[-1] * 32}", models={}, features=[*features])
        self.keyring = Keyring() if sealed else None
        self.machine = WorkerMachine(
            identity,
            [MODEL],
            lambda _model, layout: refuses(layout),
            expected={MODEL: Expected(boxes=boxes)},
            keyring=self.keyring,
        )
        self.topics: set[bytes] = set()
        self.trainer: Trainer | None = None
        self.identity = name.encode()
        self.data = b""
        self.shows_published = True
        self.alters: Callable[[bytes], bytes] = bytes
        scene.every(self.tick)

    def connect(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.workers[self.identity] = self
        self.do(self.machine.connected(self.scene.now))

    def tick(self) -> None:
        if self.trainer is not None:
            self.do(self.machine.tick(self.scene.now))
            self.do(self.machine.connected(self.scene.now))

    def hear(self, frames: Sequence[Buffer]) -> None:
        self.scene.note(self.label, "<--", *frames)
        self.do(self.machine.receive(frames, self.scene.now))

    def hear_published(self, frames: Sequence[Buffer]) -> None:
        topic, *rest = frames
        if self.shows_published:
            self.scene.note(self.label, f"<== {bytes(topic).decode()}", *rest)
        self.do(self.machine.receive_published(frames, self.scene.now))

    def opens(self, shared: Shared, nbytes: int) -> Any:
        segment = self.trainer.segments.get(shared.token) if self.trainer else None
        return segment.open(lambda: True) if segment and segment.data.nbytes == nbytes else None

    def do(self, effects: list[Effect]) -> None:
        opens = self.opens if self.local else another_host
        for effect in done(self.machine, effects, self.scene.now, opens):
            match effect:
                case Send(message):
                    header = _encoded(message)
                    self.scene.note(self.label, "-->", header)
                    trainer = self.trainer
                    assert trainer is not None
                    self.scene.later(DELAY, partial(trainer.receive, self.identity, [header]))
                case Subscribe(topic, on):
                    known = topic in self.topics
                    (self.topics.add if on else self.topics.discard)(topic)
                    if on and not known and self.trainer is not None:
                        self.subscribed(topic)
                case Ready(staged):
                    self.apply(staged)
                case Copy(job):
                    crcs = _last(copying(job))
                    self.do(self.machine.happened(Copied(job, crcs), self.scene.now))
                case Decode(job):
                    self.do(self.machine.happened(_timeless(decoded(job)), self.scene.now))
                case Examine(check):
                    sums: list[int | None] = [crc32c(self.data)]
                    said = Checked(
                        model=check.model, epoch=check.epoch, version=check.version, sums=sums
                    )
                    self.do(self.machine.happened(Examined(said), self.scene.now))
                case _:
                    pass

    def subscribed(self, topic: bytes) -> None:
        """A subscription arrives: it is answered at once. (P16)"""
        trainer = self.trainer
        if trainer is None or not trainer.alive:
            return

        def answer() -> None:
            beacon = trainer.machine.subscribed(topic)
            if beacon is None:
                return
            said = [Broadcast(control_topic(beacon.model), beacon)]
            for effect in perform(trainer.machine, said, self.scene.now, trainer.sealer):
                if isinstance(effect, Broadcast):
                    frames = effect.topic, encode(effect.message), effect.payload
                    self.hear_published(_frames(*frames))

        self.scene.later(2 * DELAY, answer)

    def leave(self) -> None:
        self.do(self.machine.close())

    def apply(self, staged: StagedVersion) -> None:
        now = self.scene.now
        self.machine.happened(Report(MODEL, staged.key, "taken"), now)
        with staged.reading():
            self.data = self.alters(bytes(staged.data))
            digest = digest_of(staged.layout.id, staged.data, staged.hash_chunks or 16)
        report = Report(
            MODEL, staged.key, "applied", "", digest if staged.hash_chunks else staged.digest
        )
        report = msgspec.structs.replace(report, bytes=staged.private_bytes)
        self.do(self.machine.happened(report, now))


class Relay:
    """A relay: a worker above, and a publisher below."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.above = scene, Pupil(scene, "relay-1", features=("relay",), label="R")
        self.below = Trainer(scene, origin=False)
        self._reports, self._welcomes = BelowReports(self.below.machine), 0
        scene.every(self.report)

    def report(self) -> None:
        machine = self.above.machine
        if machine.welcomes != self._welcomes:
            self._welcomes = machine.welcomes
            self._reports.begin()
        if self._welcomes:
            messages = self._reports.due(machine.session.terms.epoch, self.scene.now)
            self.above.do([Send(message) for message in messages])

    def offer(self, version: Version, data: bytes) -> None:
        """Pass a version on."""
        offer = VersionOffer.of(MODEL, version.layout, 16, PlainSnapshot(data))
        hash_all(offer)
        offer.key = version.key
        self.below.do(self.below.machine.pass_on(offer, self.scene.now)[1])
        self.below.do(self.below.machine.push(self.scene.now))


class Onlooker:
    """An observer."""

    topics: frozenset[bytes] = frozenset()

    def __init__(self, scene: Scene, trainer: Trainer) -> None:
        self.scene, self.trainer = scene, trainer
        trainer.workers[b"observer"] = self

    def ask(self, message: Message) -> None:
        header = _encoded(message)
        self.scene.note("O ", "-->", header)
        self.scene.later(DELAY, lambda: self.trainer.receive(b"observer", [header]))

    def hear(self, frames: Sequence[Buffer]) -> None:
        self.scene.note("O ", "<--", *frames)


class Dealer:
    """A ZeroMQ socket of the example, and its clock."""

    def __init__(self, stage: "Stage") -> None:
        self.stage, self.inbox = stage, list[list[bytes]]()
        self.topics: frozenset[bytes] = frozenset()
        self.immediate = self.linger = self.maxmsgsize = 0

    def __enter__(self) -> "Dealer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, _address: str) -> None:
        self.stage.dealer = self
        self.stage.trainer.workers[b"level1"] = self

    def send_json(self, fields: dict[str, Any], _flags: int) -> None:
        order = {"wbp": fields["wbp"], "type": fields["type"]} | fields
        header = json.dumps(order, separators=(",", ":")).encode()
        scene, trainer = self.stage.scene, self.stage.trainer
        scene.note("", "-->", header)
        scene.later(DELAY, lambda: trainer.receive(b"level1", [header]))

    def hear(self, frames: Sequence[Buffer]) -> None:
        if self.stage.dealer is self:
            self.stage.scene.note("", "<--", *frames)
            self.inbox.append([bytes(frame) for frame in frames])

    def poll(self, _ms: int) -> bool:
        if not self.inbox:
            self.stage.step()
        return bool(self.inbox)

    def recv_multipart(self) -> list[bytes]:
        return self.inbox.pop(0)


class Stage:
    """Where the worker of level 1 plays, which runs as it stands.

    Args:
        scene: The clock and the network.
        trainer: The publisher.
        plan: What happens beside, by the second.
    """

    def __init__(
        self, scene: Scene, trainer: Trainer, plan: dict[float, Callable[[], None]], end: float
    ) -> None:
        self.scene, self.trainer, self.end = scene, trainer, end
        self.dealer: Dealer | None = None
        for second, act in plan.items():
            scene.later(second - scene.now, act)

    def step(self) -> None:
        if self.scene.now >= self.end:
            raise OverError
        self.scene.run(DELAY)

    def play(self) -> None:
        names: dict[str, Any] = {"__name__": "level1_worker"}
        exec(compile(LEVEL_1, "level1_worker.py", "exec"), names)  # noqa: S102 - our own
        context = SimpleNamespace(socket=lambda _: Dealer(self))
        names["zmq"] = SimpleNamespace(
            Context=SimpleNamespace(instance=lambda: context),
            DEALER=zmq.DEALER,
            NOBLOCK=zmq.NOBLOCK,
            Again=zmq.Again,
        )
        names["time"] = SimpleNamespace(monotonic=lambda: self.scene.now)
        names["INSTANCE"] = "4eeff3d2" * 4
        names["Path"] = lambda _: SimpleNamespace(write_bytes=len)
        names["os"] = SimpleNamespace(replace=lambda *_: None)
        worker = names["Worker"]("tcp://trainer:5555", MODEL, "policy.safetensors")
        with suppress(OverError):
            while True:
                worker.session()


def _frames(*parts: Buffer | None) -> list[Buffer]:
    return [part for part in parts if part is not None]


def _encoded(message: Message) -> bytes:
    return bytes(encode(message))


def _running(version: Version) -> Running:
    return Running(version.epoch, version.version, version.chunks.digest)


def _room(_model: str, nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


def _last(steps: Iterator[Any]) -> Any:
    """Take all steps; return what comes of them."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def _timeless(done_: Decoded) -> Decoded:
    return msgspec.structs.replace(done_, seconds=0.00025)


def flat(nbytes: int, name: str = "w") -> Layout:
    """Return the layout of one tensor of bytes."""
    return Layout.plan([(name, "U8", (nbytes,))])


def bytes_of(version: int, nbytes: int) -> bytes:
    return bytes((version * 16 + index) % 256 for index in range(nbytes))


def pull() -> Scene:
    scene = Scene(brief=False)
    trainer = Trainer(scene)
    trainer.publish(flat(20), bytes_of(1, 20))
    stage = Stage(scene, trainer, {}, 0.5)
    stage.play()
    return scene


def together() -> Scene:
    scene = Scene()
    trainer = Trainer(scene)
    trainer.publish(flat(10), bytes_of(1, 10))

    def restart() -> None:
        scene.say("the publisher restarts")
        trainer.alive = False
        stage.trainer = fresh = Trainer(scene, epoch=EPOCH + 5000)
        fresh.workers = trainer.workers
        if stage.dealer is not None:
            fresh.workers[b"level1"] = stage.dealer

    def publish() -> None:
        scene.lines.clear()
        scene.say("version 2 is published with commit together, and is committed")
        trainer.publish(flat(10), bytes_of(2, 10), commit="together", require=0)

    stage = Stage(scene, trainer, {1.5: publish, 3.2: restart}, 4.0)
    stage.play()
    return scene


def push() -> Scene:
    scene = Scene()
    trainer = Trainer(scene)
    worker = Pupil(scene, "worker-1")
    worker.connect(trainer)
    scene.run(0.1)
    trainer.loses, trainer.delays = {(1, 1)}, {(1, 2): 0.15}
    scene.say("chunk 1 of version 1 is lost, and chunk 2 is late")
    trainer.publish(flat(40), bytes_of(1, 40))
    scene.run(0.2)
    trainer.publish(flat(40), bytes_of(2, 40), chunk_bytes=64)
    scene.run(0.1)
    worker.leave()
    return scene


def decisions() -> Scene:
    scene = Scene()
    trainer = Trainer(scene)
    one, two = Pupil(scene, "worker-1", label="W"), Pupil(scene, "worker-2", label="V")
    two.machine.followers[MODEL]._acceptance._accepts = lambda _m, layout: (  # noqa: SLF001
        "" if layout.nbytes < 12 else "w: shape [12] published, [10] here"
    )
    two.shows_published = False
    for worker in (one, two):
        worker.connect(trainer)
    scene.run(0.3)
    scene.lines.clear()
    trainer.publish(flat(10), bytes_of(1, 10), commit="together")
    scene.run(0.2)
    scene.lines = [line for line in scene.lines if " V " not in line]
    trainer.publish(flat(12), bytes_of(2, 12), commit="together")
    scene.run(0.2)
    return scene


def renaming() -> Scene:
    scene = Scene()
    old = Trainer(scene)
    worker = Pupil(scene, "worker-1", features=("renaming",))
    worker.connect(old)
    data = bytes_of(1, 10)
    scene.run(0.1)
    version = old.publish(flat(10), data)
    scene.run(0.2)
    scene.lines.clear()
    old.alive = False
    scene.say("the publisher restarts, with its stored version")
    new = Trainer(scene, epoch=EPOCH + 5000)
    new.offer(version, data)
    worker.connect(new)
    scene.run(0.1)
    return scene


def shared() -> Scene:
    scene = Scene()
    trainer = Trainer(scene, shared=True)
    worker = Pupil(scene, "worker-1", features=("mapping",), local=True)
    worker.connect(trainer)
    scene.run(0.1)
    segment = trainer.segment(40)
    trainer.do(trainer.machine.prepare(MODEL, segment.shared, 40))
    scene.run(0.1)
    trainer.publish(flat(40), bytes_of(1, 40))
    scene.run(0.2)
    return scene


def observing() -> Scene:
    scene = Scene()
    trainer = Trainer(scene)
    worker = Pupil(scene, "worker-1", features=("checking",), label="W")
    worker.alters = lambda data: b"\xff" + data[1:]
    worker.connect(trainer)
    scene.run(0.1)
    trainer.publish(flat(10), bytes_of(1, 10))
    scene.run(0.2)
    scene.lines.clear()
    observer = Onlooker(scene, trainer)
    observer.ask(Observe())
    scene.run(0.1)
    observer.ask(Verify(worker="worker-1", model=MODEL))
    scene.run(0.1)
    return scene


def relaying() -> Scene:
    scene = Scene()
    trainer, relay = Trainer(scene), Relay(scene)
    relay.above.connect(trainer)
    worker = Pupil(scene, "worker-1", label="W")
    worker.connect(relay.below)
    scene.run(0.1)
    scene.lines.clear()
    version = trainer.publish(flat(10), bytes_of(1, 10))
    scene.run(0.01)
    relay.offer(version, bytes_of(1, 10))
    scene.run(0.2)
    return scene


def sealing() -> Scene:
    scene = Scene()
    trainer = Trainer(scene, sealed=True)
    worker = Pupil(scene, "worker-1", sealed=True)
    worker.connect(trainer)
    scene.run(0.1)
    trainer.publish(flat(10), bytes_of(1, 10))
    scene.run(0.2)
    sealer = trainer.sealer
    assert sealer is not None
    scene.say("the publisher draws another group key")
    sealer._draw = lambda: bytes(range(64, 96))  # noqa: SLF001
    sealer.rekey(scene.now)
    trainer.do(trainer.machine.rekeyed())
    scene.run(0.2)
    return scene


def patch() -> Scene:
    scene = Scene()
    trainer = Trainer(scene)
    worker = Pupil(scene, "worker-1", features=("delta-1",))
    worker.connect(trainer)
    scene.run(0.1)
    layout = Layout.plan([("w", "BF16", (400,))])
    one = np.resize(np.arange(251, dtype=np.uint8), layout.nbytes).tobytes()
    two = bytearray(one)
    two[10] ^= 1
    first = trainer.publish(layout, one, chunk_bytes=512, keep=True)
    scene.run(0.3)
    scene.lines.clear()
    trainer.publish(layout, bytes(two), chunk_bytes=512, base=(first, one), keep=True)
    scene.run(0.3)
    return scene


def parting() -> Scene:
    scene = Scene()
    trainer = Trainer(scene)
    slices = {"w": ((8, 20),)}
    worker = Pupil(scene, "worker-1", features=("parts",), boxes=lambda _: slices)
    worker.connect(trainer)
    scene.run(0.1)
    trainer.publish(flat(48), bytes_of(1, 48))
    scene.run(0.2)
    return scene


SCENES: dict[str, Callable[[], Scene]] = {
    f.__name__: f
    for f in (
        pull,
        together,
        push,
        decisions,
        renaming,
        shared,
        observing,
        relaying,
        sealing,
        patch,
        parting,
    )
}


def written(text: str) -> str:
    """Return a page with its transcripts."""

    def block(match: re.Match[str]) -> str:
        indent, name = match[1], match[2]
        lines = "".join(f"{indent}{line}\n" for line in SCENES[name]().lines)
        return f"{indent}<!-- transcript: {name} -->\n{indent}```\n{lines}{indent}```"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="The transcripts of the protocol's pages.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    stale = [page for page in PAGES.glob("*.md") if written(page.read_text()) != page.read_text()]
    for page in stale:
        if check:
            print(f"{page.name}: other transcripts than tests/vectors/transcripts.py plays")
        else:
            page.write_text(written(page.read_text()))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
