"""Targets that are functions: they load a version from where the bus has it, without a copy."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from weightbus import ApplyError, Settings, Subscriber, TornError, UnchangedError
from weightbus.bus.protocol_limits import APPLIES_MAX
from weightbus.tests.client.test_apply import runs
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays, both
from weightbus.types import Pairs

QUICK = Settings(ping=0.05, lost_after=SECONDS)


def test_tensors_come_by_every_name_and_without_a_copy(bus: Bus) -> None:
    shared = torch.rand(3, 4)
    weights = {"a": shared, "b": torch.rand(5).bfloat16(), "tied": shared, "none": torch.ones(0)}
    loaded, told = dict[str, torch.Tensor](), list[Any]()

    def load(pairs: Pairs) -> None:
        told.append((pairs.model, pairs.version, len(pairs), pairs.nbytes))
        for name, tensor in pairs:
            assert name not in loaded or tensor.data_ptr() == loaded[name].data_ptr()
            loaded[name] = tensor.clone()
        addresses = {name: array.ctypes.data for name, array in pairs.arrays()}
        assert addresses["a"] == addresses["tied"] == dict(pairs)["a"].data_ptr()

    publisher = bus.publisher()
    receipt, update = both(publisher, bus.subscriber(publisher, load), weights)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert told == [("m", 1, 4, 48 + 10)]
    assert (update.version, len(receipt.in_state("applied"))) == (1, 1)


def test_arrays_are_read_only(bus: Bus) -> None:
    def load(pairs: Pairs) -> None:
        for _, array in pairs.arrays():
            array[:] = 0

    publisher = bus.publisher()
    subscriber = bus.subscriber(publisher, load)
    publisher.publish(
        "m", {"w": np.ones(3, ml_dtypes.bfloat16)}, require=0, settings=Settings(wait="none")
    )
    with pytest.raises(TornError, match="read-only"):
        subscriber.receive(SECONDS)


def test_an_engine_takes_the_pairs_as_they_are(bus: Bus) -> None:
    """As vLLM's `model.load_weights` does, say."""

    class Engine(nn.Linear):
        def load_weights(self, weights: Any) -> set[object]:
            own = dict(self.named_parameters())
            with torch.no_grad():
                return {own[name].copy_(tensor) is own[name] and name for name, tensor in weights}

    publisher, engine, trained = bus.publisher(), Engine(3, 4), nn.Linear(3, 4)
    both(publisher, bus.subscriber(publisher, engine.load_weights), trained)
    assert torch.equal(engine.weight, trained.weight)
    assert torch.equal(engine.bias, trained.bias)


def test_what_is_over_is_over(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """The pairs say so; views that were kept stay safe to touch, and one warning tells of them."""
    kept, views = list[Pairs](), list[Any]()

    def load(pairs: Pairs) -> None:
        kept.append(pairs)
        assert next(iter(pairs))[0] == "w"

    publisher = bus.publisher()
    subscriber = bus.subscriber(publisher, load)
    both(publisher, subscriber, arrays(1))
    with pytest.raises(RuntimeError, match=r"m version 1: .* the function .* has returned"):
        next(iter(kept[0]))
    with pytest.raises(RuntimeError, match="has returned"):
        next(kept[0].arrays())
    assert not caplog.records
    for take in (lambda pairs: dict(pairs)["w"], lambda pairs: dict(pairs.arrays())["w"]):
        views.clear()
        with caplog.at_level(logging.WARNING):
            keep = bus.subscriber(publisher, lambda pairs, take=take: views.append(take(pairs)))
            keep.receive(SECONDS)
        assert len([r for r in caplog.records if "has kept views" in r.getMessage()]) == 1
        caplog.clear()
        keep.close()
        assert float(views[0][0]) == 1


def test_nobody_but_the_function_knows_what_runs_after_it_failed(bus: Bus) -> None:
    fails: list[Exception] = []
    engine = {"a": 0.0, "b": 0.0}

    def two(value: float) -> dict[str, np.ndarray[Any, Any]]:
        return {name: arrays(value)["w"] for name in engine}

    def load(pairs: Pairs) -> None:
        error = fails.pop() if fails else None
        for name, array in pairs.arrays():
            if isinstance(error, UnchangedError):
                raise error
            engine[name] = float(array[0])
            if error is not None:
                raise error

    publisher = bus.publisher()
    subscriber = bus.subscriber(publisher, load, name="w")
    first, _ = both(publisher, subscriber, two(1))
    for error, runs_on in ((UnchangedError("not this one"), True), (KeyError("half-way"), False)):
        fails.append(error)
        future = publisher.publish_async("m", two(2), require=0, timeout=SECONDS)
        with pytest.raises(ApplyError, match=str(error.args[0])) as caught:
            subscriber.receive(SECONDS)
        assert isinstance(caught.value, TornError) != runs_on
        receipt = future.result(SECONDS)
        assert receipt.in_state("failed") == ["w"]
        assert str(error.args[0]) in receipt.workers["w"].detail
        assert runs(publisher) == ((first.epoch, 1) if runs_on else None)
        assert sorted(engine.values()) == ([1, 1] if runs_on else [1, 2])
    future = publisher.publish_async("m", two(4), timeout=SECONDS)
    while (update := subscriber.receive(SECONDS)) is not None and update.version == 3:
        pass  # which is tried again, if it comes before the next one
    assert future.result(SECONDS).in_state("applied") == ["w"]
    assert engine == {"a": 4, "b": 4}


def test_the_same_version_is_tried_again_over_the_network(bus: Bus) -> None:
    digests: list[str] = []

    def load(pairs: Pairs) -> None:
        digests.append(pairs.digest)
        raise KeyError

    publisher = bus.publisher(settings=QUICK)
    subscriber = bus.subscriber(publisher, load, settings=QUICK)
    publisher.publish("m", arrays(1), require=0, settings=Settings(wait="none"))
    for _ in range(APPLIES_MAX):
        with pytest.raises(TornError):
            subscriber.receive(SECONDS)
    assert [bool(d) for d in digests] == [not bus.shared_memory, True, True]


def test_a_publisher_that_overwrites_what_is_loaded_is_found_out() -> None:
    bus = Bus(shared_memory=True)
    publisher = bus.publisher(settings=QUICK)
    seen: list[float] = []

    def load(pairs: Pairs) -> None:
        seen.append(float(dict(pairs.arrays())["w"][0]))
        if len(seen) == 1:
            [block] = publisher._models["m"].pool._blocks  # noqa: SLF001 # pyright: ignore
            kept: Any = block._segment  # noqa: SLF001 # pyright: ignore
            kept._memory[24:32] = bytes(8)  # noqa: SLF001 # pyright: ignore

    subscriber = bus.subscriber(publisher, load, name="w", settings=QUICK)
    publisher.publish("m", arrays(1), require=0, settings=Settings(wait="none"))
    with pytest.raises(TornError, match="written to while it was copied"):
        subscriber.receive(SECONDS)
    update = subscriber.receive(SECONDS)
    assert update is not None
    assert update.digest, "it came over the network"
    assert seen == [1, 1]
    bus.close()


def test_a_function_is_called_in_the_background_but_not_where_pings_are_answered(bus: Bus) -> None:
    threads: list[str] = []
    publisher = bus.publisher()
    bus.subscriber(publisher, lambda _: threads.append(threading.current_thread().name)).start()
    publisher.publish("m", arrays(1), timeout=SECONDS)
    assert threads == ["weightbus-apply"]


async def _later(pairs: Pairs) -> None:
    del pairs


def _lazily(pairs: Pairs) -> Iterator[str]:
    for name, _ in pairs:
        yield name


@pytest.mark.parametrize("load", [lambda pairs: _later(pairs), _lazily])
def test_work_that_is_left_for_later_is_not_done(bus: Bus, load: Callable[..., Any]) -> None:
    publisher = bus.publisher()
    subscriber = bus.subscriber(publisher, load)
    publisher.publish("m", arrays(1), require=0, settings=Settings(wait="none"))
    with pytest.raises(TornError, match=r"returned a (coroutine|generator), which nothing runs"):
        subscriber.receive(SECONDS)


def test_a_coroutine_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a target that is a function=.* is a coroutine function"):
        Subscriber("tcp://127.0.0.1:1", {"m": _later})
