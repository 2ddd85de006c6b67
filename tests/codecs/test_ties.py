"""Names that stand for one tensor, at the publisher, the worker or both; tensors that overlap."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import nn

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.codecs import native
from weightbus.codecs.apply import Reader, check, copy_into, summing
from weightbus.codecs.dtypes import numpy_dtype
from weightbus.codecs.errors import StateError
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import state_of
from weightbus.python_client.applying.loading import Pairs
from weightbus.python_client.applying.resident import ResidentMemory, residence_of
from weightbus.python_client.schemes.strategy import DestinationError, WeightStrategy
from weightbus.tests.client.settling import settled
from weightbus.tests.codecs.test_codecs_apply import published
from weightbus.tests.protocol.test_vectors import Case, named, table

SECONDS = 60.0


class Tied(nn.Module):
    """What checkpoints leave `lm_head.weight` out of."""

    def __init__(self, value: float = 0.0, *, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


def one(value: float) -> torch.Tensor:
    return torch.full((5, 3), float(value))


def module() -> object:
    return Tied()


def numpy_arrays() -> object:
    w = np.zeros((5, 3), np.float32)
    return {"embed": {"weight": w}, "lm_head.weight": w[:]}


def tensors() -> object:
    w = torch.zeros(5, 3)
    return {"embed.weight": w, "lm_head.weight": w.view(5, 3)}


def both_kinds() -> object:
    w = torch.zeros(5, 3)
    return {"embed.weight": w, "lm_head.weight": w.numpy()}


def tensordict() -> object:
    return TensorDict.from_module(Tied())


def resident_module() -> object:
    model = Tied()
    residence_of(model, state_of(model).layout())
    return model


TARGETS = [module, numpy_arrays, tensors, both_kinds, tensordict, resident_module]


def values_of(target: object) -> set[float]:
    values: set[float] = set()
    for leaf in state_of(target).tensors.values():
        values.update(torch.as_tensor(leaf).detach().flatten().tolist())
    return values


@pytest.mark.parametrize("made", TARGETS)
@pytest.mark.parametrize("strict", [True, "target", False])
@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
def test_one_published_name_fills_what_is_one_tensor(
    made: Callable[[], object], strict: Any, name: str
) -> None:
    target = made()
    source = published({name: one(2)})
    assert check(source[0], target, strict=strict) == []
    copy_into(*source, target, strict=strict)
    assert values_of(target) == {2}


@pytest.mark.parametrize("made", TARGETS)
def test_names_with_equal_bytes_fill_what_is_one_tensor_in_every_version_or_none(
    made: Callable[[], object],
) -> None:
    target = made()
    layout, data = published({"embed.weight": one(2), "lm_head.weight": one(2)})
    reader = Reader(layout, data)
    for strict in (True, "target"):
        reader.copy_into(target, strict=strict)
        assert values_of(target) == {2}
    data.view(np.float32)[:] = 3
    reader.copy_into(target, strict="target")
    assert values_of(target) == {3}
    data.view(np.float32)[-1] = 4  # the same reader, which has seen that all fits
    with pytest.raises(StateError, match=r"'embed.weight' and 'lm_head.weight' are one tensor"):
        reader.copy_into(target, strict="target")
    assert values_of(target) == {3}
    differ = reader.differences(target, strict="target", cast=False)
    with pytest.raises(StateError, match="are one tensor"):
        reader.copy_into(target, strict="target", only=differ)
    assert values_of(target) == {3}


@pytest.mark.parametrize("made", TARGETS)
def test_what_is_cast_fills_what_is_one_tensor(made: Callable[[], object]) -> None:
    target = made()
    layout, data = published({"lm_head.weight": one(2).double()})
    assert len(check(layout, target)) == 1, "of the dtype alone"
    copy_into(layout, data, target, cast=True)
    assert values_of(target) == {2}


def test_a_module_without_memory_is_filled_by_either_name() -> None:
    for name in ("embed.weight", "lm_head.weight"):
        with torch.device("meta"):
            target = Tied()
        copy_into(*published({name: one(2)}), target)
        assert values_of(target) == {2}
        assert target.lm_head.weight is target.embed.weight
    with torch.device("meta"):
        untied = Tied(tie=False)
    assert check(published({"embed.weight": one(2)})[0], untied)[1:] == [
        "lm_head.weight: F32 [5, 3] in the target, not published"
    ]


def test_what_no_published_tensor_reaches_is_refused() -> None:
    layout, _ = published({"embed.weight": one(2)})
    lines = ["lm_head.weight: F32 [5, 3] in the target, not published"]
    for strict in (True, "target"):
        assert check(layout, Tied(tie=False), strict=strict)[-1:] == lines
    w = torch.zeros(30)
    like = {
        "the next bytes": w[15:].view(5, 3),
        "another shape": w[:15],
        "another order": w[:15].view(3, 5).T,
        "another dtype": w[:15].view(5, 3).view(torch.int32),
    }
    for what, leaf in like.items():
        target = {"embed.weight": w[:15].view(5, 3), "lm_head.weight": leaf}
        assert [line[:15] for line in check(layout, target)[1:]] == ["lm_head.weight:"], what


def test_a_published_tensor_may_be_in_the_target_by_any_of_its_names() -> None:
    layout, data = published(Tied(2.0))
    assert layout.aliases
    for name in ("embed.weight", "lm_head.weight"):
        target = {name: torch.zeros(5, 3)}
        copy_into(layout, data, target)
        assert values_of(target) == {2}
    assert check(layout, {}) == [
        f"{name}: published as F32 [5, 3], not in the target"
        for name in ("embed.weight", "lm_head.weight")
    ]


def test_ties_on_one_side_are_verified_as_what_they_are() -> None:
    layout, data = published(Tied(2.0))
    target = {"embed.weight": one(2)}
    sums: list[int | None] = []
    for _ in summing(layout, target, layout.sorted_names, sums):
        pass
    assert sums == [crc32c(data)] * 2


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
@pytest.mark.parametrize("inplace", [True, False])
def test_schemes_take_ties_on_one_side(form: Any, inplace: bool) -> None:
    strategy, target = WeightStrategy(form), Tied()
    strategy.apply_weights(target, {"lm_head.weight": one(2)}, inplace)
    assert values_of(target) == {2}
    assert target.lm_head.weight is target.embed.weight
    with pytest.raises(DestinationError, match="not published"):
        strategy.apply_weights(Tied(tie=False), {"lm_head.weight": one(2)})


def test_a_tied_model_can_be_resident_by_a_layout_with_one_of_its_names() -> None:
    for source in ({"embed.weight": one(2)}, {"lm_head.weight": one(2)}, Tied(2.0)):
        model = Tied()
        assert isinstance(residence_of(model, published(source)[0]), ResidentMemory)
        assert model.lm_head.weight is model.embed.weight
    for source in (Tied(tie=False), {"embed.weight": one(2), "other": one(2)}, {"other": one(2)}):
        with pytest.raises(StateError, match="exactly the published tensors"):
            residence_of(Tied(), published(source)[0])
    with pytest.raises(StateError, match="exactly the published tensors"):
        residence_of(Tied(tie=False), published(Tied())[0])


@pytest.mark.parametrize("case", table("ties.json"), ids=named)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_vectors(case: Case, kind: str) -> None:
    memory = np.zeros(case["memory"], np.uint8)
    target: dict[str, Any] = {}
    for name, at in case["target"].items():
        count = int(np.prod(at["shape"]))
        flat = memory[at["at"] : at["at"] + count].view(numpy_dtype(at["dtype"]))
        array = flat.reshape(at["shape"])
        target[name] = array if kind == "numpy" else torch.from_numpy(array)
    text = case["layout"].encode()
    layout = Layout.parse(len(text).to_bytes(8, "little") + text)
    data = np.frombuffer(bytes.fromhex(case["data"]), np.uint8)
    strict: Any = "target" if case["partial"] else True
    error, lines = case["expect"].get("error"), check(layout, target, strict=strict)
    if error in ("layout", "memory"):
        assert lines
        assert all(("share a part" in line) == (error == "memory") for line in lines)
        assert not memory.any()
        return
    assert lines == []
    if error == "differ":
        with pytest.raises(StateError, match="are one tensor"):
            copy_into(layout, data, target, strict=strict)
        assert not memory.any()
    else:
        copy_into(layout, data, target, strict=strict)
        assert memory.tobytes().hex() == case["expect"]["ok"]


OVERLAPPING = {
    "parts": lambda f: (f[:6], f[2:]),
    "one in the other": lambda f: (f, f[2:4]),
    "a transpose": lambda f: (f[:4].reshape(2, 2), f[:4].reshape(2, 2).T),
    "another shape": lambda f: (f, f.reshape(2, 4)),
    "columns and a row": lambda f: (f.reshape(2, 4)[:, :3], f.reshape(2, 4)[1]),
}
APART = {
    "neighbours": lambda f: (f[:3], f[3:]),
    "columns": lambda f: (f.reshape(2, 4)[:, :2], f.reshape(2, 4)[:, 2:]),
    "every other": lambda f: (f[::2], f[1::2]),
    "nothing and all": lambda f: (f[3:3], f),
    "two": lambda f: (f, f + 0),
}
KINDS = {
    "numpy": lambda a, b: {"a": a.numpy(), "b": b.numpy()},
    "tensors": lambda a, b: {"a": a, "b": b},
    "both": lambda a, b: {"a": a, "b": b.numpy()},
    "tensordict": lambda a, b: TensorDict({"a": a, "b": b}),
    "module": lambda a, b: nn.ParameterDict({"a": nn.Parameter(a), "b": nn.Parameter(b)}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [*OVERLAPPING, *APART])
def test_tensors_that_overlap_in_part_are_refused_by_name(kind: str, how: str) -> None:
    a, b = (OVERLAPPING | APART)[how](torch.zeros(8))
    target = KINDS[kind](a, b)
    layout, data = published(
        {"a": torch.ones(a.shape), "b": torch.ones(b.shape), "c": torch.ones(1)}
    )
    lines = check(layout, target, strict="target")
    if how in APART:
        assert lines == []
        copy_into(layout, data, target, strict="target")
        assert values_of({"a": a, "b": b}) == {1}
        return
    assert [line[:40] for line in lines] == ["a and b: share a part of their memory in"]
    with pytest.raises(StateError, match="a and b: share a part"):
        copy_into(layout, data, target, strict="target")
    assert values_of({"a": a, "b": b}) == {0}
    assert check(published({"a": torch.ones(a.shape)})[0], target, strict=False) == []
    with pytest.raises(DestinationError, match="a and b: share a part"):
        WeightStrategy().apply_weights(target, {"a": torch.ones(a.shape), "b": torch.ones(b.shape)})


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_checkpoint_without_the_head_goes_into_every_kind_of_target(
    tmp_path: Path, *, shared_memory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[dict[str, float]] = []

    def load(pairs: Pairs) -> None:
        seen.append({name: float(tensor[-1, -1]) for name, tensor in pairs})

    model, moved, arrays, path = Tied(), Tied(), numpy_arrays(), tmp_path / "m.safetensors"
    with (
        Publisher(settings=Settings(shared_memory=shared_memory)) as publisher,
        ExitStack() as stack,
    ):

        def join(target: object, **options: Any) -> None:
            worker = Subscriber(publisher.address, {"m": target}, **settled(options))
            stack.enter_context(worker).start()

        join(model, strict=False)
        join(moved, resident=True)
        join(arrays)
        join(path)
        join(load)
        publisher.wait_for_workers(5, SECONDS)
        for value in (1, 2):
            publisher.publish("m", {"embed.weight": one(value)}, timeout=SECONDS)
            for target in (model, moved, arrays, load_file(path)):
                assert values_of(target) == {value}
            assert seen.pop() == {"embed.weight": value}
        copied = any("exchanged" in message for message in caplog.messages)
        assert copied == (not native.BUILT and not shared_memory), "it is resident where it can be"
        both = {"embed.weight": one(3), "lm_head.weight": one(3)}
        publisher.publish("m", both, timeout=SECONDS)
        for target in (model, moved, arrays, load_file(path)):
            assert values_of(target) == {3}
        both["lm_head.weight"][0] = 4
        with pytest.raises(PublishError, match="are one tensor in the target"):
            publisher.publish("m", both, timeout=SECONDS)
        for target in (model, moved, arrays):
            assert values_of(target) == {3}
        assert values_of(load_file(path)) == {3, 4}


def test_patches_of_what_the_target_ties() -> None:
    def source(value: float) -> dict[str, torch.Tensor]:
        w = torch.arange(300_000.0).view(-1, 3)
        w[::1000] += value
        return {"embed.weight": w, "lm_head.weight": w.clone()}

    w = torch.zeros(100_000, 3)
    target = {"embed.weight": w, "lm_head.weight": w.view(100_000, 3)}
    with (
        Publisher(settings=Settings(shared_memory=False)) as publisher,
        Subscriber(
            publisher.address, {"m": target}, name="w", settings=Settings(shared_memory=False)
        ) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        for value in range(4):
            receipt = publisher.publish(
                "m", source(value), settings=Settings(encoding="delta"), timeout=SECONDS
            )
            assert receipt.workers["w"].encoding == ("delta-1" if value else "raw")
            assert torch.equal(w, source(value)["embed.weight"])
        other = source(5)
        other["lm_head.weight"][7] += 1
        with pytest.raises(PublishError, match="are one tensor in the target"):
            publisher.publish("m", other, settings=Settings(encoding="delta"), timeout=SECONDS)
        assert torch.equal(w, source(3)["embed.weight"])


def test_a_worker_whose_tensors_overlap_says_so() -> None:
    f = np.zeros(8, np.float32)
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"m": {"a": f[:6], "b": f[2:]}}) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        source = {"a": np.ones(6, np.float32), "b": np.zeros(6, np.float32)}
        with pytest.raises(PublishError, match="a and b: share a part of their memory"):
            publisher.publish("m", source, timeout=SECONDS)
        assert not f.any()
