"""What travels in another precision than the trainer's: what is converted, to which values."""

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from weightbus import Publisher, PublishError, Settings, StateError, Subscriber
from weightbus.codecs.dtypes import numpy_dtype, torch_dtype
from weightbus.codecs.precision import Precision, precision_of
from weightbus.codecs.state import State, Writer, state_of
from weightbus.python_client.cli.commands import app
from weightbus.python_client.publishing.models import PublishedModel
from weightbus.tests.client.test_bus import SECONDS, Bus, both
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.conformance.vectors import cast_fault
from weightbus.tests.protocol.test_vectors import Case, named, table

SIZE = 2**21  # numbers, of a model whose copy would show in memory


class Net(nn.Module):
    """Parameters, some of them tied; buffers in float, in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight


def dtypes(asked: object, source: object) -> dict[str, str]:
    """Return what each tensor would travel as, where that is not F32."""
    state, precision = state_of(source), precision_of(asked)
    assert precision is not None
    signatures = precision.form_of(state, source).signatures
    return {name: dtype for name, (dtype, _) in signatures.items() if dtype not in ("F32", "I64")}


def test_parameters_are_converted_and_buffers_are_not() -> None:
    names = ("first.bias", "first.weight", "last.bias", "norm.bias", "norm.weight")
    assert dtypes("bf16", Net()) == dict.fromkeys(names, "BF16")
    assert dtypes("float16", Net()) == dict.fromkeys(names, "F16")
    everything = state_of(Net()).signatures
    mapping = {name: tensor.detach() for name, tensor in Net().state_dict().items()}
    floats = {name for name, (dtype, _) in everything.items() if dtype == "F32"}
    assert dtypes("bf16", mapping).keys() == floats, "a mapping does not know its buffers"


def test_patterns_name_buffers_too_and_the_first_that_matches_counts() -> None:
    asked = {"*.bias": "f32", "norm.*": "bf16", "last.weight": "f16"}
    norm = ("norm.running_mean", "norm.running_var", "norm.weight")
    assert dtypes(asked, Net()) == dict.fromkeys(norm, "BF16") | {"first.weight": "F16"}


@pytest.mark.parametrize("pattern", ["frist.*", "norm.num_batches_tracked", "first.bias"])
def test_a_pattern_that_converts_nothing_is_named(pattern: str) -> None:
    with pytest.raises(StateError, match=f"'{pattern}' matches no tensor"):
        dtypes({"*.bias": "f32", pattern: "bf16"}, Net())


@pytest.mark.parametrize("asked", ["bf61", "I32", torch.bfloat16, 16, {"w": "u8"}])
def test_what_is_no_precision_is_refused(asked: object) -> None:
    with pytest.raises(ValueError, match=r"dtype=.*: give one of .*bf16.*, or a mapping"):
        precision_of(asked)


def test_nothing_asked_is_nothing_done() -> None:
    assert precision_of(None) is None
    assert precision_of({}) is None
    state = state_of({"w": np.zeros(2, ml_dtypes.bfloat16)})
    assert Precision("BF16").form_of(state, {}) is state.form, "and the outline still holds"


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("case", table("casts.json"), ids=named)
def test_values_are_those_of_a_cast(case: Case, kind: str, hashed: bool) -> None:
    array = np.frombuffer(bytes.fromhex(case["in"]), numpy_dtype(case["from"])).copy()
    tensor = torch.from_numpy(array.view(np.uint8)).view(torch_dtype(case["from"]))
    source: Any = array if kind == "numpy" else tensor
    state = state_of({"v": source})
    state = State(Precision(case["to"]).form_of(state, {}), state.leaves)
    layout = state.layout()
    out = np.zeros(layout.nbytes, np.uint8)
    writer = Writer(layout, out)
    writer.begin(state, chunk_bytes=2**20 if hashed else 0)
    assert cast_fault(case, {"out": out.tobytes().hex()}) == ""


def test_there_is_never_a_second_copy() -> None:
    model, weights = PublishedModel("m", 2**20, share=False), {"w": np.ones(SIZE, np.float32)}
    precision = precision_of("bf16")
    model.reserve(weights, "bf16")
    tracemalloc.start()
    try:
        offer, _ = model.snapshot(
            weights, replaces_latest=True, precision=precision, hashed=lambda: True
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert offer.layout.nbytes == 2 * SIZE
    assert offer.chunks.digest
    assert peak < 2 * SIZE // 4


def test_a_worker_of_another_dtype_is_told_what_to_do(bus: Bus) -> None:
    publisher = bus.publisher()
    bus.subscriber(publisher, {"w": torch.zeros(3)}, name="w")
    with pytest.raises(PublishError, match=r"dtype BF16 published, F32 here \(cast=True converts"):
        publisher.publish(
            "m", {"w": torch.ones(3)}, settings=Settings(dtype="bf16"), timeout=SECONDS
        )


def test_half_the_bytes_arrive_and_what_is_asked_may_change(bus: Bus) -> None:
    publisher, source = bus.publisher(), Net()
    with torch.no_grad():
        source.first.weight += 1e-3
    target = Net()
    subscriber = bus.subscriber(publisher, target, cast=True)
    publisher.prepare("m", source, settings=Settings(dtype="bf16"))
    halves = list[int]()
    for dtype in ("bf16", "bf16", None, {"norm.running_*": "f16"}):
        _, update = both(publisher, subscriber, source, dtype=dtype)
        halves.append(update.nbytes)
        sent = source.first.weight.bfloat16().float() if dtype == "bf16" else source.first.weight
        assert torch.equal(target.first.weight, sent)
    floats, ints = 9 + 3 * 4 + 2 * 3, 8
    own = 4 * floats + ints
    assert halves == [own - 2 * 21, own - 2 * 21, own, own - 2 * 6]


def test_a_rollback_converts_nothing(tmp_path: Path) -> None:
    with Publisher(state=tmp_path, settings=Settings(dtype="f16")) as publisher:
        receipt = publisher.publish("m", {"w": np.ones(3, np.float32)})
        key = receipt.epoch, receipt.version
        wait_for(lambda: publisher.history("m"), "the disk", SECONDS)
        with pytest.raises(ValueError, match="a rollback publishes the older version's bytes"):
            publisher.rollback("m", key, settings=Settings(dtype="bf16"))
        assert publisher.history("m")[0].nbytes == 6
        assert publisher.rollback("m", key).version == 2


@pytest.mark.parametrize(
    ("words", "expect"),
    [
        (["bf16"], {"a": "bfloat16", "b": "bfloat16"}),
        (["a=bf16"], {"a": "bfloat16", "b": "float32"}),
        (["b=f32", "f16"], {"a": "float16", "b": "float32"}),
    ],
)
def test_the_command_line(tmp_path: Path, words: list[str], expect: dict[str, str]) -> None:
    path, out, address = tmp_path / "m.safetensors", tmp_path / "out", f"ipc://{tmp_path}/bus"
    save_file({"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, path)
    options = [word for each in words for word in ("--dtype", each)]
    with Subscriber(address, {"m": out}).start():
        command = ["publish", str(path), "--model", "m", "--bind", address, *options]
        assert CliRunner().invoke(app, command).exit_code == 0
    assert {name: str(array.dtype) for name, array in load_file(out).items()} == expect


def test_the_command_line_refuses_what_is_no_dtype(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    command = ["publish", str(tmp_path / "m.safetensors"), "--model", "m", "--dtype", "a=int8"]
    result = CliRunner().invoke(app, [*command, "--bind", "tcp://127.0.0.1:0"])
    assert result.exit_code == 2
    assert "dtype='int8': give one of" in result.stderr
