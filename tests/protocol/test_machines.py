"""Whatever arrives, in whatever order, the machines neither raise nor remember without bound."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightbus.bus.chunks import ChunkPlan
from weightbus.bus.effects import Effect, Ready, Send, Subscribe
from weightbus.bus.headers import Buffer, encode, from_publisher, from_worker
from weightbus.bus.limits import BUFFERS_MAX, Timing
from weightbus.bus.messages import (
    Abort,
    Announce,
    Applied,
    Beacon,
    Bye,
    Chunk,
    Commit,
    End,
    Failed,
    Fetch,
    Hello,
    Ping,
    Pong,
    Progress,
    Refuse,
    Running,
    Staged,
    Welcome,
)
from weightbus.bus.protocol_limits import HEADER_BYTES_MAX
from weightbus.bus.publisher import roster
from weightbus.bus.publisher.effects import Broadcast, Resolve
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.offers import end_of
from weightbus.bus.publisher.publication import Publication, PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import CommitMode, Version, VersionOffer
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Outcome, Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.version_store import IN_MEMORY
from weightbus.codecs.checksum import digest
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.protocol_limits import INTEGER_MAX
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, perform, version_of
from weightbus.tests.simulation.virtual_shell import chunk as crc_and_bytes

EPOCH = 7
CHUNK = 16
BYTES_MAX = 200
WORKERS_MAX = 3

Frames = Sequence[Buffer]


def made(number: int, nbytes: int) -> Version:
    """Return a version with bytes of its own."""
    data = np.arange(nbytes, dtype=np.uint8) * 3 + number
    return version_of(number, data, CHUNK, EPOCH)


VERSIONS = [made(1, 40), made(2, 0), made(3, 130), made(4, 201), made(5, 7)]
DIGESTS = [version.digest for version in VERSIONS]
REFUSED_LAYOUT = VERSIONS[4].layout  # what the worker says it cannot take

names = st.sampled_from(["w0", "w1", "w2", "w3", "w4"])
models = st.sampled_from(["a", "b", "elsewhere"])
epochs = st.sampled_from([EPOCH] * 6 + [0, EPOCH - 1, EPOCH + 1, INTEGER_MAX])
versions = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5, INTEGER_MAX])
versions_or_none = st.sampled_from([0, 1, 2, 3, 4, 5, INTEGER_MAX])
digests = st.sampled_from([*DIGESTS, "0" * 64])
counts = st.sampled_from([0, 1, 2, 3, 64])
indices = st.integers(0, 9) | st.just(2**20 - 1)
texts = st.text(max_size=20)
instances = st.sampled_from(["0" * 32, "f" * 32])
of_version: dict[str, Any] = {"model": models, "epoch": epochs, "version": versions}
runnings = st.builds(Running, epoch=epochs, version=versions, digest=digests)

reports: st.SearchStrategy[Message] = st.one_of(
    st.builds(Staged, **(of_version | {"model": st.just("a")}), digest=digests),
    st.builds(Applied, **(of_version | {"model": st.just("a")}), digest=digests),
    st.builds(Failed, **(of_version | {"model": st.just("a")}), code=st.just("no"), text=texts),
)
from_workers: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        name=names,
        instance=instances,
        models=st.dictionaries(models, st.none() | runnings, max_size=3),
        epoch=epochs,
    ),
    st.builds(Hello, name=names, instance=instances, models=st.just({"a": None})),
    st.builds(
        Fetch,
        model=models,
        epoch=epochs,
        version=versions_or_none,
        first=indices,
        count=counts,
        layout=st.booleans(),
    ),
    st.builds(
        Progress,
        **of_version,
        chunks=counts | st.just(INTEGER_MAX),
        phase=st.sampled_from(["receiving", "staged", "applying"]),
    ),
    st.builds(Staged, **of_version, digest=digests),
    st.builds(Applied, **of_version, digest=digests),
    st.builds(Failed, **of_version, code=st.just("apply"), text=texts),
    st.builds(Bye),
    st.builds(Ping, subscribed=st.booleans()),
    st.builds(Pong),
)


def announce(version: Version, commit: Any = "auto", **fields: Any) -> Announce:
    """Return an announcement of a version, some fields of it changed."""
    told: dict[str, Any] = {
        "model": version.model,
        "epoch": version.epoch,
        "version": version.version,
        "layout": version.layout.id,
        "layout_bytes": len(version.layout.header),
        "nbytes": version.layout.nbytes,
        "chunk_bytes": CHUNK,
        "commit": commit,
        "acknowledge": "applied",
        "encoding": "raw",
    }
    return Announce(**(told | fields))


def chunk_of(version: Version, index: int) -> list[Buffer]:
    """Return the frames of a chunk that is sound."""
    crc, payload = crc_and_bytes(version, index)
    chunk = Chunk(model="a", epoch=EPOCH, version=version.version, index=index, crc=crc)
    return [encode(chunk), bytes(payload)]


announcements = st.builds(
    lambda version, header, fields: [
        encode(announce(version, **fields)),
        *([header.layout.header] if header is not None else []),
    ],
    st.sampled_from(VERSIONS),
    st.none() | st.sampled_from(VERSIONS),
    st.fixed_dictionaries(
        {"commit": st.sampled_from(["auto", "together"])},
        optional={
            "nbytes": st.sampled_from([0, 40, 130, 2**40]),
            "chunk_bytes": st.sampled_from([1, 2**26]),
            "epoch": epochs,
            "encoding": st.just("delta"),
        },
    ),
)
chunks = st.sampled_from(
    [chunk_of(version, i) for version in VERSIONS for i in range(version.plan.count)]
)
odd_chunks = st.builds(
    lambda model, epoch, version, index, payload: [
        encode(Chunk(model=model, epoch=epoch, version=version, index=index, crc=crc32c(payload))),
        payload,
    ],
    models,
    epochs,
    versions,
    indices,
    st.binary(max_size=20) | st.binary(min_size=CHUNK, max_size=CHUNK),
)
ends = st.sampled_from([[encode(end_of(version))] for version in VERSIONS])
welcome = Welcome(epoch=EPOCH, data="tcp://d:1", ping_ms=1000, lost_ms=5000, models={"a": 5})
from_publishers: st.SearchStrategy[Message] = st.one_of(
    st.just(welcome),
    st.builds(
        Welcome,
        epoch=epochs,
        data=texts,
        ping_ms=st.just(1),
        lost_ms=st.just(2),
        models=st.dictionaries(models, versions_or_none),
    ),
    st.builds(End, **of_version, digest=digests),
    st.builds(Commit, **of_version, digest=digests),
    st.builds(Abort, **of_version, text=texts),
    st.builds(Beacon, model=models, epoch=epochs, version=versions_or_none),
    st.builds(
        Refuse,
        code=st.sampled_from(["gone", "range", "unknown-worker", "name-taken", "new"]),
        text=texts,
        model=st.none() | models,
        version=versions_or_none,
    ),
    st.builds(Pong, epoch=epochs, models=st.dictionaries(models, versions_or_none)),
    st.builds(Ping),
)
junk = st.lists(st.binary(max_size=40) | st.just(b'{"wbp":1}'), max_size=3)


class Trainer:
    """Drives a publisher's machine as its loop does, and looks at every effect."""

    def __init__(self) -> None:
        self.machine = PublisherMachine(
            PublisherState(EPOCH, "tcp://d:1", Timing(ping=1.0, lost_after=3.0))
        )
        self.now = 0.0
        self.ids = itertools.count()
        self.open: dict[int, Publication] = {}
        self.said: set[str] = set()  # digests that workers have named
        for name in ("w0", "w1"):  # two workers are there from the start, one of them listens
            self.receive(name.encode(), Hello(name=name, instance="0" * 32, models={"a": None}))
        self.receive(b"w0", Ping(subscribed=True))

    def look(self, effects: list[PublisherEffect]) -> None:
        for effect in perform(self.machine, effects, self.now):
            match effect:
                case Send() | Broadcast():
                    frames = [encode(effect.message)]
                    payload = [] if effect.payload is None else [effect.payload]
                    assert len(frames[0]) <= HEADER_BYTES_MAX
                    from_publisher([*frames, *payload])
                case Resolve():
                    done = self.open.pop(effect.publication)
                    data = VERSIONS[[v.layout for v in VERSIONS].index(done.version.layout)]
                    if effect.receipt.in_state("applied", "staged"):
                        assert data.digest in self.said, "nobody could have said so truthfully"
                case _:
                    pass

    def receive(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Applied | Staged):
            self.said.add(message.digest)
        if isinstance(message, Hello):
            self.said |= {r.digest for r in message.models.values() if r is not None}
        self.look(self.machine.receive(identity, [encode(message)], self.now))

    def junk(self, identity: bytes, frames: Frames) -> None:
        self.look(self.machine.receive(identity, frames, self.now))

    def publish(self, which: int, together: bool, alone: bool, timeout: float, thief: bool) -> None:
        source = VERSIONS[which]
        data = source.snapshot.keep()
        assert data is not None
        offer = VersionOffer.of("a", source.layout, CHUNK, PlainSnapshot(data, thief=thief))
        workers = tuple(p.name for p in self.machine.state.roster)[:1] if alone else None
        commit: CommitMode = "together" if together else "auto"
        terms = PublishTerms(workers=workers, commit=commit, timeout=timeout)
        call, effects = self.machine.publish(next(self.ids), offer, terms, self.now, self.now)
        self.open[call.number] = call
        self.look(effects)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        while self.machine.ready:
            self.look(self.machine.push(self.now))
        self.look(self.machine.tick(self.now))
        assert all(p.deadline > self.now for p in self.open.values())


identities = st.sampled_from([b"w0", b"w0", b"w1", b"three", b"four", b"five"])
publisher_events = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), identities, from_workers),
        st.tuples(st.just("receive"), identities, reports),
        st.tuples(st.just("junk"), identities, junk),
        st.tuples(
            st.just("publish"),
            st.integers(0, 4),
            st.booleans(),
            st.booleans(),
            st.sampled_from([0.5, 5.0]),
            st.booleans(),
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 4.0])),
    ),
    max_size=40,
)


@settings(max_examples=100)
@given(publisher_events)
def test_a_publisher_takes_anything(events: list[tuple[Any, ...]]) -> None:
    trainer = Trainer()
    with patch.object(roster, "WORKERS_MAX", WORKERS_MAX):
        for what, *arguments in events:
            getattr(trainer, what)(*arguments)
            peers = list(trainer.machine.state.roster)
            assert len(peers) <= WORKERS_MAX
            assert {*trainer.machine.state.store} <= {"a"}
            assert all(set(peer.incoming) <= {"a"} for peer in peers)
        trainer.machine.status(trainer.now)
        trainer.look(trainer.machine.close(trainer.now))
    assert not trainer.open


class Student:
    """Drives a worker's machine as its loop and its user do, and looks at every effect."""

    def __init__(self) -> None:
        self.machine = WorkerMachine(
            Hello(name="w0", instance="0" * 32, models={}),
            ["a", "b"],
            self.accepts,
            BYTES_MAX,
            Timing(),
        )
        self.now = 0.0
        self.accepted: set[int] = set()
        self.ready: list[tuple[str, tuple[int, int]]] = []
        self.topics: set[bytes] = set()

    def accepts(self, _model: str, layout: Layout) -> str:
        if layout.id == REFUSED_LAYOUT.id:
            return "not this one " * 1000
        self.accepted.add(layout.nbytes)
        return ""

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        assert nbytes <= BYTES_MAX, "more than the user allowed"
        assert nbytes in self.accepted, "before the layout was accepted"
        return np.empty(nbytes, np.uint8)

    def look(self, effects: list[Effect]) -> None:
        for effect in done(self.machine, effects, self.now, takes=self.take):
            match effect:
                case Send():
                    frames = [encode(effect.message)]
                    assert len(frames[0]) <= HEADER_BYTES_MAX
                    from_worker(frames)
                case Ready(staged):
                    plan = ChunkPlan(staged.layout.nbytes, CHUNK)
                    spans = [plan.span(i) for i in range(plan.count)]
                    whole = [crc32c(staged.data[begin:end]) for begin, end in spans]
                    if staged.digest in DIGESTS:
                        assert digest(staged.layout.id, CHUNK, whole) == staged.digest
                    self.ready.append((staged.model, staged.key))
                case Subscribe(topic, on):
                    (self.topics.add if on else self.topics.discard)(topic)
                case _:
                    pass

    def receive(self, frames: Frames) -> None:
        self.look(self.machine.receive(frames, self.now))

    def published(self, frames: Frames) -> None:
        self.look(self.machine.receive_published([b"a/dat", *frames], self.now))

    def bare(self, frames: Frames) -> None:
        self.look(self.machine.receive_published(frames, self.now))

    def use(self, how: Outcome) -> None:
        """The user does something with the oldest version that is ready."""
        if not self.ready:
            return
        model, key = self.ready[0]
        if how != "newer":  # it may have been taken before: twice is once
            self.report(model, key, "taken")
        if how != "taken":
            del self.ready[0]
            late = how == "applied" and key <= runs(self.machine, model)
            self.report(model, key, "newer" if late else how)

    def report(self, model: str, key: tuple[int, int], what: Outcome) -> None:
        self.look(self.machine.happened(Report(model, key, what, "no"), self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look(self.machine.tick(self.now))
        self.look(self.machine.connected(self.now))


def runs(machine: WorkerMachine, model: str) -> tuple[int, int]:
    """Return what a worker runs of a model."""
    running = machine.followers[model].running
    return (running.epoch, running.version) if running else (0, 0)


to_worker = st.one_of(
    from_publishers.map(lambda message: [encode(message)]),
    announcements,
    chunks,
    chunks,
    chunks,
    odd_chunks,
    ends,
    junk,
)
worker_events = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), to_worker),
        st.tuples(st.just("published"), to_worker),
        st.tuples(st.just("bare"), junk),
        st.tuples(st.just("use"), st.sampled_from(["taken", "applied", "declined", "newer"])),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 6.0])),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(st.booleans(), worker_events)
def test_a_worker_takes_anything(inside: bool, events: list[tuple[Any, ...]]) -> None:
    student = Student()

    if inside:
        student.receive([encode(welcome)])
    for what, *arguments in events:
        before = {model: runs(student.machine, model) for model in student.machine.followers}
        getattr(student, what)(*arguments)
        for model, follower in student.machine.followers.items():
            held = len(follower.versions.all(*IN_MEMORY))
            assert held <= BUFFERS_MAX
            assert runs(student.machine, model) >= before[model]
    student.look(student.machine.close())


@given(st.lists(st.binary(max_size=100), max_size=4))
def test_random_bytes_are_refused_and_dropped(frames: list[bytes]) -> None:
    publisher = PublisherMachine(PublisherState(EPOCH, "tcp://d:1"))
    [answer] = publisher.receive(b"stranger", frames, 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refuse)
    assert publisher.state.malformed == 1
    worker = WorkerMachine(Hello(name="w0", instance="0" * 32, models={}), ["a"], lambda _m, _l: "")
    assert worker.receive(frames, 0.0) == []
    assert worker.malformed == 1
