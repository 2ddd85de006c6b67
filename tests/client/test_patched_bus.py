"""Patches over real sockets: what changed is sent, and what runs is what was published."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.slot import Slot
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


def slot_of(worker: Subscriber) -> Slot:
    machine: WorkerMachine = worker._loop._machine  # noqa: SLF001 # pyright: ignore
    return machine.slots["m"]


@contextmanager
def bus(folder: Path | None = None, **options: Any) -> Generator[tuple[Publisher, dict[str, Any]]]:
    """Run a publisher that is on another host, as it were; yield how to connect to it."""
    keys, own = (None, None) if folder is None else keys_in(folder)
    told: dict[str, Any] = {"shared_memory": False, "keys": keys} | options
    with Publisher(**settled({"settings": Settings(chunk_bytes=2**16), **told})) as publisher:
        yield publisher, {"shared_memory": False, "keys": own}


@pytest.mark.parametrize("sealed", [False, True])
def test_what_changed_is_sent_and_what_is_applied_was_published(
    sealed: bool, tmp_path: Path
) -> None:
    here, model = weights(), weights(1)
    with (
        bus(tmp_path if sealed else None) as (publisher, told),
        Subscriber(publisher.address, {"m": here}, name="w", **settled(told)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        assert (
            came(
                publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
            )
            == "raw"
        )
        for step in range(3):  # fetched at first, then pushed
            model = trained(model, step)
            receipt = publisher.publish(
                "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
            )
            check(here, model)
            assert came(receipt) == "delta-1"
            assert receipt.workers["w"].nbytes < receipt.nbytes / 40
            assert "delta-1" in str(receipt)
        assert came(publisher.publish("m", weights(2), timeout=SECONDS)) == "raw"
        check(here, weights(2))
        assert slot_of(worker).holds.base is None, "nothing is kept where no patches come"


def test_workers_with_and_without_patches_share_one_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new, old, model = weights(), weights(), weights(1)
    with (
        bus() as (publisher, told),
        Subscriber(publisher.address, {"m": new}, name="new", **settled(told)) as one,
        monkeypatch.context() as patched,
    ):
        patched.setattr(subscribers, "DELTA", "another")  # as in another language
        with Subscriber(publisher.address, {"m": old}, name="old", **settled(told)) as other:
            one.start()
            other.start()
            publisher.wait_for_workers(2, SECONDS)
            for step in range(4):
                receipt = publisher.publish(
                    "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
                )
                check(new, model)
                check(old, model)
                assert came(receipt, "old") == "raw"
                assert came(receipt, "new") == ("delta-1" if step else "raw")
                model = trained(model, step)
            assert slot_of(other).holds.base is None


def test_a_worker_that_missed_a_version_gets_one_patch_from_what_it_runs() -> None:
    models = [weights(1)]
    for step in range(4):
        models.append(trained(models[-1], step))
    quick, slow = weights(), weights()
    with (
        bus() as (publisher, told),
        Subscriber(publisher.address, {"m": quick}, name="quick", **settled(told)) as one,
        Subscriber(publisher.address, {"m": slow}, name="slow", **settled(told)) as other,
    ):
        one.start()
        other.start()
        publisher.wait_for_workers(2, SECONDS)
        publisher.publish("m", models[0], settings=Settings(encoding="delta"), timeout=SECONDS)
        publisher.publish(
            "m", models[1], settings=Settings(encoding="delta"), workers=["quick"], timeout=SECONDS
        )
        receipt = publisher.publish(
            "m", models[2], settings=Settings(encoding="delta"), timeout=SECONDS
        )
        assert {came(receipt, "quick"), came(receipt, "slow")} == {"delta-1"}
        check(slow, models[2])
        assert receipt.workers["slow"].nbytes > receipt.workers["quick"].nbytes
        for number in (3, 4):
            model = models[number]
            publisher.publish(
                "m", model, settings=Settings(encoding="delta"), workers=["quick"], timeout=SECONDS
            )
        receipt = publisher.publish(
            "m", models[0], settings=Settings(encoding="delta"), timeout=SECONDS
        )
        assert came(receipt, "quick") == "delta-1"
        assert came(receipt, "slow") == "raw", "what it runs is no longer kept"
        check(slow, models[0])
        kept = publisher._models["m"]  # noqa: SLF001 # pyright: ignore
        assert len(kept.pool) <= 1 + BASES


def test_late_joiners_get_all_of_it_and_patches_from_then_on() -> None:
    here, late, model = weights(), weights(), weights(1)
    with (
        bus() as (publisher, told),
        Subscriber(publisher.address, {"m": here}, name="w", **settled(told)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        for step in range(2):
            publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
            model = trained(model, step)
        with Subscriber(publisher.address, {"m": late}, name="late", **settled(told)) as joined:
            joined.start()
            assert joined.wait_for_version("m", 2, timeout=SECONDS)
            receipt = publisher.publish(
                "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
            )
            assert {came(receipt), came(receipt, "late")} == {"delta-1"}
            check(late, model)


def test_bytes_that_somebody_changed_are_found_out_and_mended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, model = weights(), weights(1)
    caplog.set_level(logging.INFO)
    with (
        bus() as (publisher, told),
        Subscriber(publisher.address, {"m": here}, name="w", **settled(told)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
        base = slot_of(worker).holds.base
        assert base is not None
        base.data[1000] ^= 1
        model = trained(model, 0)
        assert (
            came(
                publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
            )
            == "raw"
        )
        check(here, model)
        wait_for(lambda: "all of version 2" in caplog.text, "the reason at the publisher", SECONDS)
        assert "is fetched as a whole" in caplog.text
        model = trained(model, 1)
        assert (
            came(
                publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
            )
            == "delta-1"
        )


@pytest.mark.parametrize("options", [{"commit": "together"}, {"wait": "staged"}])
def test_patched_versions_are_staged_like_others(options: dict[str, Any]) -> None:
    here, model = weights(), weights(1)
    with (
        bus() as (publisher, told),
        Subscriber(publisher.address, {"m": here}, name="w", **settled(told)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
        model = trained(model, 0)
        receipt = publisher.publish(
            "m",
            model,
            timeout=SECONDS,
            **settled({"encoding": "delta", **options}),
        )
        assert receipt.workers["w"].encoding == "delta-1"
        assert worker.wait_for_version("m", 2, timeout=SECONDS)
        check(here, model)


def test_files_and_functions_are_patched_like_models(tmp_path: Path) -> None:
    path, model = tmp_path / "m.safetensors", weights(1)
    loaded: dict[str, bytes] = {}

    def load(pairs: Any) -> None:
        loaded.update((name, tensor.numpy().tobytes()) for name, tensor in pairs)

    with (
        bus() as (publisher, told),
        Subscriber(publisher.address, {"m": path}, name="file", **settled(told)) as one,
        Subscriber(publisher.address, {"m": load}, name="function", **settled(told)) as other,
    ):
        one.start()
        other.start()
        publisher.wait_for_workers(2, SECONDS)
        for step in range(3):
            receipt = publisher.publish(
                "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
            )
            assert path.read_bytes().endswith(model["w"].tobytes())
            assert loaded["w"] == model["w"].tobytes()
            for name in ("file", "function"):
                assert came(receipt, name) == ("delta-1" if step else "raw")
            model = trained(model, step)


def test_a_resident_model_is_what_patches_build_on_unless_somebody_has_changed_it() -> None:
    model, here = torch.nn.Linear(512, 512).half(), torch.nn.Linear(512, 512).half()
    with (
        bus() as (publisher, told),
        Subscriber(
            publisher.address,
            {"m": here},
            name="w",
            **settled({"resident": True, **told}),
        ) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
        for encoding in ("delta-1", "raw", "delta-1"):
            with torch.no_grad():
                model.weight[0, :50] += 1
                if encoding == "raw":
                    here.weight[3, 3] += 1
            receipt = publisher.publish(
                "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
            )
            assert came(receipt) == encoding
            assert torch.equal(here.weight, model.weight)
            base = slot_of(worker).holds.base
            assert base is not None


def test_nothing_is_patched_on_the_shared_road() -> None:
    here, model = weights(), weights(1)
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": here}, name="w") as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        wait_for(lambda: publisher._machine.roster.by_name("w").shared, "the road", SECONDS)  # type: ignore[union-attr]  # noqa: SLF001 # pyright: ignore
        for step in range(3):
            receipt = publisher.publish(
                "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
            )
            assert (came(receipt), receipt.workers["w"].nbytes) == ("", 0)
            check(here, model)
            model = trained(model, step)
        kept = publisher._models["m"]  # noqa: SLF001 # pyright: ignore
        assert len(kept.pool) == 1


def test_after_a_restart_patches_build_on_what_runs_by_its_new_name(tmp_path: Path) -> None:
    here, model = weights(), weights(1)
    address = lasting_address()
    with (
        bus(address=address, state=tmp_path) as (publisher, told),
        Subscriber(address, {"m": here}, name="w", **settled(told)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        publisher.publish("m", model, settings=Settings(encoding="delta"), timeout=SECONDS)
        old = publisher.epoch
        publisher.close()
        with Publisher(address, settings=Settings(shared_memory=False), state=tmp_path) as again:
            assert worker.wait_for_version("m", 1, epoch=old + 1, timeout=SECONDS)
            base = slot_of(worker).holds.base
            assert base is not None
            wait_for(lambda: base.running.epoch == again.epoch, "its new name", SECONDS)
            ways: list[str] = []
            for step in range(3):
                model = trained(model, step)
                receipt = again.publish(
                    "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
                )
                check(here, model)
                ways.append(came(receipt))
            assert ways[-1] == "delta-1", "the first has nothing to build on at the publisher"


def test_small_versions_go_with_their_announcements() -> None:
    here = {"w": np.zeros(1000, np.float16)}
    with (
        bus() as (publisher, told),
        Subscriber(publisher.address, {"m": here}, name="w", **settled(told)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        for value in range(3):
            model = {"w": np.full(1000, value, np.float16)}
            assert (
                came(
                    publisher.publish(
                        "m", model, settings=Settings(encoding="delta"), timeout=SECONDS
                    )
                )
                == "raw"
            )
            check(here, model)
