"""A version is applied in place, whole or not at all, to whatever kind of target there is."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictParams
from torch import nn

from weightbus.codecs.apply import Reader, as_tensors, check, copy_into
from weightbus.codecs.errors import StateError
from weightbus.codecs.layout import Layout
from weightbus.codecs.state import state_of, write_into

Version = tuple[Layout, np.ndarray[Any, np.dtype[np.uint8]]]


def published(source: object) -> Version:
    state = state_of(source)
    data = np.zeros(state.layout().nbytes, np.uint8)
    write_into(state, state.layout(), data)
    return Layout.parse(state.layout().header), data


class Extra(nn.Module):
    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel() == 13:
            raise RuntimeError("unlucky")
        self.extra = state


class Net(nn.Module):
    """Tied weights, buffers of both kinds, extra state, an empty and a 0-d tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.extra = Extra(torch.rand(2))
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)
        self.register_buffer("none", torch.zeros(0, 7))
        self.register_buffer("scratch", torch.ones(1), persistent=False)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_module_keeps_its_memory_and_its_requires_grad() -> None:
    trainer, worker = Net(), Net()
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in worker.named_parameters()}
    copy_into(*published(trainer), worker)
    assert_same(worker, trainer)
    assert before == {n: (p.data_ptr(), p.requires_grad) for n, p in worker.named_parameters()}
    assert worker.head.weight is worker.embed.weight
    assert worker.extra.extra.data_ptr() != trainer.extra.extra.data_ptr()


def test_extra_state_may_change_its_shape_and_is_set_before_anything_is_written() -> None:
    trainer, worker = Net(), Net()
    trainer.extra.extra = torch.rand(3, 3)
    copy_into(*published(trainer), worker)
    assert_same(worker, trainer)
    trainer, before = Net(), copy.deepcopy(worker)
    trainer.extra.extra = torch.rand(13)
    with pytest.raises(RuntimeError, match="unlucky"):
        copy_into(*published(trainer), worker)
    assert_same(worker, before)


def test_a_meta_module_is_given_memory_and_stays_tied() -> None:
    trainer = Net()
    with torch.device("meta"):
        worker = Net()
    del worker.scratch
    worker.scale.tag = "pinned by a framework"  # type: ignore[attr-defined]
    version = published(trainer)
    assert check(version[0], worker) == []
    assert worker.embed.weight.is_meta, "check must not modify the target"
    copy_into(*version, worker)
    assert_same(worker, trainer)
    assert worker.head.weight is worker.embed.weight
    assert not worker.scale.requires_grad
    assert worker.embed.weight.requires_grad
    assert worker.scale.tag == "pinned by a framework"  # type: ignore[attr-defined]
    assert isinstance(worker.scale, nn.Parameter)
    pointer = worker.embed.weight.data_ptr()
    copy_into(*published(Net()), worker)
    assert worker.embed.weight.data_ptr() == pointer


def test_a_module_that_is_partly_on_meta_keeps_the_rest() -> None:
    trainer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    real = nn.Linear(2, 2)
    worker = nn.Sequential(real, nn.Linear(2, 2, device="meta"))
    pointer = real.weight.data_ptr()
    copy_into(*published(trainer), worker)
    assert_same(worker, trainer)
    assert real.weight.data_ptr() == pointer


def test_a_lost_buffer_on_meta_is_named() -> None:
    with torch.device("meta"):
        worker = nn.ModuleDict({"net": Net()})
    lines = check(published({"net": Net().state_dict()})[0], worker)
    assert [line[:52] for line in lines] == ["net.scratch: a buffer on the meta device that is not"]


@pytest.mark.parametrize("kind", [dict, TensorDict, lambda d: TensorDictParams(TensorDict(d))])
def test_mappings_of_tensors(kind: Any) -> None:
    version = published({"a": {"b": torch.rand(3)}, "c": torch.rand(2, 2)})
    target = kind({"a": {"b": torch.zeros(3)}, "c": torch.zeros(2, 2)})
    pointer = target["a"]["b"].data_ptr()
    copy_into(*version, target)
    read = as_tensors(*version)
    assert torch.equal(target["a"]["b"], read["a.b"])
    assert torch.equal(target["c"], read["c"])
    assert target["a"]["b"].data_ptr() == pointer


def test_a_locked_tensordict_of_a_module_writes_through() -> None:
    trainer, worker = nn.Linear(2, 2), nn.Linear(2, 2)
    copy_into(*published(trainer), TensorDict.from_module(worker, lock=True))
    assert_same(worker, trainer)


def test_numpy_torch_and_mixed_targets() -> None:
    version = published({"a": torch.arange(6.0).view(2, 3), "b": np.arange(3)})
    target: dict[str, Any] = {"a": np.zeros((3, 2), np.float32).T, "b": torch.zeros(3).long()}
    copy_into(*version, target)
    assert target["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target["b"].tolist() == [0, 1, 2]


def test_inference_tensors_and_grads_are_no_obstacle() -> None:
    with torch.inference_mode():
        frozen = torch.zeros(2)
    target = {"x": frozen, "y": nn.Parameter(torch.zeros(2))}
    copy_into(*published({"x": torch.ones(2), "y": torch.ones(2)}), target)
    assert frozen.tolist() == target["y"].tolist() == [1, 1]
    assert target["y"].requires_grad
    assert target["y"].is_leaf


def test_a_cast_is_made_only_if_allowed() -> None:
    version = published({"x": torch.tensor([1.0, 2.5]), "n": np.int32(7)})
    target: dict[str, Any] = {"x": torch.zeros(2).bfloat16(), "n": np.zeros((), np.int64)}
    assert check(version[0], target) == [
        "n: dtype I32 published, I64 here (cast=True converts it)",
        "x: dtype F32 published, BF16 here (cast=True converts it)",
    ]
    with pytest.raises(StateError, match="does not fit the target:\nn: dtype I32"):
        copy_into(*version, target)
    copy_into(*version, target, cast=True)
    assert target["x"].tolist() == [1.0, 2.5]
    assert target["n"] == 7


def test_without_strict_only_shared_names_count() -> None:
    version = published({"x": torch.ones(1), "y": torch.ones(1), "e._extra_state": torch.ones(1)})
    target: dict[str, Any] = {"y": torch.zeros(1), "z": torch.zeros(1, device="meta")}
    assert len(check(version[0], target)) == 4
    copy_into(*version, target, strict=False)
    assert target["y"].tolist() == [1]


def test_a_mismatch_leaves_everything_as_it_was() -> None:
    trainer, worker = nn.Linear(2, 2), nn.Linear(2, 3)
    before = copy.deepcopy(worker)
    with pytest.raises(StateError, match=r"bias: shape \[2\] published, \[3\] here\nweight"):
        copy_into(*published(trainer), worker)
    assert_same(worker, before)


def test_a_long_mismatch_is_trimmed() -> None:
    version = published({f"{n:03}": torch.zeros(1) for n in range(30)})
    assert len(check(version[0], {})) == 30
    with pytest.raises(StateError, match=r"and 11 more$") as caught:
        copy_into(*version, {})
    assert len(str(caught.value).splitlines()) == 21


def read_only() -> Any:
    array = np.zeros(2, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"x": torch.zeros(1).expand(2)}, "x: expanded, so that elements share memory"),
        ({"x": torch.zeros(2, device="meta")}, "x: on the meta device"),
        ({"x": read_only()}, "x: the array is read-only"),
        ({"x": np.broadcast_to(np.float32(0), (2,))}, "x: the array is read-only"),
        ({"x": np.float32(0)}, "x: a float32 hands out copies"),
        ({"x": 1}, "x: a int cannot travel"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, "x: torch.complex128 has no"),
        (LazyStackedTensorDict(TensorDict({"x": torch.zeros(())})), "a LazyStackedTensorDict"),
        (torch.zeros(2), "a Tensor cannot travel"),
    ],
)
def test_targets_that_cannot_be_written_to_are_named(target: object, words: str) -> None:
    lines = check(published({"x": torch.ones(2)})[0], target)
    assert [line[: len(words)] for line in lines] == [words]


def test_tensors_that_a_module_makes_up_are_named() -> None:
    class MadeUp(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"] * 2

    lines = check(published(nn.Linear(2, 2))[0], MadeUp(2, 2))
    assert any("weight: made by state_dict() on the fly" in line for line in lines)


def test_extra_state_that_is_not_a_tensor_at_the_worker_yet() -> None:
    trainer, worker = Extra(torch.ones(1)), Extra(None)  # type: ignore[arg-type]
    version = published(trainer)
    assert check(version[0], worker) == []
    copy_into(*version, worker)
    assert worker.extra.tolist() == [1]
    assert check(published({"a": torch.ones(1)})[0], worker) == [
        "_extra_state: extra state of the target, not published",
        "a: published as F32 [1], not in the target",
    ]


def test_a_reader_sees_what_its_buffer_holds_now() -> None:
    layout, data = published({"x": torch.ones(2)})
    reader, target = Reader(layout, data), {"x": torch.zeros(2)}
    reader.copy_into(target)
    data[:] = 0
    reader.copy_into(target)
    assert target["x"].tolist() == [0, 0]


def test_nothing_is_applied_too() -> None:
    version = published({})
    copy_into(*version, {})
    copy_into(*version, nn.ReLU())
    assert as_tensors(*version) == {}
