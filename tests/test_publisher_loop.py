"""The publisher's thread: what it pushes when."""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import cast

import pytest

from weightbus.bus.limits import PUSH_CHUNKS
from weightbus.bus.messages import Buffer, Hello, Ping, data_topic, encode
from weightbus.bus.net import publisher_loop
from weightbus.bus.net.control import Activity, PublisherSockets
from weightbus.bus.net.publisher_loop import PublisherLoop
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import Publication
from weightbus.bus.publisher.version import Version
from weightbus.codecs.layout import Layout
from weightbus.tests.virtual_shell import PlainSnapshot

SECONDS = 30.0  # far more than anything here takes
CHUNK = 2**20  # bytes: a burst, so that one chunk goes at a time
MODEL = "a"


class Road:
    """Sockets that are none; a test says whether there is room, and knows when the thread waits."""

    def __init__(self) -> None:
        self.room = True
        self.sent: list[bytes] = []  # topics
        self.waits = threading.Semaphore(0)  # released whenever the thread would sleep
        self._bell = threading.Event()

    def poll(self, seconds: float) -> Activity:
        if seconds > 0 and not self._bell.is_set():
            self.waits.release()
            self._bell.wait(seconds)
        self._bell.clear()
        return Activity(control=False, data=False)

    def keep_up(self, topic: bytes) -> bool:
        return self.room and topic == data_topic(MODEL)

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        self.sent.append(bytes(frames[0]))

    def withdraw(self, topics: Collection[bytes]) -> None:
        pass

    def wake(self) -> None:
        self._bell.set()

    def close(self) -> None:
        pass

    def asleep(self) -> None:
        """Wait until the thread has done all that it could."""
        assert self.waits.acquire(timeout=SECONDS)


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Road, PublisherLoop]]:
    monkeypatch.setattr(publisher_loop, "TICK", 1e6)  # ticks once, at the beginning
    machine, road = PublisherMachine(7, "tcp://d:1"), Road()
    hello = Hello(name="w", instance="0" * 32, models={MODEL: None, "b": None})
    for message in (hello, Ping(subscribed=True)):
        machine.receive(b"w", [encode(message)], time.monotonic())
    loop = PublisherLoop(machine, cast("PublisherSockets", road))
    road.asleep()
    yield road, loop
    loop.close()


def publication(chunks: int, model: str = MODEL, id_: int = 1) -> Publication:
    layout = Layout.plan([("w", "U8", (chunks * CHUNK,))])
    version = Version(model, layout, CHUNK, PlainSnapshot(bytes(chunks * CHUNK)))
    now = time.monotonic()
    return Publication(id_, version, None, None, "applied", "auto", now, now + SECONDS)


def test_nothing_is_hashed_before_somebody_has_room_for_it(
    road: tuple[Road, PublisherLoop],
) -> None:
    (sockets, loop), chunks = road, PUSH_CHUNKS // 2
    sockets.room = False
    loop.submit(publication(chunks))
    sockets.asleep()
    assert data_topic(MODEL) not in sockets.sent
    assert len(sockets.sent) == 1, "it is announced"
    sockets.room = True
    sockets.wake()
    sockets.asleep()
    assert sockets.sent.count(data_topic(MODEL)) == chunks


def test_what_has_no_room_is_not_pushed_along_with_what_has(
    road: tuple[Road, PublisherLoop],
) -> None:
    (sockets, loop), other = road, "b"
    for model, id_ in ((other, 1), (MODEL, 2)):  # there is room for MODEL alone
        loop.submit(publication(4, model, id_))
        sockets.asleep()
    assert sockets.sent.count(data_topic(MODEL)) == 4
    assert data_topic(other) not in sockets.sent
