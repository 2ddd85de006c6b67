"""What other threads know of a publisher is a record that never changes: none reads its machine."""

import asyncio
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, PublishError, Settings, Subscriber, WorkersMissingError
from weightbus.bus.deadline import Deadline
from weightbus.bus.messages import DELTA
from weightbus.bus.net.callbacks import WorkerEvent
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.observers import Observers
from weightbus.bus.publisher.publication import Publication, Recipient
from weightbus.bus.publisher.publisher_view import PublisherView, ReachableWorker
from weightbus.bus.publisher.push import Push
from weightbus.bus.publisher.roster import Delivery, Link, ObserverRecord, Peer, Roster
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.store import Versions
from weightbus.bus.publisher.verifying import Checks
from weightbus.bus.publisher.version import Version
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0
OWNER = "weightbus-publisher"  # the thread
OWNED = (
    *(PublisherMachine, PublisherState, Roster, Peer, Delivery, Link, ObserverRecord),
    *(Versions, Version, Publication, Recipient, Push, Observers, Checks),
)
SIZE = 200_000  # numbers in a model: more than goes along with an announcement
QUICK = Settings(ping=0.1, lost_after=5.0, encoding="delta")


def weights(value: float, size: int = SIZE) -> dict[str, np.ndarray]:
    made = np.zeros(size, np.float32)
    made[0] = value
    return {"w": made}


class Guard:
    """Lets the publisher's thread alone read what a machine consists of, once it has begun to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = False
        self.trespasses: list[str] = []
        for owned in OWNED:
            monkeypatch.setattr(owned, "__getattribute__", self.watched(owned), raising=False)

    def watched(self, owned: type) -> Callable[[object, str], Any]:
        def read(this: object, name: str) -> Any:
            reader = threading.current_thread().name
            self.begun |= reader == OWNER
            others = self.begun and reader != OWNER and not name.startswith("__")
            if others and _is_owned(this):
                self.trespasses.append(f"{reader} reads {owned.__name__}.{name}")
                raise AssertionError(self.trespasses[-1])
            return object.__getattribute__(this, name)

        return read


def _is_owned(this: object) -> bool:
    """Return whether that is the machine's: a version is from when it has a number."""
    if type(this) is not Version:
        return True
    return object.__getattribute__(this, "__dict__").get("version", 0) > 0


class Asked:
    """A publisher that is asked, in turn, for everything that it offers, beside workers."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher, self.told = publisher, list[WorkerEvent]()

    def prepare(self) -> None:
        self.publisher.prepare("m", weights(0.0))

    def on_worker(self) -> None:
        stop = self.publisher.on_worker(self.told.append)
        wait_for(lambda: len(self.told) >= 2, "word of both workers", SECONDS)
        stop()

    def publish(self) -> None:
        for value in range(1, 5):
            receipt = self.publisher.publish("m", weights(value), timeout=SECONDS)
            assert receipt.in_state("applied") == ["far", "near"]
            self.publisher.publish("n", weights(value, 4), timeout=SECONDS)
        assert receipt.workers["far"].encoding == DELTA
        self.publisher.publish("m", weights(5.0), workers=["far"], timeout=SECONDS)

    def publish_many(self) -> None:
        both = {"m": weights(5.5), "n": weights(5.5, 4)}
        receipts = self.publisher.publish_many(both, timeout=SECONDS)
        assert receipts.in_state("applied") == ["far", "near"]

    def models(self) -> None:
        assert sorted(self.publisher.models) == ["m", "n"]

    def parts(self) -> None:
        deadline = Deadline(time.monotonic() + SECONDS, "late")
        assert self.publisher.parts.next_key("m", deadline)[0] == self.publisher.epoch

    def publish_async(self) -> None:
        future = self.publisher.publish_async("m", weights(6.0), timeout=SECONDS)
        assert future.result(SECONDS).in_state("applied") == ["far", "near"]

    def wait_for_commit(self) -> None:
        future = self.publisher.publish_async("m", weights(7.0), commit="together", timeout=SECONDS)
        assert self.publisher.wait_for_commit(future, SECONDS) is not None
        receipt = future.result(SECONDS)
        key = receipt.epoch, receipt.version
        assert self.publisher.wait_for_commit(future, 0.0) == key, "it is known at once"

    def publish_awaitable(self) -> None:
        asyncio.run(self.publisher.publish_awaitable("m", weights(8.0), timeout=SECONDS))

    def workers(self) -> None:
        assert sorted(self.publisher.workers()) == ["far", "near"]

    def wait_for_workers(self) -> None:
        self.publisher.wait_for_workers(2, SECONDS, model="m")
        with pytest.raises(WorkersMissingError, match="2 of 3"):
            self.publisher.wait_for_workers(3, 0.0)

    def wait_for_workers_awaitable(self) -> None:
        asyncio.run(self.publisher.wait_for_workers_awaitable(2, SECONDS))

    def give_up(self) -> None:
        publishing = self.publisher.publish_async(
            "m", weights(8.0), commit="together", expect=3, timeout=SECONDS
        )
        self.publisher.give_up(publishing, "it is not wanted")
        with pytest.raises(PublishError, match="it is not wanted"):
            publishing.result(SECONDS)

    def described(self) -> None:
        assert self.publisher.described({"w": ("F32", (2,))}) == {"w": ("F32", (2,))}

    def history(self) -> None:
        wait_for(lambda: len(self.publisher.history("m")) > 1, "older versions", SECONDS)

    def rollback(self) -> None:
        older = self.publisher.history("m")[-1]
        self.publisher.rollback("m", older.key, timeout=SECONDS)

    def epoch(self) -> None:
        assert str(self.publisher.epoch) in repr(self.publisher)

    def shown(self) -> None:
        shown = self.publisher.shown
        for page in (shown.metrics, shown.dashboard, shown.dashboard + "state"):
            with urllib.request.urlopen(page, timeout=SECONDS) as answer:  # noqa: S310 - ours
                assert answer.status == 200

    def address(self) -> None:
        assert self.publisher.address != self.publisher.data_address

    data_address = address

    def close_awaitable(self) -> None:
        asyncio.run(self.publisher.close_awaitable())

    def close(self) -> None:
        self.publisher.close()


@contextmanager
def workers_of(publisher: Publisher) -> Iterator[None]:
    def models() -> dict[str, dict[str, np.ndarray]]:
        return {"m": weights(0.0), "n": weights(0.0, 4)}

    far = Settings(ping=0.1, lost_after=5.0, shared_memory=False)
    with (
        Subscriber(publisher.address, models(), name="near").start(),
        Subscriber(publisher.address, models(), name="far", settings=far).start(),
    ):
        publisher.wait_for_workers(2, SECONDS)
        yield


def test_no_other_thread_reads_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, where = Guard(monkeypatch), "127.0.0.1:0"
    publisher = Publisher(state=tmp_path, history=3, dashboard=where, metrics=where, settings=QUICK)
    asked = Asked(publisher)
    with publisher, workers_of(publisher):
        for name in [name for name in vars(Asked) if not name.startswith("_")]:
            getattr(asked, name)()
    assert guard.begun
    assert not guard.trespasses


def test_all_that_a_publisher_offers_is_asked_for() -> None:
    offered = {name for name in dir(Publisher) if not name.startswith("_")}
    assert offered | {"shown", "parts", "address", "data_address"} == {
        name for name in vars(Asked) if not name.startswith("_")
    }


def test_a_trespass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(monkeypatch)
    with Publisher(settings=QUICK) as publisher:
        publisher.workers()
        machine = publisher._loop._machine  # noqa: SLF001 # pyright: ignore
        with pytest.raises(AssertionError, match=r"MainThread reads PublisherMachine\.state"):
            _ = machine.state
        assert len(guard.trespasses) == 1


def test_publishing_changes_nothing_that_others_know() -> None:
    with Publisher(settings=QUICK) as publisher, workers_of(publisher):
        loop = publisher._loop  # noqa: SLF001 # pyright: ignore
        wait_for(lambda: len(loop.known.reached) == 2, "both to hear of versions", SECONDS)
        before = loop.known
        for value in range(3):
            publisher.publish("m", weights(value), timeout=SECONDS)
        assert loop.known is before, "it is not made again for a version"


def test_it_says_who_hears_what_is_published() -> None:
    near, far = (
        ReachableWorker("near", frozenset("ab"), True),
        ReachableWorker("far", frozenset("b"), False),
    )
    known = PublisherView(1, (near, far), "", 0)
    with pytest.raises(FrozenInstanceError):
        known.epoch = 2  # type: ignore[misc]
    assert known.sends("a", None, shared=False)
    assert not known.sends("a", None, shared=True)
    assert known.sends("b", None, shared=True)
    assert not known.sends("b", ("near",), shared=True)
    assert not known.sends("c", None, shared=False)
