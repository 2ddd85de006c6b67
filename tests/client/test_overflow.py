"""Values that a dtype cannot hold are named in the receipt, and once in the log."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from weightbus import Publisher, Settings, Subscriber

SECONDS = 60.0
F32 = {"head.bias": torch.tensor([1.0, 1e5, -1e5, 7e4]), "body": torch.ones(3)}


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "beyond" in line]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("dtype", "greatest"),
    [
        (torch.float16, "F16 (at most 65504)"),
        (torch.float8_e5m2, "F8_E5M2 (at most 57344)"),
        (torch.float8_e4m3fn, "F8_E4M3 (at most 448)"),
    ],
)
def test_a_worker_that_converts(
    dtype: torch.dtype, greatest: str, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in F32.items()}
    settings = Settings(shared_memory=shared)
    with (
        Publisher(settings=settings) as publisher,
        Subscriber(
            publisher.address, {"m": target}, name="w0", cast=True, settings=settings
        ) as worker,
        caplog.at_level(logging.WARNING, "weightbus.subscriber"),
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        wanted = f"head.bias: 3 finite values are beyond {greatest}"
        for _ in range(2):
            receipt = publisher.publish("m", F32, timeout=SECONDS)
            assert receipt.workers["w0"].state == "applied"
            assert receipt.workers["w0"].detail == wanted
            assert receipt.detail == ""
        assert named(caplog) == [f"m version 1: {wanted}; BF16, unlike F16, has the range of F32"]
        small = {name: tensor.clamp(-1, 1) for name, tensor in F32.items()}
        receipt = publisher.publish("m", small, timeout=SECONDS)
        assert receipt.workers["w0"].detail == ""
        publisher.publish("m", F32, timeout=SECONDS)
        other = {**F32, "body": torch.full((3,), 1e6)}
        receipt = publisher.publish("m", other, timeout=SECONDS)
        assert "body: 3 finite" in receipt.workers["w0"].detail
    assert len(named(caplog)) == 2  # the second names the body alone
    assert "head.bias" not in named(caplog)[1]


def test_a_worker_with_names_of_its_own() -> None:
    target = {"mine.head.bias": np.zeros(4, np.float16), "mine.body": np.zeros(3, np.float32)}
    with (
        Publisher() as publisher,
        Subscriber(
            publisher.address,
            {"m": target},
            name="w0",
            cast=True,
            rename={"": "mine."},
        ) as worker,
    ):
        worker.start()
        receipt = publisher.publish("m", F32, expect=1, timeout=SECONDS)
    assert receipt.workers["w0"].detail == (
        "mine.head.bias: 3 finite values are beyond F16 (at most 65504)"
    )


@pytest.mark.parametrize("source", ["torch", "transposed", "numpy", "module"])
def test_a_publisher_that_converts(source: str, caplog: pytest.LogCaptureFixture) -> None:
    values = np.array([[1.0, 1e5, -1e5, 7e4], [np.inf, -np.inf, np.nan, 0.0]], np.float32)
    weights: Any = {"head": torch.from_numpy(values), "body": torch.ones(2)}
    if source == "transposed":
        weights["head"] = torch.from_numpy(values.T.copy()).T
    elif source == "numpy":
        weights = {"head": values, "body": np.ones(2, np.float32)}
    elif source == "module":
        weights = torch.nn.Module()
        weights.head = torch.nn.Parameter(torch.from_numpy(values))
        weights.body = torch.nn.Parameter(torch.ones(2))
    target = {"head": np.zeros((2, 4), np.float16), "body": np.zeros(2, np.float16)}
    with (
        Publisher(settings=Settings(dtype="f16")) as publisher,
        Subscriber(publisher.address, {"m": target}, name="w0") as worker,
        caplog.at_level(logging.WARNING, "weightbus.publisher"),
    ):
        worker.start()
        wanted = "head: 3 finite values are beyond F16 (at most 65504)"
        for _ in range(2):
            receipt = publisher.publish("m", weights, expect=1, timeout=SECONDS)
            assert receipt.detail == wanted
            assert wanted in str(receipt)
            assert receipt.workers["w0"].detail == ""
        few = Settings(dtype="bf16")
        assert publisher.publish("other", weights, require=0, settings=few).detail == ""
    assert named(caplog) == [f"m: {wanted}; BF16, unlike F16, has the range of F32"]
    assert np.isinf(target["head"]).sum() == 5


def test_the_greatest_of_float32_is_infinite_in_bfloat16() -> None:
    mask = {"mask": torch.full((2, 2), torch.finfo(torch.float32).min)}
    with Publisher(settings=Settings(dtype="bf16")) as publisher:
        receipt = publisher.publish("m", mask, require=0)
    assert receipt.detail == "mask: 4 finite values are beyond BF16 (at most 3.38953e+38)"
