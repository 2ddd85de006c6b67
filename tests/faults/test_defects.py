"""What one message, event or effect breaks in a worker costs that one alone: later versions apply.

Each place fails once, by an exception that no part of the code expects; then again for want of
memory.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.bus import effects
from weightbus.bus.effects import Effect
from weightbus.bus.net.worker_loop import WorkerLoop
from weightbus.bus.worker.follower import Follower
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.transfer import Transfer
from weightbus.bus.worker.version_store import VersionStore

SECONDS = 30.0
QUICK_SECONDS = 20.0  # for one version, of which the first may fail
SIZE = 3 * 2**20  # copied by another thread
CHUNK = 2**18
ERRORS = [ZeroDivisionError("boom"), MemoryError("boom")]


class Failing:
    """A function that fails the n-th time that it is called, and does its work otherwise."""

    def __init__(self, function: Callable[..., Any], error: Exception, *, after: int) -> None:
        self._function, self._error, self._left = function, error, after
        self.failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self.failed = True
            raise self._error
        return self._function(*args, **kwargs)

    def __get__(self, instance: object, _owner: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)


class Scene:
    """A bus of one worker."""

    def __init__(self, *, shared: bool) -> None:
        few = Settings(ping=0.05, lost_after=2.0, shared_memory=shared, chunk_bytes=CHUNK)
        self.publisher = Publisher(settings=few)
        self.target = {"w": np.zeros(SIZE, np.uint8)}
        own = Settings(ping=0.05, lost_after=2.0, shared_memory=shared)
        self.worker = Subscriber(self.publisher.address, {"m": self.target}, settings=own)
        self.worker.start()

    def close(self) -> None:
        self.worker.close()
        self.publisher.close()

    def publish(self, value: int, **about: Any) -> None:
        weights = {"w": np.full(SIZE, value, np.uint8)}
        self.publisher.publish_async("m", weights, timeout=SECONDS, **about)

    def goes_on(self) -> None:
        """Publish until a version is applied after all, whatever has become of those before."""
        deadline, applied = time.monotonic() + SECONDS, False
        while not applied:
            self.publisher.wait_for_workers(1, SECONDS)
            assert time.monotonic() < deadline, "no version is applied"
            weights = {"w": np.full(SIZE, 9, np.uint8)}
            with contextlib.suppress(PublishError):  # it may be the one that fails
                self.publisher.publish("m", weights, timeout=QUICK_SECONDS)
                applied = True
        with self.worker.reading():
            assert self.target["w"].min() == self.target["w"].max() == 9
        assert self.worker._ready_queue.failure is None  # noqa: SLF001 # pyright: ignore


@pytest.fixture(name="scene", params=[False, True], ids=["network", "shared memory"])
def _scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(shared=request.param)
    yield scene
    scene.close()


PLACES: list[tuple[type, str, int]] = [
    *((WorkerMachine, name, n) for name in ("receive", "receive_published") for n in (1, 2, 5)),
    *((WorkerMachine, name, 1) for name in ("tick", "happened", "place")),
    *((Follower, name, 1) for name in ("announced", "chunk", "end", "tick", "repeat", "happened")),
    *((Follower, name, 1) for name in ("_begin", "_reserve", "_receive", "_arrived", "_commit")),
    *((Follower, name, 1) for name in ("_applied", "reconnected", "report_running")),
    *((VersionStore, name, 1) for name in ("expect", "reuse", "give", "hear")),
    *((VersionStore, "move", n) for n in range(1, 7)),
    *((Transfer, name, n) for name in ("store", "wants", "end", "lend") for n in (1, 2)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("owner", "name", "after"), PLACES)
def test_a_defect_of_the_machine_costs_one_message(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    owner: type,
    name: str,
    after: int,
) -> None:
    scene = Scene(shared=False)
    try:
        scene.publisher.wait_for_workers(1, SECONDS)
        failing = Failing(getattr(owner, name), error, after=after)
        with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            scene.publish(1)
            scene.publish(2)
            scene.goes_on()
        assert not failing.failed or "boom" in caplog.text
    finally:
        scene.close()


EFFECTS = [
    each
    for each in vars(effects).values()
    if isinstance(each, type) and each.__module__ == effects.__name__
]


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("effect", EFFECTS, ids=lambda each: each.__name__)
def test_an_effect_that_fails_costs_that_effect(
    monkeypatch: pytest.MonkeyPatch, scene: Scene, effect: type[Effect], after: int
) -> None:
    do, left = vars(WorkerLoop)["_do"], after

    def failing(loop: WorkerLoop, wanted: Effect) -> None:
        nonlocal left
        if isinstance(wanted, effect):
            left -= 1
            if left == 0:
                raise ZeroDivisionError("boom")
        do(loop, wanted)

    scene.publisher.wait_for_workers(1, SECONDS)
    monkeypatch.setattr(WorkerLoop, "_do", failing)
    scene.publish(1, settings=Settings(wait="staged"))
    scene.publish(2)
    scene.goes_on()


@pytest.mark.parametrize(
    ("effect", "shared"),
    [(effects.Reserve, False), (effects.Ready, False), (effects.Open, True), (effects.Copy, True)],
    ids=["memory", "hand-over", "segment", "copy"],
)
def test_what_waits_for_an_effect_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, effect: type[Effect], shared: bool
) -> None:
    """The same version: no later one takes its place."""
    do, failed = vars(WorkerLoop)["_do"], threading.Event()

    def failing(loop: WorkerLoop, wanted: Effect) -> None:
        if isinstance(wanted, effects.Reserve) and wanted.key is None:
            return  # of memory ahead of the first version, which would then need none
        probe = isinstance(wanted, effects.Open) and not wanted.model
        if isinstance(wanted, effect) and not probe and not failed.is_set():
            failed.set()
            raise ZeroDivisionError("boom")
        do(loop, wanted)

    monkeypatch.setattr(WorkerLoop, "_do", failing)
    scene = Scene(shared=shared)
    try:
        scene.publisher.wait_for_workers(1, SECONDS)
        scene.publish(1, settings=Settings(wait="staged"))
        assert failed.wait(SECONDS)
        assert scene.worker.wait_for_version("m", 1, timeout=SECONDS)
        with scene.worker.reading():
            assert scene.target["w"].min() == scene.target["w"].max() == 1
    finally:
        scene.close()


def test_what_fails_again_and_again_is_warned_of_now_and_then(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tick, left = vars(WorkerMachine)["tick"], 10

    def failing(machine: WorkerMachine, now: float) -> list[Effect]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ZeroDivisionError("boom")
        found: list[Effect] = tick(machine, now)
        return found

    scene.publisher.wait_for_workers(1, SECONDS)
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(WorkerMachine, "tick", failing)
        scene.publish(1)
        scene.goes_on()
        deadline = time.monotonic() + SECONDS
        while left >= 0:
            assert time.monotonic() < deadline
            scene.goes_on()
    told = [r for r in caplog.records if r.name == "weightbus.worker" and "boom" in r.message]
    assert 1 <= len(told) <= 2
