"""A worker comes back whatever is said at the publisher's address, or done to its connections.

`make conformance` does the same to workers in every language, at their own pace.
"""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.limits import Timing
from weightbus.bus.net import sub as subscription
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.conformance.proxy import Proxy
from weightbus.tests.conformance.rules import Channel, Passing, Spoil, Which, lose
from weightbus.tests.conformance.streams import HANDSHAKE, LATER, OTHERS

SECONDS = 30.0  # far more than anything here takes
CHANNELS: tuple[Channel, ...] = ("control", "data")


class Quick(Settings):
    """Short times, but for one: what brings a worker back here must be quicker than that."""

    @property
    def timing(self) -> Timing:
        timing = super().timing
        timing.deaf_after = 10 * SECONDS
        return timing


QUICK = Quick(ping=0.1, lost_after=0.4)
HERE = replace(QUICK, shared_memory=False)


class Scene:
    """A publisher behind a proxy, and as many workers as are wanted."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.proxy = Proxy(SECONDS)
        stack.callback(self.proxy.close)
        advertise = f"tcp://*:{self.proxy.data_port}"
        made = Publisher(settings=replace(HERE, advertise=advertise, chunk_bytes=1))
        self.publisher = stack.enter_context(made)
        self.proxy.lead_to(self.publisher.address, self.publisher.data_address)
        self.workers: list[Subscriber] = []

    def start(self, name: str) -> None:
        """Start a worker."""
        target = {"m": {"w": np.zeros(4, np.uint8)}}
        made = Subscriber(self.proxy.address, target, name=name, settings=QUICK)
        self.workers.append(self._stack.enter_context(made).start())

    def publish(self) -> None:
        """Publish, and wait until every worker runs it."""
        weights = {"w": np.ones(4, np.uint8)}
        self.publisher.publish_async("m", weights, require=0)
        for worker in self.workers:
            assert worker.wait_for_version("m", timeout=SECONDS), worker.name


def concerns(name: str, passing: Passing) -> bool:
    return passing.worker == name


def says_subscribed(name: str, passing: Passing) -> bool:
    return passing.worker == name and passing.header.get("subscribed") is True


@pytest.fixture(name="scene")
def _scene() -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(stack)


def test_something_else_answered_first(scene: Scene) -> None:
    scene.proxy.answers = list(OTHERS.values())
    for name in OTHERS:
        scene.start(name)
    scene.proxy.wait_knocks(len(OTHERS))
    scene.publish()
    assert not scene.proxy.answers


def test_bytes_of_handshakes_are_damaged(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "DIAL_SECONDS", 1.0)
    scene.proxy.spoils = [Spoil(channel, *how) for channel in CHANNELS for how in HANDSHAKE]
    for number in range(len(HANDSHAKE)):
        scene.start(f"w{number}")
    scene.publish()
    for worker in scene.workers:
        scene.proxy.wait_answered(partial(says_subscribed, worker.name))
    assert not scene.proxy.spoils


def test_bytes_of_control_connections_are_damaged(scene: Scene) -> None:
    for index in range(len(LATER)):
        scene.start(f"w{index}")
    for worker in scene.workers:  # sessions that have settled
        scene.proxy.wait_seen("pong", partial(concerns, worker.name), count=5)
    scene.proxy.rules = [lose(Which(("chunk",), channel="data"))]  # only control carries any
    for worker, how in zip(scene.workers, LATER, strict=True):
        assert scene.proxy.spoil(worker.name, Spoil("control", *how)) == 1
    scene.publish()


def test_a_user_is_told_that_nothing_published_comes(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        wrong = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        made = Publisher("tcp://127.0.0.1:0", settings=replace(HERE, advertise=wrong))
        publisher, target = stack.enter_context(made), {"w": np.zeros(4, np.uint8)}
        worker = Subscriber(publisher.address, {"m": target}, name="w", settings=QUICK)
        stack.enter_context(worker).start()
        publisher.wait_for_workers(1, timeout=SECONDS)
        publisher.publish("m", {"w": np.ones(4, np.uint8)}, timeout=SECONDS)
        wait_for(lambda: "nothing published has come" in caplog.text, "a warning", SECONDS)
        assert f"is {wrong} let through" in caplog.text
