"""Callbacks that are told what becomes of workers, and those that are slow, hang or raise."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest

from weightbus import ClosedError, Publisher, Settings, Subscriber
from weightbus.bus.net import callbacks
from weightbus.bus.net.callbacks import EventCallback
from weightbus.types import WorkerEvent

SECONDS = 60.0  # far more than anything here takes
QUICK = Settings(ping=0.1, lost_after=0.5)


def event(number: int) -> WorkerEvent:
    return WorkerEvent("joined", f"w{number}", f"worker w{number} joined", None)


class Heard:
    """A callback that keeps what it hears."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()

    def __call__(self, told: WorkerEvent) -> None:
        self.events.put(told)

    def until(self, kind: str) -> WorkerEvent:
        """Return the next event of a kind; others are passed over."""
        while (told := self.events.get(timeout=SECONDS)).kind != kind:
            pass
        return told


def subscriber(publisher: Publisher, name: str) -> Subscriber:
    made = Subscriber(publisher.address, {"m": {"w": np.zeros(4, np.float32)}}, name=name)
    assert made.wait_joined(SECONDS)
    return made


def test_what_happens_after_the_end_is_not_told() -> None:
    told: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
    busy, go_on = threading.Event(), threading.Event()

    def slow(heard: WorkerEvent) -> None:
        told.put(heard)
        busy.set()
        go_on.wait(SECONDS)

    listener = EventCallback(slow)
    listener.tell(event(1))
    assert busy.wait(SECONDS)
    listener.tell(event(2))
    listener.end()
    listener.tell(event(3))
    go_on.set()
    listener.join(SECONDS)
    assert [told.get().worker for _ in range(told.qsize())] == ["w1", "w2"]


def test_joining_and_leaving_are_heard_with_what_workers_shows() -> None:
    with Publisher() as publisher:
        first = subscriber(publisher, "w0")
        heard = Heard()
        stop = publisher.on_worker(heard)
        before = heard.until("joined")
        assert before.worker == "w0", "it was there before"
        assert before.status is not None
        assert before.status.state == "live"
        second = subscriber(publisher, "w1")
        assert heard.until("joined").worker == "w1"
        first.close()
        left = heard.until("left")
        assert (left.worker, left.status) == ("w0", None)
        assert "goodbye" in left.text
        stop()
        second.close()
        publisher.wait_for_workers(0, SECONDS)
    assert heard.events.empty()


def test_a_callback_that_raises_or_hangs_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    release, heard = threading.Event(), Heard()

    def raises(_told: WorkerEvent) -> None:
        raise SystemExit("no")

    def hangs(_told: WorkerEvent) -> None:
        release.wait(SECONDS)

    with caplog.at_level(logging.ERROR, "weightbus.publisher"), Publisher() as publisher:
        for callback in (raises, hangs, heard):
            publisher.on_worker(callback)
        made = [subscriber(publisher, f"w{i}").start() for i in range(3)]
        assert [heard.until("joined").worker for _ in made] == ["w0", "w1", "w2"]
        receipt = publisher.publish("m", {"w": np.ones(4, np.float32)}, timeout=SECONDS)
        assert receipt.in_state("applied") == ["w0", "w1", "w2"]
        for one in made:
            one.close()
        assert heard.until("left")
        release.set()
    assert "a callback of on_worker raised at: worker w0 joined" in caplog.text


def test_a_callback_may_ask_the_publisher() -> None:
    with Publisher() as publisher:
        seen: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        publisher.on_worker(lambda told: seen.put([told.worker, *publisher.workers()]))
        made = subscriber(publisher, "w0")
        assert seen.get(timeout=SECONDS) == ["w0", "w0"]
        made.close()


def test_a_callback_that_is_too_slow_misses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "EVENTS_MAX", 3)
    entered, release, heard = threading.Event(), threading.Event(), Heard()

    def slow(told: WorkerEvent) -> None:
        heard(told)
        entered.set()
        release.wait(SECONDS)

    listener = EventCallback(slow)
    listener.tell(event(0))
    assert entered.wait(SECONDS)
    for number in range(1, 8):
        listener.tell(event(number))
    release.set()
    listener.end()
    listener.join(SECONDS)
    told = [heard.events.get_nowait() for _ in range(heard.events.qsize())]
    assert [(e.worker, e.missed) for e in told] == [("w0", 0), ("w5", 4), ("w6", 0), ("w7", 0)]


def test_a_callback_may_end_itself_and_close_the_publisher() -> None:
    publisher = Publisher()
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    stops: list[Callable[[], None]] = []
    numbers = itertools.count()

    def ends(_told: WorkerEvent) -> None:
        stops[0]()
        publisher.close()
        done.put(f"closed {next(numbers)}")

    def waits(told: WorkerEvent) -> None:
        ready.wait(SECONDS)
        ends(told)

    ready = threading.Event()
    stops.append(publisher.on_worker(waits))
    ready.set()
    made = Subscriber(publisher.address, {"m": {"w": np.zeros(4, np.float32)}}, name="w0")
    assert done.get(timeout=SECONDS) == "closed 0"
    made.close()
    with pytest.raises(ClosedError):
        publisher.on_worker(ends)


def test_a_callback_may_close_the_publisher(caplog: pytest.LogCaptureFixture) -> None:
    publisher, closed = Publisher(), threading.Event()

    def closes(_told: WorkerEvent) -> None:
        publisher.close()
        closed.set()

    publisher.on_worker(closes)
    worker = Subscriber(publisher.address, {"m": {"w": np.zeros(4, np.float32)}})
    assert closed.wait(SECONDS)
    worker.close()
    assert "raised" not in caplog.text


def test_what_does_not_fit_is_heard_at_once_while_a_publish_waits_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = Heard()
    with Publisher() as publisher:
        publisher.on_worker(heard)
        with subscriber(publisher, "w0").start():
            future = publisher.publish_async(
                "m", {"w": np.zeros(5, np.float32)}, expect=2, timeout=SECONDS
            )
            failed = heard.until("failed")
            assert not future.done()
            assert failed.worker == "w0"
            assert "w: shape [5] published, [4] here" in failed.text
            assert failed.text in caplog.text
