"""How publishers and subscribers end: half made, dropped without close, and in forked children."""

import contextlib
import copy
import gc
import pickle
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import ClosedError, Publisher, PublishError, Subscriber
from weightbus.bus.net.control import WorkerSockets
from weightbus.bus.net.publisher_sockets import PublisherSockets
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address

SECONDS = 30.0  # far more than anything here takes


def descriptors() -> set[str]:
    """Return the descriptors of this process, and what each of them is."""
    found = set[str]()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{link.name} -> {link.readlink()}")
        except FileNotFoundError:  # that of this listing
            continue
    return found


def until_gone(before: set[str]) -> None:
    """Wait until no descriptor is left that was not there before."""
    deadline = time.monotonic() + SECONDS
    while more := descriptors() - before:
        assert time.monotonic() < deadline, more


def subscriber(address: str = "tcp://127.0.0.1:9", **options: object) -> Subscriber:
    return Subscriber(address, {"m": {"w": np.zeros(3)}}, **settled(options))


def cloudpickled(what: object) -> object:
    """Pickle as Ray does."""
    return pytest.importorskip("cloudpickle").dumps(what)


MAKES: list[Callable[..., object]] = [Publisher, subscriber]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("broken", ["argument", "thread", "socketpair", "selector"])
def test_one_that_cannot_be_made_leaves_nothing_behind(
    make: Callable[..., object], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError("too many")

    lacks: dict[str, tuple[Any, str]] = {
        "thread": (threading.Thread, "start"),
        "socketpair": (socket, "socketpair"),
        "selector": (selectors, "DefaultSelector"),
    }
    before = descriptors()
    if broken == "argument":
        with pytest.raises((AttributeError, TypeError, ValueError)):
            make(settings="soon")
    else:
        monkeypatch.setattr(*lacks[broken], none_left)
        with pytest.raises(OSError, match="too many"):
            make()
    gc.collect()  # hung, once
    until_gone(before)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("runs", [True, False], ids=["runs", "is about to run"])
def test_an_interrupt_as_its_thread_starts_closes_no_socket_under_it(
    make: Callable[..., object],
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ctrl-C, say: `start` waits for the thread to run, and raises what a handler does."""
    start = threading.Thread.start
    threads, closed_by = list[threading.Thread](), list[threading.Thread]()
    at_work = threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        threads.append(thread)
        if runs:
            start(thread)
            assert at_work.wait(SECONDS)
        raise KeyboardInterrupt

    def watch(kind: type) -> None:
        poll, close = vars(kind)["poll"], vars(kind)["close"]

        def polled(*arguments: Any, **more: Any) -> Any:
            at_work.set()
            return poll(*arguments, **more)

        def noted(sockets: object) -> None:
            closed_by.append(threading.current_thread())
            close(sockets)

        monkeypatch.setattr(kind, "poll", polled)
        monkeypatch.setattr(kind, "close", noted)

    before = descriptors()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    watch(WorkerSockets)
    watch(PublisherSockets)
    with pytest.raises(KeyboardInterrupt):
        make()
    (thread,) = threads
    if not runs:
        start(thread)
    thread.join(SECONDS)
    assert closed_by == [thread if runs else threading.current_thread()]
    assert not caplog.records
    gc.collect()
    until_gone(before)


@pytest.mark.usefixtures("uncollected")
def test_one_that_was_closed_goes_with_its_memory_as_its_user_lets_go() -> None:
    before = descriptors()

    def run() -> list[weakref.ref[object]]:
        with Publisher() as publisher, subscriber(publisher.address).start() as worker:
            publisher.wait_for_workers(1, timeout=SECONDS)
            publisher.publish("m", {"w": np.ones(3)}, timeout=SECONDS)
            return [weakref.ref(publisher), weakref.ref(worker)]

    left = run()
    until_gone(before)  # the segments, which the machines hold, and their threads to the last
    assert [each() for each in left] == [None, None]


def test_a_publisher_that_is_dropped_lets_go_of_its_address() -> None:
    address, before = lasting_address(), time.monotonic()
    publisher = Publisher(address)
    future = publisher.publish_async("m", {"w": np.ones(3)}, require=1, timeout=SECONDS)
    with pytest.warns(ResourceWarning, match="<Publisher at .* was dropped without close"):
        del publisher
    with pytest.raises(PublishError):
        future.result(SECONDS)
    assert time.monotonic() - before < SECONDS / 2
    Publisher(address).close()  # it waits for the one that is on its way out


def test_one_that_is_dropped_leaves(recwarn: pytest.WarningsRecorder) -> None:
    with Publisher() as publisher:
        before = descriptors()
        dropped = subscriber(publisher.address, name="dropped")
        assert dropped.wait_joined(SECONDS)
        del dropped
        until_gone(before)
        publisher.publish("m", {"w": np.ones(3)}, timeout=SECONDS)  # all that are there
    (warning,) = recwarn
    assert issubclass(warning.category, ResourceWarning)
    assert "<Subscriber dropped of" in str(warning.message)


def test_one_that_could_not_be_started_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with subscriber() as worker:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            worker.start()


def test_one_that_was_started_and_that_nobody_refers_to_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Publisher() as publisher:
        before = set(threading.enumerate())
        dropped = subscriber(publisher.address, name="dropped").start()
        publisher.publish("m", {"w": np.ones(3)}, expect=1, timeout=SECONDS)
        with pytest.warns(ResourceWarning, match="<Subscriber dropped of .* without close"):
            del dropped
        wait_for(lambda: not publisher.workers(), "it has left", SECONDS)
        wait_for(lambda: set(threading.enumerate()) <= before, "its threads end", SECONDS)
    assert "<Subscriber dropped of" in caplog.text, "Python shows no ResourceWarning by itself"


class Holder:
    """Has a subscriber, whose hook refers back to it."""

    def __init__(self, address: str, *, weak: bool) -> None:
        me: Callable[[], Any] = weakref.ref(self) if weak else lambda: self
        self.worker = subscriber(address, on_commit=lambda _: me()).start()


def test_a_hook_that_refers_to_its_subscriber_keeps_it_unless_weakly() -> None:
    with Publisher() as publisher:
        kept = weakref.ref(Holder(publisher.address, weak=False).worker)
        gc.collect()
        worker = kept()
        assert worker is not None
        worker.close()
        holder = Holder(publisher.address, weak=True)
        dropped = weakref.ref(holder.worker)
        with pytest.warns(ResourceWarning, match="without close"):
            del holder
        assert dropped() is None


@pytest.mark.parametrize("started", [True, False])
def test_a_worker_takes_the_place_of_one_of_its_name_in_this_process(
    started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A cell of a notebook that is run again, whose first result the notebook keeps."""
    models = [{"w": np.zeros(3)} for _ in range(2)]
    with Publisher() as publisher, contextlib.ExitStack() as undo:
        made = list[Subscriber]()
        for model in models:
            worker = Subscriber(publisher.address, {"m": model}, name="w")
            made.append(undo.enter_context(worker))
            if started:
                worker.start()
            assert worker.wait_joined(SECONDS)
        future = publisher.publish_async("m", {"w": np.ones(3)}, expect=1, timeout=SECONDS)
        if not started:
            assert made[1].receive(SECONDS)
        assert future.result(SECONDS).in_state("applied") == ["w"]
        with pytest.raises(ClosedError, match="'w' of this process has taken its place"):
            made[0].wait_joined(0)
    assert [float(model["w"][0]) for model in models] == [0, 1]
    assert "is closed: another Subscriber named 'w' of this process" in caplog.text


def test_a_dropped_publisher_that_waits_for_collection_lets_go_of_its_folder(
    tmp_path: Path,
) -> None:
    def drop() -> None:
        publisher: Any = Publisher(state=tmp_path)
        publisher.itself = publisher

    drop()
    with pytest.warns(ResourceWarning, match="dropped without close"):
        Publisher(state=tmp_path).close()


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickled, copy.copy])
def test_one_that_is_handed_to_another_process_says_what_to_hand_over(
    make: Callable[..., Any], dumps: Callable[[object], object]
) -> None:
    with make() as made, pytest.raises(TypeError, match="stays in its process") as told:
        dumps({"bus": made} if dumps is not copy.copy else made)
    assert made.address in str(told.value)
