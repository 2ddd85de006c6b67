"""Patches over real sockets: what changed is sent, and what runs is what was published."""

import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weightbus import Publisher, Subscriber
from weightbus.bus.worker.follower import Follower
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.python_client import subscriber as subscribers
from weightbus.python_client.settings import BASES
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_address
from weightbus.tests.trust.sealed_bus import keys_in
from weightbus.types import Receipt

SECONDS = 20.0
COUNT = 300_000  # elements: more than goes with an announcement
Weights = dict[str, NDArray[Any]]


def weights(seed: int = 0) -> Weights:
    values = np.random.default_rng(seed).normal(0, 0.05, COUNT)
    return {"w": values.astype(np.float16), "b": np.arange(7, dtype=np.float32)}


def trained(model: Weights, step: int) -> Weights:
    """Return a model of which one element in a hundred has changed, in the last place."""
    bits = model["w"].view(np.uint16).copy()
    bits[step::100] ^= 1
    return {"w": bits.view(np.float16), "b": model["b"] + 1}


def check(here: Weights, published: Weights) -> None:
    for name, array in published.items():
        np.testing.assert_array_equal(here[name], array)


def came(receipt: Receipt, name: str = "w") -> str:
    """Return how a version came to a worker, which has applied it."""
    worker = receipt.workers[name]
    assert worker.state == "applied"
    return worker.encoding


def patch(publisher: Publisher, model: object, **options: Any) -> Receipt:
    """Publish a version as a patch, where there can be one."""
    told = settled({"encoding": "delta", "timeout": SECONDS, **options})
    return publisher.publish("m", model, **told)


def slot_of(worker: Subscriber) -> Follower:
    machine: WorkerMachine = worker._loop._machine  # noqa: SLF001 # pyright: ignore
    return machine.followers["m"]


@contextmanager
def bus(
    folder: Path | None = None, few: dict[str, Any] | None = None, **targets: object
) -> Generator[tuple[Any, ...]]:
    """Run a publisher that is on another host, as it were, and workers, by name; yield them all.

    Args:
        folder: For keys, if there are to be any.
        few: Further options of the publisher.
        targets: By name of a worker, what it applies to.
    """
    keys, own = (None, None) if folder is None else keys_in(folder)
    told = {"shared_memory": False, "chunk_bytes": 2**16, "keys": keys, **(few or {})}
    with ExitStack() as ends:
        publisher = ends.enter_context(Publisher(**settled(told)))
        workers = [
            join(ends, publisher, target, name, keys=own) for name, target in targets.items()
        ]
        publisher.wait_for_workers(len(workers), SECONDS)
        yield publisher, *workers


def join(
    ends: ExitStack, publisher: Publisher, target: object, name: str, **options: Any
) -> Subscriber:
    told = settled({"shared_memory": False, **options})
    worker = Subscriber(publisher.address, {"m": target}, name=name, **told)
    return ends.enter_context(worker).start()


@pytest.mark.parametrize("sealed", [False, True])
def test_what_changed_is_sent_and_what_is_applied_was_published(
    sealed: bool, tmp_path: Path
) -> None:
    here, model = weights(), weights(1)
    with bus(tmp_path if sealed else None, w=here) as (publisher, worker):
        assert came(patch(publisher, model)) == "raw"
        for step in range(3):  # fetched at first, then pushed
            model = trained(model, step)
            receipt = patch(publisher, model)
            check(here, model)
            assert came(receipt) == "delta-1"
            assert receipt.workers["w"].nbytes < receipt.nbytes / 40
            assert "delta-1" in str(receipt)
        assert came(publisher.publish("m", weights(2), timeout=SECONDS)) == "raw"
        check(here, weights(2))
        assert slot_of(worker).versions.base is None, "nothing is kept where no patches come"


def test_workers_with_and_without_patches_share_one_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new, old, model = weights(), weights(), weights(1)
    with bus(new=new) as (publisher, _), ExitStack() as ends:
        with monkeypatch.context() as patched:
            patched.setattr(subscribers, "DELTA", "another")  # as in another language
            other = join(ends, publisher, old, "old")
        publisher.wait_for_workers(2, SECONDS)
        for step in range(4):
            receipt = patch(publisher, model)
            check(new, model)
            check(old, model)
            assert came(receipt, "old") == "raw"
            assert came(receipt, "new") == ("delta-1" if step else "raw")
            model = trained(model, step)
        assert slot_of(other).versions.base is None


def test_a_worker_that_missed_a_version_gets_one_patch_from_what_it_runs() -> None:
    models = [weights(1)]
    for step in range(4):
        models.append(trained(models[-1], step))
    slow = weights()
    with bus(quick=weights(), slow=slow) as (publisher, _, _):
        patch(publisher, models[0])
        patch(publisher, models[1], workers=["quick"])
        receipt = patch(publisher, models[2])
        assert {came(receipt, "quick"), came(receipt, "slow")} == {"delta-1"}
        check(slow, models[2])
        assert receipt.workers["slow"].nbytes > receipt.workers["quick"].nbytes
        for model in models[3:]:
            patch(publisher, model, workers=["quick"])
        receipt = patch(publisher, models[0])
        assert came(receipt, "quick") == "delta-1"
        assert came(receipt, "slow") == "raw", "what it runs is no longer kept"
        check(slow, models[0])
        assert len(publisher._models["m"].pool) <= 1 + BASES  # noqa: SLF001


def test_late_joiners_get_all_of_it_and_patches_from_then_on() -> None:
    late, model = weights(), weights(1)
    with bus(w=weights()) as (publisher, _), ExitStack() as ends:
        for step in range(2):
            patch(publisher, model)
            model = trained(model, step)
        joined = join(ends, publisher, late, "late")
        assert joined.wait_for_version("m", 2, timeout=SECONDS)
        receipt = patch(publisher, model)
        assert {came(receipt), came(receipt, "late")} == {"delta-1"}
        check(late, model)


def test_bytes_that_somebody_changed_are_found_out_and_mended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, model = weights(), weights(1)
    caplog.set_level(logging.INFO)
    with bus(w=here) as (publisher, worker):
        patch(publisher, model)
        base = slot_of(worker).versions.base
        assert base is not None
        base.data[1000] ^= 1
        model = trained(model, 0)
        assert came(patch(publisher, model)) == "raw"
        check(here, model)
        wait_for(lambda: "all of version 2" in caplog.text, "the reason at the publisher", SECONDS)
        assert "is fetched as a whole" in caplog.text
        model = trained(model, 1)
        assert came(patch(publisher, model)) == "delta-1"


@pytest.mark.parametrize("options", [{"commit": "together"}, {"wait": "staged"}])
def test_patched_versions_are_staged_like_others(options: dict[str, Any]) -> None:
    here, model = weights(), weights(1)
    with bus(w=here) as (publisher, worker):
        patch(publisher, model)
        model = trained(model, 0)
        receipt = patch(publisher, model, **options)
        assert receipt.workers["w"].encoding == "delta-1"
        assert worker.wait_for_version("m", 2, timeout=SECONDS)
        check(here, model)


def test_files_and_functions_are_patched_like_models(tmp_path: Path) -> None:
    path, model = tmp_path / "m.safetensors", weights(1)
    loaded: dict[str, bytes] = {}

    def load(pairs: Any) -> None:
        loaded.update((name, tensor.numpy().tobytes()) for name, tensor in pairs)

    with bus(file=path, function=load) as (publisher, *_):
        for step in range(3):
            receipt = patch(publisher, model)
            assert path.read_bytes().endswith(model["w"].tobytes())
            assert loaded["w"] == model["w"].tobytes()
            for name in ("file", "function"):
                assert came(receipt, name) == ("delta-1" if step else "raw")
            model = trained(model, step)


def test_a_resident_model_is_what_patches_build_on_unless_somebody_has_changed_it() -> None:
    model, here = torch.nn.Linear(512, 512).half(), torch.nn.Linear(512, 512).half()
    with bus() as (publisher,), ExitStack() as ends:
        worker = join(ends, publisher, here, "w", resident=True)
        publisher.wait_for_workers(1, SECONDS)
        patch(publisher, model)
        for encoding in ("delta-1", "raw", "delta-1"):
            with torch.no_grad():
                model.weight[0, :50] += 1
                if encoding == "raw":
                    here.weight[3, 3] += 1
            assert came(patch(publisher, model)) == encoding
            assert torch.equal(here.weight, model.weight)
            assert slot_of(worker).versions.base is not None


def test_nothing_is_patched_over_shared_memory() -> None:
    here, model = weights(), weights(1)
    with bus(few={"shared_memory": True}) as (publisher,), ExitStack() as ends:
        join(ends, publisher, here, "w", shared_memory=True)
        publisher.wait_for_workers(1, SECONDS)
        transport = lambda: publisher.workers()["w"].road  # noqa: E731
        wait_for(lambda: transport() == "shared", "the transport", SECONDS)
        for step in range(3):
            receipt = patch(publisher, model)
            assert (came(receipt), receipt.workers["w"].nbytes) == ("", 0)
            check(here, model)
            model = trained(model, step)
        assert len(publisher._models["m"].pool) == 1  # noqa: SLF001


def test_after_a_restart_patches_build_on_what_runs_by_its_new_name(tmp_path: Path) -> None:
    here, model = weights(), weights(1)
    few = {"address": lasting_address(), "state": tmp_path}
    with bus(few=few, w=here) as (publisher, worker):
        patch(publisher, model)
        old = publisher.epoch
        publisher.close()
        with bus(few=few) as (again,):
            assert worker.wait_for_version("m", 1, epoch=old + 1, timeout=SECONDS)
            base = slot_of(worker).versions.base
            assert base is not None
            wait_for(lambda: base.running.epoch == again.epoch, "its new name", SECONDS)
            ways: list[str] = []
            for step in range(3):
                model = trained(model, step)
                ways.append(came(patch(again, model)))
                check(here, model)
            assert ways[-1] == "delta-1", "the first has nothing to build on at the publisher"


def test_small_versions_go_with_their_announcements() -> None:
    here = {"w": np.zeros(1000, np.float16)}
    with bus(w=here) as (publisher, _):
        for value in range(3):
            model = {"w": np.full(1000, value, np.float16)}
            assert came(patch(publisher, model)) == "raw"
            check(here, model)
