"""Signal handlers that publish: in the middle of a publish by the thread that they interrupt."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher
from weightbus.bus.deadline import Deadline
from weightbus.python_client.publishing.models import PublishedModel
from weightbus.tests.client.test_bus import SECONDS

Weights = dict[str, np.ndarray[Any, Any]]


class Interrupted(Weights):
    """Weights that are interrupted by a signal as they are copied, once."""

    def items(self) -> Any:
        if not self.pop("interrupted", None):
            self["interrupted"] = np.zeros(1, np.float32)
            signal.raise_signal(signal.SIGUSR1)
            del self["interrupted"]
        return super().items()


def weights(value: float) -> Weights:
    return {"w": np.full(1000, value, np.float32)}


@contextmanager
def handled_by(handler: Callable[[], object]) -> Generator[list[BaseException | None]]:
    """Have a handler called for SIGUSR1; yield what each call raised, or None."""
    raised: list[BaseException | None] = []

    def handle(*_: object) -> None:
        try:
            handler()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield raised
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("outer", ["publish", "publish_async", "prepare"])
@pytest.mark.parametrize("inner", ["publish", "publish_async", "prepare"])
def test_a_handler_that_publishes_what_its_own_thread_copies_is_told_at_once(
    outer: str, inner: str
) -> None:
    with Publisher() as publisher:
        with handled_by(lambda: getattr(publisher, inner)("m", weights(2))) as raised:
            begun = time.monotonic()
            getattr(publisher, outer)("m", Interrupted(weights(1)))
            seconds = time.monotonic() - begun
        (error,) = raised
        assert isinstance(error, RuntimeError)
        for part in ("'m' is being copied", "this very thread", "Set a flag", "restarting.md"):
            assert part in str(error)
        assert seconds < 10.0, "the interrupted one goes on, within its own 60 s"
        publisher.publish("m", weights(3), timeout=SECONDS)


def test_a_handler_publishes_another_model_or_by_another_publisher() -> None:
    with Publisher() as publisher, Publisher() as other:

        def publish() -> None:
            publisher.publish("n", weights(2), timeout=SECONDS)
            other.publish("m", weights(2), timeout=SECONDS)

        with handled_by(publish) as raised:
            publisher.publish("m", Interrupted(weights(1)), timeout=SECONDS)
        assert raised == [None]


def test_a_handler_waits_for_another_thread_that_copies_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copying, waited = threading.Event(), threading.Event()
    wait = PublishedModel.wait_for_lock

    class Slow(Weights):
        def items(self) -> Any:
            copying.set()
            assert waited.wait(SECONDS)
            return super().items()

    def wait_for_lock(kept: PublishedModel, deadline: Deadline) -> None:
        waited.set()
        wait(kept, deadline)

    monkeypatch.setattr(PublishedModel, "wait_for_lock", wait_for_lock)
    with Publisher() as publisher, ThreadPoolExecutor(1) as other:
        slow = other.submit(publisher.publish, "n", Slow(weights(1)), timeout=SECONDS)
        assert copying.wait(SECONDS)
        with handled_by(lambda: publisher.publish("n", weights(2), timeout=SECONDS)) as raised:
            publisher.publish("m", Interrupted(weights(1)), timeout=SECONDS)
        assert raised == [None]
        assert slow.result(SECONDS).version == 1


def test_a_handler_publishes_while_the_same_thread_waits_for_a_receipt() -> None:
    """Its own publish has been copied by then."""
    with Publisher() as publisher:
        later = publisher.publish_async("m", weights(1), expect=1, timeout=SECONDS)
        with handled_by(lambda: publisher.publish("m", weights(2), timeout=SECONDS)) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert raised == [None]
        later.cancel()


def test_a_handler_publishes_while_its_thread_hands_a_publish_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which takes a lock for a moment; a handler in that moment stood still for ever."""

    interrupted = list[bool]()

    class Work(deque[Any]):
        def append(self, item: Any) -> None:
            if not interrupted:
                interrupted.append(True)
                signal.raise_signal(signal.SIGUSR1)
            super().append(item)

    with Publisher() as publisher:
        publish = publisher.publish_async
        with handled_by(lambda: publish("n", weights(2), timeout=SECONDS)) as raised:
            monkeypatch.setattr(vars(publisher)["_loop"], "_work", Work())
            publisher.publish("m", weights(1), timeout=SECONDS)
        assert raised == [None]
