"""An exception that one message, effect or call causes ends nothing but what it was about."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightbus.bus.effects import Notice, Send
from weightbus.bus.errors import ClosedError, PublishError
from weightbus.bus.headers import Buffer, encode, from_publisher
from weightbus.bus.messages import Applied, Fetch, Hello, Ping, Progress, Refuse
from weightbus.bus.net import publisher_loop
from weightbus.bus.net.pub import SubscriberInput
from weightbus.bus.net.publisher_loop import FAILED_TURNS_MAX, PublisherLoop, Reply
from weightbus.bus.net.publisher_sockets import PollResult, PublisherSockets
from weightbus.bus.publisher import calls, joining, observers, offers, publishing, reports, sessions
from weightbus.bus.publisher.effects import (
    Broadcast,
    BroadcastChunk,
    DropRevoked,
    Effect,
    Follow,
    HangUp,
    Hash,
    MakeReclaimable,
    Release,
    SendChunk,
    Settled,
    Stamp,
    VersionKeeper,
    Withdraw,
)
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.codecs.layout import Layout
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.simulation.virtual_shell import PlainSnapshot

SECONDS = 30.0  # far more than anything here takes
MODEL = "a"


class InjectedError(Exception):
    """What this file's tests make fail."""


class FakeSockets:
    """Sockets that are none, and workers that apply what they hear of; any call may be broken."""

    key = ""

    def __init__(self) -> None:
        self.data = self
        self.broken: Callable[[str, tuple[Any, ...]], bool] = lambda _name, _given: False
        self.control: deque[tuple[bytes, list[bytes]]] = deque()  # what workers have said
        self.heard: deque[SubscriberInput] = deque()
        self.closed: deque[tuple[bytes, str]] = deque()
        self.answers: deque[tuple[bytes, Any]] = deque()
        self.raised = 0
        self._waker = threading.Event()
        for name in (
            *("poll", "receive", "receive_input", "send", "broadcast", "withdraw", "hang_up"),
            *(
                "follow",
                "close_revoked",
                "turned_away",
                "take_closed",
                "has_room",
                "admit",
                "answer",
            ),
            "wake_up",
        ):
            setattr(self, name, self._breakable(name))

    def _breakable(self, name: str) -> Callable[..., Any]:
        real = getattr(self, f"_{name}", lambda *_: None)

        def call(*given: Any) -> Any:
            if self.broken(name, given):
                self.raised += 1
                raise InjectedError(name)
            return real(*given)

        return call

    def say(self, name: str, *messages: Any) -> None:
        self.control.extend((name.encode(), [encode(message)]) for message in messages)
        self.wake()

    def wake(self) -> None:
        self._waker.set()

    def close(self) -> None:
        pass

    @property
    def with_input(self) -> bool:
        return bool(self.heard)

    def _poll(self, seconds: float) -> PollResult:
        if not (self.control or self.heard or self.closed):
            self._waker.wait(max(0.0, seconds))
        self._waker.clear()
        return PollResult(bool(self.control), bool(self.heard), closed=bool(self.closed))

    def _receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.control.popleft() if self.control else None

    def _receive_input(self) -> SubscriberInput | None:
        return self.heard.popleft() if self.heard else None

    def _take_closed(self, _now: float) -> list[tuple[bytes, str]]:
        return [self.closed.popleft() for _ in range(len(self.closed))]

    def _turned_away(self, _now: float) -> str:
        return ""

    def _has_room(self, _topic: bytes) -> bool:
        return True

    def _send(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        self.answers.append((identity, from_publisher(frames)[0]))
        return True


class Scene:
    """A publisher's thread, and two workers, of which one is `bad`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(publisher_loop, "TICK", 0.01)
        self.patch, self.fake = monkeypatch, FakeSockets()
        self.keeper = cast(
            "VersionKeeper", SimpleNamespace(offer=lambda _: None, stop=lambda: None)
        )
        self.machine = PublisherMachine(PublisherState(7, "tcp://d:1"))
        sockets = cast("PublisherSockets", self.fake)
        self.loop = PublisherLoop(self.machine, sockets, self.keeper)
        self.join("good")
        self.join("bad")
        self.loop.start()
        self.count = 0

    def join(self, name: str) -> None:
        hello = Hello(name=name, instance="0" * 32, models={MODEL: None, "b": None})
        self.fake.say(name, hello, Ping(subscribed=True))

    def offer(self, model: str = MODEL, chunks: int = 3) -> VersionOffer:
        layout = Layout.plan([("w", "U8", (chunks,))])
        return VersionOffer.of(model, layout, 1, PlainSnapshot(bytes(chunks)))

    def submit(self, offer: VersionOffer, *workers: str) -> Reply:
        reply = Reply()
        terms = PublishTerms(workers=workers or None, timeout=SECONDS)
        self.loop.submit(offer, terms, time.monotonic(), reply)
        return reply

    def publish(self, *workers: str, named: bool = True) -> None:
        """Publish, have these workers apply it, and see that the call says so."""
        offer = self.offer()
        reply = self.submit(offer, *(workers if named else ()))
        wait_for(lambda: self.version_of(offer) is not None or reply.done(), "it", SECONDS)
        version = self.version_of(offer)
        assert version is not None
        for crc in range(3):
            offers.hash_chunk(version, crc)
        applied = Applied(model=MODEL, epoch=7, version=version.version, digest=version.digest)
        for name in workers:
            self.fake.say(name, applied)
        assert reply.result(SECONDS).in_state("applied") == sorted(workers)

    def version_of(self, offer: VersionOffer) -> Version | None:
        found = self.loop._call_soon(  # noqa: SLF001 # pyright: ignore
            lambda _: [
                v
                for versions in self.machine.state.store.values()
                for v in versions
                if v.snapshot is offer.snapshot
            ]
        ).result(SECONDS)
        return found[0] if found else None

    def breaks(self, *names: str, about: object = None) -> None:
        """Have these calls of the sockets raise, if one of what they are given is this."""
        self.fake.broken = lambda name, given: name in names and (about is None or about in given)

    def fails(self, where: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """Have a function raise, half-way for all that anybody knows."""
        real = getattr(where, name)

        def broken(*given: Any, **more: Any) -> Any:
            if when(*given):
                self.fake.raised += 1
                raise InjectedError(name)
            return real(*given, **more)

        self.patch.setattr(where, name, broken)

    def does(self, *effects: Effect) -> None:
        self.loop.decide(lambda _machine, _now: [*effects])

    def is_done(self) -> None:
        """Wait until the thread has taken what it was given."""
        self.loop.status().result(SECONDS)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(monkeypatch)
    yield scene
    scene.loop.close()


def of_bad(*given: Any) -> bool:
    """Whether anything that a function is given is about the bad worker."""
    return any(getattr(each, "name", "") == "bad" or each == b"bad" for each in given)


def bad_says(*messages: Any) -> Callable[[Scene], None]:
    return lambda scene: scene.fake.say("bad", *messages)


def heard(*topics: bytes, words: Sequence[bytes] = (), ticket: str = "") -> Callable[[Scene], None]:
    def say(scene: Scene) -> None:
        subscriber: Any = SimpleNamespace(invalid_frames=0)
        scene.fake.heard.append(SubscriberInput(subscriber, topics, words, ticket))
        scene.fake.wake()

    return say


def effect(*effects: Effect) -> Callable[[Scene], None]:
    return lambda scene: scene.does(*effects)


def of_version(kind: Callable[[Version], Effect], broken: str) -> Callable[[Scene], None]:
    """Have an effect fail that is about a version of another model."""

    def do(scene: Scene) -> None:
        offer = scene.offer("b")
        reply = scene.submit(offer, "bad")
        version = scene.version_of(offer)
        assert version is not None
        scene.fails(offer.snapshot, broken)
        scene.does(kind(version))
        scene.is_done()
        if isinstance(kind(version), SendChunk | BroadcastChunk | Hash):
            with pytest.raises(PublishError, match="the publisher"):
                reply.result(SECONDS)

    return do


def published(*models: str) -> Callable[[Scene], None]:
    def publish(scene: Scene) -> None:
        for model in models:
            scene.submit(scene.offer(model))

    return publish


def nothing(_scene: Scene) -> None:
    pass


PROGRESS = Progress(model=MODEL, epoch=7, version=1, chunks=1)
PLACES: dict[str, tuple[Callable[[Scene], None], Callable[[Scene], None]]] = {
    # The function that breaks, and what has it run.
    "poll": (lambda s: s.breaks("poll"), nothing),
    "receive": (lambda s: s.breaks("receive"), bad_says(Ping())),
    "the machine": (lambda s: s.fails(s.machine, "receive", of_bad), bad_says(Ping())),
    "hello": (
        lambda s: s.fails(joining, "hello", lambda _s, who, *_: who == b"bad"),
        lambda s: s.join("bad"),
    ),
    "ping": (lambda s: s.fails(sessions, "receive_ping", of_bad), bad_says(Ping())),
    "a report": (lambda s: s.fails(reports, "progress", of_bad), bad_says(PROGRESS)),
    "applied": (
        lambda s: s.fails(reports, "runs", of_bad),
        bad_says(Applied(model=MODEL, epoch=7, version=1, digest="")),
    ),
    "receive_input": (lambda s: s.breaks("receive_input"), heard(b"a/ctl")),
    "redeem": (lambda s: s.fails(s.machine, "redeem"), heard(ticket="1" * 32)),
    "admit": (lambda s: s.breaks("admit"), heard(ticket="1" * 32)),
    "subscribed": (lambda s: s.fails(s.machine, "subscribed"), heard(b"a/ctl")),
    "answer": (lambda s: s.breaks("answer"), heard(b"a/ctl")),
    "a word": (lambda s: s.fails(s.machine, "receive_report"), heard(words=[b"word"])),
    "take_closed": (
        lambda s: s.breaks("take_closed"),
        lambda s: s.fake.closed.append((b"bad", "")),
    ),
    "unreachable": (
        lambda s: s.fails(s.machine, "unreachable", of_bad),
        lambda s: s.fake.closed.append((b"bad", "")),
    ),
    "the tick of sessions": (lambda s: s.fails(sessions, "tick"), nothing),
    "the tick of pushes": (lambda s: s.fails(publishing, "push"), nothing),
    "the tick of checks": (lambda s: s.fails(s.machine.observers.checks, "tick"), nothing),
    "who was turned away": (lambda s: s.breaks("turned_away"), nothing),
    "memory": (lambda s: s.fails(s.machine, "freed"), nothing),
    "known": (lambda s: s.fails(s.machine, "view"), bad_says(Ping(subscribed=False))),
    "a push": (lambda s: s.fails(s.machine, "push"), published(MODEL, "b")),
    "has_room": (lambda s: s.breaks("has_room"), published("b")),
    "a send": (lambda s: s.breaks("send", about=b"bad"), bad_says(Ping())),
    "a broadcast": (lambda s: s.breaks("broadcast"), effect(Broadcast(b"b/ctl", Ping()))),
    "Withdraw": (lambda s: s.breaks("withdraw"), effect(Withdraw("b"))),
    "HangUp": (lambda s: s.breaks("hang_up"), effect(HangUp())),
    "Follow": (lambda s: s.breaks("follow"), effect(Follow(7))),
    "DropRevoked": (lambda s: s.breaks("close_revoked"), effect(DropRevoked())),
    "Notice": (
        lambda s: s.fails(observers.Observers, "happened", lambda _, n, __: n.worker == "bad"),
        effect(Notice("back", "it is back", "bad")),
    ),
    "Settled": (
        lambda s: s.fails(s.keeper, "offer"),
        of_version(Settled, "stamp"),
    ),
    "Stamp": (nothing, of_version(Stamp, "stamp")),
    "MakeReclaimable": (nothing, of_version(MakeReclaimable, "make_reclaimable")),
    "Release": (nothing, of_version(Release, "release")),
    "SendChunk": (nothing, of_version(lambda v: SendChunk(v, 0, b"bad"), "chunk")),
    "BroadcastChunk": (nothing, of_version(lambda v: BroadcastChunk(v, 0, b"b/dat"), "chunk")),
    "Hash": (nothing, of_version(Hash, "bytes")),
    "the sends that follow": (
        lambda s: s.breaks("send", about=b"bad"),
        effect(*[Send(Refuse(code="x", text=""), to=b"bad")] * 3),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_fails_harms_nobody_else_and_is_over_once_it_passes(
    scene: Scene, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, trigger = PLACES[place]
    scene.is_done()
    with caplog.at_level(logging.WARNING, "weightbus.publisher"), scene.patch.context() as patch:
        whole, scene.patch = scene.patch, patch
        broken(scene)
        if place == "poll":  # for a moment, not for good
            scene.fake.broken = lambda name, _: name == "poll" and scene.fake.raised < 5
        trigger(scene)
        wait_for(lambda: scene.fake.raised > 0, f"{place} has failed", SECONDS)
        if place == "receive":  # as before, it is about nobody
            scene.fake.broken = lambda *_: False
        scene.publish("good")
        scene.patch = whole
    warnings = [r for r in caplog.records if "the publisher goes on" in r.getMessage()]
    assert warnings, "with the cause"
    assert all("InjectedError" in r.getMessage() and r.exc_info for r in warnings)
    assert len(warnings) <= 5, "not one for each"
    scene.fake.broken = lambda *_: False
    assert not scene.loop.over.is_set()
    scene.join("bad")
    wait_for(lambda: bad_is_there(scene), "it is back", SECONDS)
    scene.publish("good", "bad")


def bad_is_there(scene: Scene) -> bool:
    statuses = scene.loop.status().result(SECONDS)
    return any(status.name == "bad" and status.state == "live" for status in statuses)


def test_a_worker_whose_message_fails_is_told_to_join_again(scene: Scene) -> None:
    scene.is_done()
    scene.fails(reports, "progress", of_bad)
    waits = scene.submit(scene.offer(), "good", "bad")
    scene.fake.say("bad", PROGRESS)
    refusal = (b"bad", "unknown-worker")

    def told() -> bool:
        said = [(who, m.code) for who, m in [*scene.fake.answers] if isinstance(m, Refuse)]
        return refusal in said

    wait_for(told, "it is refused", SECONDS)
    assert not waits.done(), "the call waits for the good one"
    status = {s.name: s.state for s in scene.loop.status().result(SECONDS)}
    assert status == {"good": "live", "bad": "lost"}


def test_an_error_in_work_of_a_call_is_that_calls(scene: Scene) -> None:
    scene.is_done()
    with scene.patch.context() as patch:
        patch.setattr(PublisherMachine, "status", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scene.loop.status().result(SECONDS)
    given = scene.loop.status()
    given.cancel()
    assert scene.loop.status().result(SECONDS)


@pytest.mark.parametrize("where", ["at the start", "half-way", "waiting for a commit"])
def test_a_publish_that_fails_fails_alone(scene: Scene, where: str) -> None:
    scene.is_done()
    offer, released = scene.offer(), list[str]()
    scene.patch.setattr(offer.snapshot, "release", lambda: released.append("once"))
    with scene.patch.context() as patch:
        whole, scene.patch = scene.patch, patch
        if where == "at the start":
            scene.fails(publishing, "publish")
        else:
            scene.fails(
                calls, "settle", lambda _s, call, _n: call.version.snapshot is offer.snapshot
            )
        reply = Reply()
        terms = PublishTerms(commit="together" if "commit" in where else "auto", timeout=SECONDS)
        scene.loop.submit(offer, terms, time.monotonic(), reply)
        with pytest.raises(InjectedError):
            reply.result(SECONDS)
        scene.patch = whole
    scene.is_done()
    scene.publish("good", "bad", named=False)
    wait_for(lambda: released == ["once"], "its memory is let go, once", SECONDS)


def test_a_call_of_which_nothing_can_be_said_fails_by_itself(scene: Scene) -> None:
    scene.is_done()
    offer = scene.offer("b")
    waits = scene.submit(offer, "bad")
    scene.is_done()
    scene.fails(calls, "settle", lambda _s, call, _n: call.version.snapshot is offer.snapshot)
    with pytest.raises(InjectedError):
        waits.result(SECONDS)
    scene.publish("good")


def test_a_call_whose_answer_is_lost_fails_in_place_of_waiting_for_ever(scene: Scene) -> None:
    scene.is_done()
    offer = scene.offer("b")
    waits = scene.submit(offer, "bad")
    scene.is_done()
    version = scene.version_of(offer)
    assert version is not None
    scene.fails(sessions, "lose")
    real = calls.record_running

    def arrived(*given: Any) -> list[Effect]:
        real(*given)
        raise InjectedError("after it was resolved")

    scene.patch.setattr(calls, "record_running", arrived)
    for index in range(3):
        offers.hash_chunk(version, index)
    scene.fake.say("bad", Applied(model="b", epoch=7, version=1, digest=version.digest))
    with pytest.raises(RuntimeError, match="the outcome of this publish was lost"):
        waits.result(SECONDS)


def test_it_ends_where_nothing_goes_on_any_more(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    waits = scene.submit(scene.offer(), "bad")
    scene.is_done()
    scene.breaks("poll")
    scene.fake.wake()
    assert scene.loop.over.wait(SECONDS)
    with pytest.raises(ClosedError, match="InjectedError"):
        waits.result(SECONDS)
    assert scene.fake.raised == FAILED_TURNS_MAX
    assert "the publisher's thread failed" in caplog.text


def test_fetches_of_what_cannot_be_read_fail_its_publish_and_no_other(scene: Scene) -> None:
    scene.is_done()
    offer = scene.offer("b")
    waits = scene.submit(offer, "bad")
    scene.fails(offer.snapshot, "chunk")
    scene.is_done()
    scene.fake.say("bad", Fetch(model="b", epoch=7, version=1, first=0, count=3))
    with pytest.raises(PublishError, match="InjectedError"):
        waits.result(SECONDS)
    scene.publish("good")
