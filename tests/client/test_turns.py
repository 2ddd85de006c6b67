"""While a thread waits in `receive`, the worker's own applies a small version in its stead."""

import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus import ApplyError, Subscriber
from weightbus.bus.net.copier import AT_ONCE_BYTES
from weightbus.bus.staged import StagedVersion
from weightbus.python_client.applying.applier import Applier
from weightbus.python_client.applying.targets import MemoryTarget
from weightbus.python_client.observing.traces import SDK
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays
from weightbus.tests.compose.waiting import wait_for
from weightbus.types import Update

WORKERS = "weightbus-worker"
LARGE = AT_ONCE_BYTES // 4 + 1  # numbers
HOOK: Callable[[object], None] = lambda _: None  # noqa: E731


@pytest.fixture
def bus() -> Any:
    made = Bus(shared_memory=False)
    yield made
    made.close()


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In which threads versions are applied, one after another."""
    monkeypatch.delitem(sys.modules, SDK, raising=False)  # a test before may have imported it
    threads, apply = list[str](), Applier._apply  # noqa: SLF001 # pyright: ignore

    def seen(*arguments: Any, **how: Any) -> Update | None:
        threads.append(threading.current_thread().name)
        return apply(*arguments, **how)

    monkeypatch.setattr(Applier, "_apply", seen)
    return threads


def waiting(subscriber: Subscriber) -> bool:
    return bool(subscriber._ready_queue._waiters)  # noqa: SLF001 # pyright: ignore


def received(
    bus: Bus, weights: dict[str, Any], target: object, **options: Any
) -> tuple[Update | None, object]:
    """Publish once a thread named `user` waits for it; return what it got, and what it has."""
    publisher, got = bus.publisher(), list[Update | None]()
    subscriber = bus.subscriber(publisher, target, **options)
    user = threading.Thread(target=lambda: got.append(subscriber.receive(SECONDS)), name="user")
    user.start()
    wait_for(lambda: waiting(subscriber), "it waits", SECONDS)
    receipt = publisher.publish("m", weights, timeout=SECONDS)
    user.join(SECONDS)
    assert len(receipt.in_state("applied")) == 1
    return got[0], target


def test_a_small_version_needs_no_other_thread(bus: Bus, where: list[str]) -> None:
    update, target = received(bus, arrays(1), arrays(0))
    assert update is not None
    assert (update.version, update.nbytes) == (1, 4000)
    assert isinstance(target, dict)
    assert (target["w"] == 1).all()
    assert where == [WORKERS]


@pytest.mark.parametrize("kind", ["large", "on_commit", "before_apply", "file", "function"])
def test_what_may_take_long_is_applied_by_whoever_waits(
    bus: Bus, where: list[str], tmp_path: Path, kind: str
) -> None:
    size = LARGE if kind == "large" else 1000
    target: object = arrays(0, size)
    target = {"file": tmp_path / "m", "function": HOOK}.get(kind, target)
    options = {kind: HOOK} if kind in ("on_commit", "before_apply") else {}
    update, _ = received(bus, arrays(1, size), target, **options)
    assert update is not None
    assert where == ["user"]


def test_where_spans_are_made_the_context_is_that_of_whoever_waits(
    bus: Bus, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, SDK, importlib.import_module(SDK))
    update, _ = received(bus, arrays(1), arrays(0))
    assert update is not None
    assert where == ["user"]


def test_while_somebody_reads_it_is_left_for_whoever_waits(bus: Bus, where: list[str]) -> None:
    publisher, target = bus.publisher(), arrays(0)
    subscriber = bus.subscriber(publisher, target)
    with ThreadPoolExecutor(thread_name_prefix="user") as pool:
        with subscriber.reading():
            update = pool.submit(subscriber.receive, SECONDS)
            wait_for(lambda: waiting(subscriber), "it waits", SECONDS)
            future = publisher.publish_async("m", arrays(1), timeout=SECONDS)
            wait_for(lambda: not waiting(subscriber), "it has come", SECONDS)
            assert not where
            assert (target["w"] == 0).all()
        assert update.result(SECONDS) is not None
        assert future.result(SECONDS).in_state("applied") == [subscriber.name]
    assert where == ["user_0"]


def test_what_goes_wrong_is_raised_by_the_call_that_waits(
    bus: Bus, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, target = bus.publisher(), arrays(0)
    subscriber, apply = bus.subscriber(publisher, target), MemoryTarget.apply

    def fails(self: MemoryTarget, staged: StagedVersion) -> None:
        if staged.version == 1:
            raise OSError("no more of it")
        apply(self, staged)

    monkeypatch.setattr(MemoryTarget, "apply", fails)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(subscriber.receive, SECONDS)
        wait_for(lambda: waiting(subscriber), "it waits", SECONDS)
        publisher.publish_async("m", arrays(1))
        with pytest.raises(ApplyError, match="no more of it"):
            first.result(SECONDS)
        second = pool.submit(subscriber.receive, SECONDS)
        wait_for(lambda: waiting(subscriber), "it waits", SECONDS)
        assert publisher.publish("m", arrays(2), timeout=SECONDS).version == 2
        update = second.result(SECONDS)
    assert update is not None
    assert (update.version, float(target["w"][0])) == (2, 2.0)
    assert set(where) == {WORKERS}


def test_nothing_changes_after_a_call_has_returned(bus: Bus) -> None:
    """Its time is over just as versions come: what it has not returned is applied by the next."""
    publisher, target = bus.publisher(), {"w": np.zeros(1000, np.float32)}
    subscriber = bus.subscriber(publisher, target)
    with ThreadPoolExecutor() as pool:
        published = pool.submit(
            lambda: [publisher.publish("m", arrays(n), timeout=SECONDS) for n in range(1, 301)]
        )
        runs = 0
        while runs < 300:
            update = subscriber.receive(0.0005)
            runs = update.version if update is not None else runs
            assert (target["w"] == runs).all()
        assert [receipt.version for receipt in published.result(SECONDS)] == [*range(1, 301)]
