"""The publisher's thread: what it pushes when."""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import cast

import pytest

from weightbus.bus.errors import ClosedError, PublishError
from weightbus.bus.headers import Buffer, data_topic, encode
from weightbus.bus.messages import Fetch, Hello, Ping
from weightbus.bus.net import publisher_loop
from weightbus.bus.net.publisher_loop import PublisherLoop, Reply
from weightbus.bus.net.publisher_sockets import PollResult, PublisherSockets
from weightbus.bus.protocol_limits import PUSH_CHUNKS
from weightbus.bus.publisher import offers, roster
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import VersionOffer
from weightbus.codecs.layout import Layout
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.simulation.virtual_shell import PlainSnapshot

SECONDS = 30.0  # far more than anything here takes
CHUNK = 2**20  # bytes: a burst, so that one chunk goes at a time
MODEL = "a"


class FakeSockets:
    """Sockets that are none; a test says whether there is room, and knows when the thread waits."""

    key = ""  # nobody has one

    def __init__(self) -> None:
        self.data = self
        self.room = True
        self.sent: list[bytes] = []  # topics
        self.answers: list[bytes] = []  # headers, to single workers
        self.waits = threading.Semaphore(0)  # released whenever the thread would sleep
        self.control: deque[tuple[bytes, list[bytes]]] = deque()  # what workers have said
        self._waker = threading.Event()

    def poll(self, seconds: float) -> PollResult:
        if seconds > 0 and not self._waker.is_set():
            self.waits.release()
            self._waker.wait(seconds)
        self._waker.clear()
        return PollResult(control=bool(self.control), data=False)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.control.popleft() if self.control else None

    def follow(self, _pid: int) -> None:
        pass

    def send(self, _identity: bytes, frames: Sequence[Buffer]) -> bool:
        self.answers.append(bytes(frames[0]))
        return True

    def has_room(self, topic: bytes) -> bool:
        return self.room and topic == data_topic(MODEL)

    def broadcast(self, frames: Sequence[Buffer], _now: float) -> None:
        self.sent.append(bytes(frames[0]))

    def withdraw(self, topics: Collection[bytes]) -> None:
        pass

    def turned_away(self, _now: float) -> str:
        return ""

    def wake(self) -> None:
        self._waker.set()

    def close(self) -> None:
        pass

    def asleep(self) -> None:
        """Wait until the thread has done all that it could."""
        assert self.waits.acquire(timeout=SECONDS)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeSockets, PublisherLoop]]:
    monkeypatch.setattr(publisher_loop, "TICK", 1e6)  # ticks once, at the beginning
    machine, fake = PublisherMachine(PublisherState(7, "tcp://d:1")), FakeSockets()
    hello = Hello(name="w", instance="0" * 32, models={MODEL: None, "b": None})
    for message in (hello, Ping(subscribed=True)):
        machine.receive(b"w", [encode(message)], time.monotonic())
    loop = PublisherLoop(machine, cast("PublisherSockets", fake))
    loop.start()
    fake.asleep()
    yield fake, loop
    loop.close()


def made(chunks: int, model: str = MODEL) -> tuple[VersionOffer, PublishTerms, float]:
    layout = Layout.plan([("w", "U8", (chunks * CHUNK,))])
    offer = VersionOffer.of(model, layout, CHUNK, PlainSnapshot(bytes(chunks * CHUNK)))
    return offer, PublishTerms(timeout=SECONDS), time.monotonic()


def test_nothing_is_hashed_before_somebody_has_room_for_it(
    fake: tuple[FakeSockets, PublisherLoop],
) -> None:
    (sockets, loop), chunks = fake, PUSH_CHUNKS // 2
    sockets.room = False
    loop.submit(*made(chunks), Reply())
    sockets.asleep()
    assert data_topic(MODEL) not in sockets.sent
    assert len(sockets.sent) == 1, "it is announced"
    sockets.room = True
    sockets.wake()
    sockets.asleep()
    assert sockets.sent.count(data_topic(MODEL)) == chunks


def test_other_threads_are_told_how_much_was_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_loop, "TICK", 0.01)
    machine, fake = PublisherMachine(PublisherState(7, "tcp://d:1")), FakeSockets()
    loop = PublisherLoop(machine, cast("PublisherSockets", fake))
    loop.start()
    fake.control.extend([(b"w", [b"nonsense"])] * 3)
    fake.wake()
    wait_for(lambda: loop.known.malformed == 3, "three malformed messages", SECONDS)
    loop.close()


def test_what_has_no_room_is_not_pushed_along_with_what_has(
    fake: tuple[FakeSockets, PublisherLoop],
) -> None:
    (sockets, loop), other = fake, "b"
    for model in (other, MODEL):  # there is room for MODEL alone
        loop.submit(*made(4, model), Reply())
        sockets.asleep()
    assert sockets.sent.count(data_topic(MODEL)) == 4
    assert data_topic(other) not in sockets.sent


def test_a_version_is_hashed_between_other_work(
    fake: tuple[FakeSockets, PublisherLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody asks for the whole of a large version: others are answered meanwhile."""
    (sockets, loop), chunks = fake, 20
    monkeypatch.setattr(offers, "SLICE_BYTES", CHUNK)
    sockets.room = False
    offer, terms, started = made(chunks)
    loop.submit(offer, terms, started, Reply())
    sockets.asleep()
    hashed: list[int] = []  # chunks that were hashed when a worker was answered

    def ping() -> None:
        hashed.append(chunks - len(list(offer.chunks.unhashed())))
        sockets.control.append((b"w", [encode(Ping(subscribed=True))]))

    take = offer.snapshot.bytes

    def taken(begin: int, end: int) -> Buffer:
        ping()
        return take(begin, end)

    monkeypatch.setattr(offer.snapshot, "bytes", taken)
    fetch = Fetch(model=MODEL, epoch=7, version=1)
    sockets.control.append((b"w", [encode(fetch)]))
    sockets.wake()
    sockets.asleep()
    assert hashed == list(range(chunks))
    kinds = [next(k for k in (b"announce", b"pong", b"end") if k in a) for a in sockets.answers]
    assert kinds.index(b"end") - kinds.index(b"announce") > chunks // 2
    assert offer.chunks.digest.encode() in sockets.answers[kinds.index(b"end")]


def test_any_number_of_names_that_find_no_room_is_a_line_in_the_log(
    fake: tuple[FakeSockets, PublisherLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sockets, _ = fake
    monkeypatch.setattr(roster, "WORKERS_MAX", 1)
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            hello = Hello(name=f"w{number}", instance="0" * 32, models={MODEL: None})
            sockets.control.append((b"%d" % number, [encode(hello)]))
        sockets.wake()
        sockets.asleep()
    assert len([a for a in sockets.answers if b'"limit"' in a]) == 50
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("worker w0 is refused (limit): the roster is full")


def test_a_reply_is_waited_for_and_what_it_fails_with_is_raised_each_time() -> None:
    reply = Reply()
    with pytest.raises(TimeoutError):
        reply.result(0.0)
    assert not reply.done()
    reply.set_exception(ClosedError("first"))
    reply.set_exception(ClosedError("second"))
    assert reply.done()
    for _ in range(2):
        with pytest.raises(ClosedError, match="first"):
            reply.result(0.0)


def test_whoever_waits_is_told_that_the_loop_has_ended(
    fake: tuple[FakeSockets, PublisherLoop],
) -> None:
    _, loop = fake
    reply, late = Reply(), Reply()
    loop.submit(*made(1), reply)
    loop.close()
    loop.submit(*made(1), late)
    with pytest.raises(ClosedError):
        late.result(SECONDS)
    with pytest.raises(PublishError, match="nothing heard of it yet"):
        reply.result(SECONDS)
