"""A version is staged on arrival, and applied when the user says so: `Subscriber.stage`."""

import gc
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from weightbus import (
    ApplyError,
    ClosedError,
    Publisher,
    PublishError,
    Settings,
    TornError,
    UnchangedError,
)
from weightbus.bus.limits import BUFFERS_MAX
from weightbus.bus.worker.events import LoopEvent, Wanted
from weightbus.codecs import device_memory
from weightbus.codecs.layout import Layout
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays
from weightbus.tests.compose.waiting import wait_for
from weightbus.types import Pairs

QUICK = Settings(ping=0.05, lost_after=SECONDS)


def together(publisher: Publisher, weights: object, **options: Any) -> Any:
    return publisher.publish_async(
        "m", weights, commit="together", timeout=options.pop("timeout", SECONDS), **options
    )


def test_nothing_changes_before_it_is_applied_and_nothing_newer_takes_its_place(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target)
    no_wait = Settings(wait="none")
    publisher.publish("m", arrays(1), settings=no_wait)
    with worker.stage(SECONDS, version=1) as staged:
        assert (staged.model, staged.epoch, staged.version) == ("m", publisher.epoch, 1)
        publisher.publish("m", arrays(2), settings=no_wait)
        assert (target["w"] == 0).all()
        update = staged.apply(SECONDS)
        assert update is not None
        assert (update.version, float(target["w"][0])) == (1, 1.0)
        assert staged.apply(0) == update, "again: it runs already"
    with pytest.raises(RuntimeError, match=r"version 1 .* was released"):
        staged.apply(SECONDS)
    after = worker.receive(SECONDS)
    assert after is not None
    assert after.version == 2


@pytest.fixture
def undecided(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """A publisher, a worker `a` with its weights, and a worker `b` that stages nothing yet."""
    publisher, weights, go_on = bus.publisher(), arrays(0), threading.Event()
    worker = bus.subscriber(publisher, weights, name="a")
    slow = bus.subscriber(publisher, arrays(0), name="b")
    target = slow._targets["m"]  # noqa: SLF001 # pyright: ignore
    fault = target.fault

    def faulty(layout: Layout) -> str:
        assert go_on.wait(SECONDS)
        return fault(layout)

    monkeypatch.setattr(target, "fault", faulty)
    yield publisher, worker, weights, slow, go_on
    go_on.set()


def test_published_together_it_is_staged_and_waits_for_the_decision(undecided: Any) -> None:
    publisher, worker, weights, slow, go_on = undecided
    receipt = together(publisher, arrays(1))
    with (
        worker.stage(SECONDS, version=(publisher.epoch, 1)) as staged,
        ThreadPoolExecutor() as pool,
    ):
        assert staged.apply(0) is None, "one of two has staged it"
        assert (weights["w"] == 0).all()
        go_on.set()
        assert slow.stage(SECONDS, version=1).version == 1
        applying = pool.submit(slow.receive, SECONDS)
        assert staged.apply(SECONDS).version == 1
        assert applying.result(SECONDS).version == 1
    assert sorted(receipt.result(SECONDS).in_state("applied")) == ["a", "b"]
    assert (weights["w"] == 1).all()


def test_it_is_told_that_the_publisher_has_given_it_up(undecided: Any) -> None:
    publisher, worker, weights, _, _ = undecided
    receipt = together(publisher, arrays(1), timeout=1.0)
    with worker.stage(SECONDS, version=(publisher.epoch, 1)) as staged:
        assert isinstance(receipt.exception(SECONDS), PublishError)
        with pytest.raises(ApplyError, match="aborted") as caught:
            staged.apply(SECONDS)
    assert caught.value.code == "gone"
    assert (weights["w"] == 0).all()


def test_what_does_not_fit_is_told_when_it_is_staged(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target)
    publisher.publish("m", arrays(1, size=3), require=0, settings=Settings(wait="none"))
    with pytest.raises(ApplyError, match=r"shape|differ"):
        worker.stage(SECONDS, version=1)
    with pytest.raises(TimeoutError, match=r"m version 2 .* has not arrived after 0 s"):
        worker.stage(0.0, version=2)
    publisher.publish("m", arrays(1), settings=Settings(wait="none"))
    assert worker.receive(SECONDS) is not None


def test_one_of_a_model_is_staged_at_a_time(bus: Bus) -> None:
    publisher = bus.publisher()
    worker = bus.subscriber(publisher, arrays(0))
    publisher.publish("m", arrays(1), settings=Settings(wait="none"))
    staged = worker.stage(SECONDS, version=1)
    for again in (worker.stage, worker.receive):
        with pytest.raises(RuntimeError, match=r"version 1 of epoch .* release "):
            again(0, version=2)
    staged.release()
    staged.release()
    assert worker.receive(SECONDS, version=1) is not None


def test_the_end_of_one_does_not_end_what_is_staged_next(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, told = bus.publisher(), list[object]()
    worker = bus.subscriber(publisher, arrays(0))
    publisher.publish("m", arrays(1), settings=Settings(wait="none"))
    staged = worker.stage(SECONDS, version=1)
    applier = worker._applier  # noqa: SLF001 # pyright: ignore
    tell = applier._tell  # noqa: SLF001 # pyright: ignore

    def telling(event: LoopEvent) -> None:
        if isinstance(event, Wanted):
            told.append(event.key)
            with pytest.raises(RuntimeError, match="release that version first"):
                worker.stage(0.0, version=2)
        tell(event)

    monkeypatch.setattr(applier, "_tell", telling)
    staged.release()
    assert told == [None]


def test_one_that_is_forgotten_keeps_nothing_newer_out(bus: Bus) -> None:
    publisher = bus.publisher()
    worker = bus.subscriber(publisher, arrays(0))
    publisher.publish("m", arrays(1), settings=Settings(wait="none"))
    assert worker.stage(SECONDS, version=1) is not None
    gc.collect()
    publisher.publish("m", arrays(2), settings=Settings(wait="none"))
    wait_for(lambda: (u := worker.receive(SECONDS)) is not None and u.version == 2, "2", SECONDS)


def test_a_closed_worker_applies_nothing(bus: Bus) -> None:
    publisher, target = bus.publisher(), arrays(0)
    worker = bus.subscriber(publisher, target)
    publisher.publish("m", arrays(1), settings=Settings(wait="none"))
    staged = worker.stage(SECONDS, version=(publisher.epoch, 1))
    worker.close()
    with pytest.raises(ClosedError):
        staged.apply(SECONDS)
    staged.release()
    assert (target["w"] == 0).all()
    with pytest.raises(ClosedError):
        worker.stage(SECONDS, version=1)


def test_a_function_that_failed_half_way_may_be_told_to_try_again(bus: Bus) -> None:
    fails, loaded = [OSError("half-way")], list[float]()

    def load(pairs: Pairs) -> None:
        if fails:
            raise fails.pop()
        loaded.extend(float(array[0]) for _, array in pairs.arrays())

    publisher = bus.publisher(settings=QUICK)
    worker = bus.subscriber(publisher, load, settings=QUICK)
    publisher.publish("m", arrays(1), require=0, settings=Settings(wait="none"))
    with worker.stage(SECONDS, version=1) as staged:
        with pytest.raises(TornError, match="half-way"):
            staged.apply(SECONDS)
        assert staged.apply(SECONDS) is not None
    assert loaded == [1.0]


def test_a_device_is_to_copy_from_each_buffer_directly_and_is_told_so_once(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = list[int]()

    def pin(data: np.ndarray[Any, Any], device: torch.device, *, whole: bool) -> object:
        assert device == torch.device("cuda:1")
        assert whole, "the function's copies cannot be cut where pieces end"
        pinned.append(data.ctypes.data)
        return object()

    monkeypatch.setattr(device_memory, "pinned", pin)
    publisher, addresses = bus.publisher(), list[int]()

    def load(pairs: Pairs) -> None:
        addresses.append(dict(pairs.arrays())["w"].ctypes.data)

    worker = bus.subscriber(publisher, load)
    for number in range(1, 7):
        receipt = together(publisher, arrays(number))
        with worker.stage(SECONDS, version=(publisher.epoch, number)) as staged:
            for device in ("cuda:1", "cpu"):
                staged.pin(device)
            assert staged.apply(SECONDS) is not None
        assert receipt.result(SECONDS).in_state("applied")
    assert set(addresses) == set(pinned)
    assert len(pinned) == len(set(pinned)) <= BUFFERS_MAX


def test_a_worker_can_wait_until_what_it_has_said_was_heard(bus: Bus) -> None:
    def load(_: Pairs) -> None:
        raise UnchangedError("not this one")

    publisher = bus.publisher()
    worker = bus.subscriber(publisher, load)
    for number in range(1, 21):
        receipt = together(publisher, arrays(number))
        with worker.stage(SECONDS, version=(publisher.epoch, number)) as staged:
            with pytest.raises(ApplyError, match="not this one"):
                staged.apply(SECONDS)
            assert worker.flush(SECONDS)
            assert receipt.done()
            assert isinstance(receipt.exception(), PublishError)
    worker.close()
    assert not worker.flush(SECONDS), "nobody hears it"


# What a function keeps.


@pytest.mark.parametrize("patches", [False, True])
def test_what_is_kept_stays_as_it_is_until_it_is_released(bus: Bus, patches: bool) -> None:
    views, releases = list[np.ndarray[Any, Any]](), list[Any]()

    def load(pairs: Pairs) -> None:
        views.append(dict(pairs.arrays())["w"])
        releases.append(pairs.keep())
        with pytest.raises(RuntimeError, match="twice"):
            pairs.keep()

    publisher = bus.publisher()
    worker = bus.subscriber(publisher, load)
    encoding = Settings(encoding="delta") if patches else Settings()
    for number in range(1, 9):
        receipt = publisher.publish_async("m", arrays(number), settings=encoding, timeout=SECONDS)
        assert worker.receive(SECONDS) is not None
        assert receipt.result(SECONDS).in_state("applied")
        assert [float(view.max()) for view in views] == list(range(1, number + 1))
        assert all((view == view[0]).all() for view in views)
    for release in releases:
        release()
        release()


def test_what_is_kept_by_one_that_fails_stays_too(bus: Bus) -> None:
    views = list[np.ndarray[Any, Any]]()

    def load(pairs: Pairs) -> None:
        views.append(dict(pairs.arrays())["w"])
        pairs.keep()
        raise KeyError

    publisher = bus.publisher(settings=QUICK)
    worker = bus.subscriber(publisher, load, settings=QUICK)
    for number in range(1, 4):
        publisher.publish("m", arrays(number), require=0, settings=Settings(wait="none"))
        with pytest.raises(TornError):
            worker.receive(SECONDS)
    firsts = [float(view[0]) for view in views]
    assert firsts == sorted(firsts)
    assert all((view == view[0]).all() for view in views)
    assert len({view.ctypes.data for view in views}) == len(views)
