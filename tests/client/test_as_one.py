"""Several models published as one: `Publisher.publish_many`."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightbus import (
    ClosedError,
    DeadlineError,
    Publisher,
    PublishError,
    StateError,
    TornError,
    UnchangedError,
    UnknownWorkerError,
)
from weightbus.tests.client.test_bus import SECONDS, Bus, arrays
from weightbus.tests.compose.waiting import wait_for
from weightbus.types import Offer, Pairs, Receipts, Update

WORKER = """
import sys, numpy as np, weightbus
models = {"base": {"w": np.zeros(1000, np.float32)}, "lora": {"w": np.zeros(10, np.float32)}}
worker = weightbus.Subscriber(sys.argv[1], models, name="process").start()
sys.stdin.read()
"""


def pair(value: float, small: int = 10) -> dict[str, Any]:
    """Return the weights of a base and an adapter, which belong together."""
    return {"base": arrays(value), "lora": arrays(value, small)}


def values(*targets: dict[str, np.ndarray[Any, Any]]) -> list[float]:
    for target in targets:
        assert (target["w"] == target["w"][0]).all()
    return [float(target["w"][0]) for target in targets]


def test_no_reader_sees_one_new_and_the_other_old(bus: Bus) -> None:
    publisher, seen, over = bus.publisher(), set[tuple[float, ...]](), threading.Event()
    models, alone = pair(0), arrays(0)
    worker = bus.subscriber(publisher, None, models=models, name="both").start()
    bus.subscriber(publisher, None, models={"base": alone}, name="one").start()

    def read() -> None:
        while not over.is_set():
            with worker.reading():
                seen.add(tuple(values(models["base"], models["lora"])))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for value in range(1, 21):
            receipts = publisher.publish_many(pair(value), expect=2, timeout=SECONDS)
            assert receipts.in_state("applied") == ["both", "one"]
            assert receipts.workers == {"both": "applied", "one": "applied"}
            assert sorted(receipts["lora"].workers) == ["both"]
            assert values(models["base"], models["lora"], alone) == [value] * 3
    finally:
        over.set()
        reader.join(SECONDS)
    assert all(base == lora for base, lora in seen)
    assert len(seen) > 1


def test_receive_applies_both_and_returns_each(bus: Bus) -> None:
    publisher, models = bus.publisher(), pair(0)
    worker = bus.subscriber(publisher, None, models=models)
    with pytest.raises(PublishError) as caught:
        publisher.publish_many(pair(1), timeout=0.5)
    assert caught.value.receipts is not None
    assert caught.value.receipts.in_state("staged") == [worker.name]
    first = worker.receive(SECONDS)
    assert values(models["base"], models["lora"]) == [1, 1]
    second = worker.receive(0)
    assert {u.model for u in (first, second) if u is not None} == {"base", "lora"}
    assert worker.receive(0) is None


def test_one_that_does_not_fit_keeps_all_from_all(bus: Bus) -> None:
    publisher, models, alone = bus.publisher(), pair(0), arrays(0)
    bus.subscriber(publisher, None, models=models, name="both").start()
    bus.subscriber(publisher, None, models={"base": alone}, name="one").start()
    publisher.publish_many(pair(1), expect=2, timeout=SECONDS)
    with pytest.raises(PublishError, match=r"lora version 2 .* layout-mismatch") as caught:
        publisher.publish_many(pair(2, small=11), timeout=SECONDS)
    assert caught.value.receipts is not None
    assert caught.value.receipts.in_state("applied") == []
    assert values(models["base"], models["lora"], alone) == [1, 1, 1]


@pytest.mark.parametrize("hook", ["before_apply", "on_commit"])
def test_a_hook_that_fails_for_one_fails_both(bus: Bus, hook: str, tmp_path: Path) -> None:
    refused = False

    def refuse(what: Offer | Update) -> None:
        if refused and what.model == "lora":
            raise UnchangedError("not this one")

    publisher = bus.publisher()
    files = {"base": tmp_path / "base.safetensors", "lora": tmp_path / "lora.safetensors"}
    worker = bus.subscriber(publisher, None, models=files, **{hook: refuse}).start()
    publisher.publish_many(pair(1), expect=1, timeout=SECONDS)
    before = [file.read_bytes() for file in files.values()]
    refused = True
    with pytest.raises(PublishError, match="not this one"):
        publisher.publish_many(pair(2), timeout=SECONDS)
    assert [file.read_bytes() for file in files.values()] == before, "the old files of both"
    refused = False
    receipts = publisher.publish_many(pair(3), expect=1, timeout=SECONDS)
    assert receipts.in_state("applied") == [worker.name]


def test_what_cannot_be_undone_is_read_by_nobody_until_both_are_applied(bus: Bus) -> None:
    refused, loaded = False, dict[str, int]()

    def load(pairs: Pairs) -> None:
        for _ in pairs:
            pass
        if refused and pairs.model == "lora":
            raise UnchangedError("not this one")
        loaded[pairs.model] = pairs.version

    publisher = bus.publisher()
    worker = bus.subscriber(publisher, None, models={"base": load, "lora": load}).start()
    publisher.publish_many(pair(1), expect=1, timeout=SECONDS)
    refused = True
    with pytest.raises(PublishError, match="not this one"):
        publisher.publish_many(pair(2), timeout=SECONDS)
    assert loaded == {"base": 2, "lora": 1}
    with pytest.raises(TornError, match="published as one: UnchangedError"), worker.reading():
        pass
    refused = False
    publisher.publish_many(pair(3), expect=1, timeout=SECONDS)
    with worker.reading():
        assert loaded == {"base": 3, "lora": 3}


def test_a_process_that_dies_undecided_leaves_the_old_versions_of_both(bus: Bus) -> None:
    publisher, models = bus.publisher(), pair(0)
    bus.subscriber(publisher, None, models=models, name="both").start()
    command = [sys.executable, "-c", WORKER, publisher.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # noqa: S603 - our own
        try:
            publisher.wait_for_workers(2, timeout=SECONDS)
            receipts = publisher.publish_many(pair(1), expect=2, timeout=SECONDS)
            assert receipts.in_state("applied") == ["both", "process"]
            process.kill()
            with pytest.raises(PublishError) as caught:
                publisher.publish_many(pair(2), expect=2, timeout=2.0)
            assert caught.value.receipts is not None
            assert caught.value.receipts.in_state("applied") == []
            assert values(models["base"], models["lora"]) == [1, 1]
        finally:
            process.kill()
    publisher.publish_many(pair(3), require="alive", timeout=SECONDS)
    assert values(models["base"], models["lora"]) == [3, 3]


@pytest.fixture
def undecided(bus: Bus) -> Iterator[tuple[Publisher, "Future[Receipts]"]]:
    """A publish of two models as one, which waits for a second worker."""
    publisher, models = bus.publisher(), pair(0)
    publisher.publish_many(pair(0), timeout=SECONDS)
    bus.subscriber(publisher, None, models=models, name="first").start()
    with ThreadPoolExecutor(1) as pool:
        as_one = pool.submit(publisher.publish_many, pair(1), expect=2, timeout=SECONDS)
        staged = dict.fromkeys(pair(0), "staged version 2")
        wait_for(lambda: publisher.workers()["first"].phase == staged, "both staged", SECONDS)
        assert not as_one.done()
        yield publisher, as_one


def test_a_publish_of_one_model_waits_for_the_decision_on_both(
    bus: Bus, undecided: tuple[Publisher, "Future[Receipts]"]
) -> None:
    publisher, as_one = undecided
    late = r"lora: publish_many publishes it as one with base, .* nothing else was published"
    with pytest.raises(DeadlineError, match=late):
        publisher.publish("lora", arrays(8, 10), timeout=0.05)
    models = pair(0)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(publisher.publish, "lora", arrays(9, 10), timeout=SECONDS)
        assert not alone.done()
        bus.subscriber(publisher, None, models=models, name="second").start()
        receipts = as_one.result(SECONDS)
        assert receipts["base"].in_state("applied") == ["first", "second"]
        # `alone` is published right after the decision, so a worker may skip this one
        assert receipts["lora"].in_state("applied", "skipped") == ["first", "second"]
        assert alone.result(SECONDS).version == receipts["lora"].version + 1
    assert values(models["base"], models["lora"]) == [1, 9]


def test_another_publish_of_both_waits_for_the_decision_too(
    bus: Bus, undecided: tuple[Publisher, "Future[Receipts]"]
) -> None:
    publisher, as_one = undecided
    with pytest.raises(DeadlineError, match="base: publish_many publishes it as one with lora"):
        publisher.publish_many(pair(2), timeout=0.05)
    bus.subscriber(publisher, None, models=pair(0), name="second").start()
    assert as_one.result(SECONDS).in_state("applied") == ["first", "second"]
    receipts = publisher.publish_many(pair(3), expect=2, timeout=SECONDS)
    assert receipts.in_state("applied") == ["first", "second"]


def test_a_publish_need_not_wait_for_models_that_are_not_in_it(
    undecided: tuple[Publisher, "Future[Receipts]"],
) -> None:
    publisher, as_one = undecided
    assert publisher.publish("other", arrays(1), timeout=SECONDS).workers == {}
    assert not as_one.done()
    publisher.close()
    with pytest.raises((PublishError, ClosedError)):
        as_one.result(SECONDS)


def test_a_worker_that_joins_later_gets_both_at_once(bus: Bus) -> None:
    publisher, models = bus.publisher(), pair(0)
    publisher.publish_many(pair(1), timeout=SECONDS)
    worker = bus.subscriber(publisher, None, models=models)
    assert worker.receive(SECONDS) is not None
    assert values(models["base"], models["lora"]) == [1, 1]


def test_modules_that_are_published_as_one(bus: Bus) -> None:
    publisher = bus.publisher()
    made = {"actor": torch.nn.Linear(3, 2), "critic": torch.nn.Linear(3, 1)}
    there = {"actor": torch.nn.Linear(3, 2), "critic": torch.nn.Linear(3, 1)}
    bus.subscriber(publisher, None, models=there).start()
    metadata = {"step": "7"}
    receipts = publisher.publish_many(made, expect=1, metadata=metadata, timeout=SECONDS)
    assert [receipts[model].metadata for model in receipts] == [metadata] * 2
    for model, module in made.items():
        assert torch.equal(module.weight, there[model].weight)
    assert str(receipts).count("\n") == 1
    assert repr(receipts).startswith("<Receipts of actor version 1, critic version 1: {")


@pytest.mark.parametrize(
    ("models", "error", "text"),
    [
        ({}, ValueError, "has 0 models: give 1 to 64"),
        ([("base", 1)], ValueError, "models=list does not map ids to weights"),
        (torch.nn.Linear(1, 1), ValueError, "models=Linear does not map ids to weights"),
        ({"a b": arrays(1)}, ValueError, "model 'a b'"),
        ({"base": arrays(1), "lora": {"w": object()}}, StateError, "w"),
    ],
)
def test_what_cannot_be_published_is_refused_before_anything_is_sent(
    bus: Bus, models: Any, error: type[Exception], text: str
) -> None:
    publisher, base = bus.publisher(), arrays(0)
    bus.subscriber(publisher, None, models={"base": base}, name="w").start()
    with pytest.raises(error, match=text):
        publisher.publish_many(models, timeout=SECONDS)
    with pytest.raises(UnknownWorkerError, match="nobody"):
        publisher.publish_many(pair(1), workers=["nobody"], timeout=SECONDS)
    receipts = publisher.publish_many(pair(2), expect=1, timeout=SECONDS)
    assert receipts["base"].version == 1, "it is the first of its number"
    assert values(base) == [2]


def test_a_publisher_that_starts_again_offers_both_or_none(bus: Bus, tmp_path: Path) -> None:
    with bus.publisher(state=tmp_path) as first:
        first.publish_many(pair(1), timeout=SECONDS)
        first.publish_many(pair(2), timeout=SECONDS)
    publisher, models = bus.publisher(state=tmp_path), pair(0)
    worker = bus.subscriber(publisher, None, models=models)
    assert worker.receive(SECONDS) is not None
    assert values(models["base"], models["lora"]) == [2, 2], "at once"
    worker.close()
    publisher.close()
    [file] = tmp_path.glob("lora@*.safetensors")
    file.write_bytes(b"damaged")
    again = bus.publisher(state=tmp_path)
    receipts = again.publish_many(pair(3), timeout=SECONDS)
    assert {r.version for r in receipts.values()} == {1}, "nothing was offered before"
