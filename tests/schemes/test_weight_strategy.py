"""A strategy takes all of a model, and puts all of it into another, or nothing."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weightbus.codecs.torch_modules import take_out_of_shared_memory
from weightbus.python_client.schemes.strategy import DestinationError
from weightbus.tests.schemes.scheme_worker import Net, Statistics, fill, values
from weightbus.torchrl import WeightStrategy

NAMES = {
    "first.weight",
    "first.bias",
    "second.weight",
    "second.bias",
    "kept",
    "statistics._extra_state.count",
    "statistics._extra_state.by%2Ename.mean",
}


def test_tensordict_takes_every_buffer_and_all_extra_state() -> None:
    assert set(WeightStrategy().tensors_of(Net())) == NAMES | {"passing"}


def test_state_dict_takes_what_state_dict_holds() -> None:
    assert set(WeightStrategy("state_dict").tensors_of(Net())) == NAMES


def test_extracted_weights_share_the_memory_and_have_the_form_that_was_asked_for() -> None:
    net = Net()
    td = WeightStrategy().extract_weights(net)
    assert isinstance(td, TensorDict)
    assert td["first", "weight"].data_ptr() == net.first.weight.data_ptr()
    assert td["statistics", "__extra_state__", "count"].shape == ()
    plain = WeightStrategy("state_dict").extract_weights(net)
    assert type(plain) is dict
    assert plain["first.weight"].data_ptr() == net.first.weight.data_ptr()


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
@pytest.mark.parametrize("inplace", [True, False])
def test_what_one_extracts_another_applies(form: Any, inplace: bool) -> None:
    strategy = WeightStrategy(form)
    source, target = fill(Net(), 3.0), Net()
    fill(target, 1.0)
    target.passing.fill_(3.0)  # not in a state_dict
    old = target.first.weight
    strategy.apply_weights(target, strategy.extract_weights(source), inplace)
    assert values(target) == {3.0}
    assert (target.first.weight is old) == inplace
    assert target.second.weight is target.first.weight
    assert target.first.weight.requires_grad


def test_applying_twice_leaves_the_weights_that_were_given_alone() -> None:
    strategy = WeightStrategy()
    weights = strategy.extract_weights(fill(Net(), 2.0))
    before = set(weights.keys(True, True))
    for _ in range(2):
        target = Net()
        strategy.apply_weights(target, weights)
        assert values(target) == {2.0}
    assert set(weights.keys(True, True)) == before


def test_a_buffer_that_is_not_persistent_need_not_be_published() -> None:
    target = Net()
    WeightStrategy().apply_weights(target, fill(Net(), 2.0).state_dict() | _extra(2.0))
    assert values(target) == {2.0, 0.0}  # `passing` is as it was


def _extra(value: float) -> dict[str, Any]:
    state = {"count": torch.tensor(int(value)), "by%2Ename": {"mean": torch.full((2,), value)}}
    return {"statistics._extra_state": state}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("first.bias"), "first.bias"),
        (lambda w: w.update({"third": torch.zeros(1)}), "third"),
        (lambda w: w.update({"first.bias": torch.zeros(1)}), "first.bias"),  # would broadcast
        (lambda w: w.update({"kept": torch.zeros(2, dtype=torch.complex64)}), "kept"),
        (lambda w: [w.pop(n) for n in list(w) if "_extra_state" in n], "statistics._extra_state"),
    ],
)
def test_what_does_not_fit_changes_nothing(change: Any, named: str) -> None:
    target = fill(Net(), 1.0)
    weights = WeightStrategy("state_dict").extract_weights(fill(Net(), 2.0))
    change(weights)
    with pytest.raises(DestinationError, match=named) as caught:
        WeightStrategy().apply_weights(target, weights)
    assert isinstance(caught.value, KeyError)
    assert str(caught.value).startswith("Error updating destination: ")
    assert values(target) == {1.0}


def test_names_of_one_side_only_are_passed_over_if_asked_for() -> None:
    target = fill(Net(), 1.0)
    weights = {"first.bias": torch.full((3,), 2.0), "third": torch.zeros(1)}
    WeightStrategy().apply_weights(target, weights, strict=False)
    assert set(target.first.bias.tolist()) == {2.0}
    assert set(target.second.bias.tolist()) == {1.0}


def test_extra_state_that_refuses_leaves_everything_as_it_was() -> None:
    class Refusing(Statistics):
        def set_extra_state(self, state: dict[str, Any]) -> None:
            if int(state["count"]) == 2:
                raise RuntimeError("not this one")
            super().set_extra_state(state)

    target = Net()
    target.later = Refusing()
    fill(target, 1.0)
    source = copy.deepcopy(target)
    fill(source, 2.0)
    assert isinstance(source.later, Refusing)
    source.later.state["count"].fill_(2)
    with pytest.raises(RuntimeError, match="not this one"):
        WeightStrategy().apply_weights(target, source)
    assert values(target) == {1.0}


def test_extra_state_that_is_a_tensor() -> None:
    class Stepping(nn.Module):
        step = torch.zeros(())

        def get_extra_state(self) -> torch.Tensor:
            return self.step

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.step = state

    source, target = Stepping(), Stepping()
    source.step = torch.tensor(7.0)
    WeightStrategy().apply_weights(target, source)
    assert target.step == 7.0
    source.step.fill_(8.0)
    assert target.step == 7.0


def test_extra_state_of_another_kind_is_named() -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> object:
            return {"name": "text"}

    with pytest.raises(ValueError, match=r"inner\._extra_state\.name.*str"):
        WeightStrategy().tensors_of(nn.ModuleDict({"inner": Odd()}))


def test_a_module_on_the_meta_device_is_given_memory() -> None:
    with torch.device("meta"):
        target = Net()
    WeightStrategy().apply_weights(target, fill(Net(), 2.0))
    assert values(target) == {2.0}
    assert target.second.weight is target.first.weight


def test_mappings_and_tensordicts_are_destinations() -> None:
    strategy = WeightStrategy()
    weights = {"a": {"b": torch.ones(2)}}
    arrays: dict[str, Any] = {"a": {"b": np.zeros(2, np.float32)}}
    tensors = TensorDict({"a": {"b": torch.zeros(2)}})
    strategy.apply_weights(arrays, weights)
    strategy.apply_weights(tensors, weights)
    assert arrays["a"]["b"].tolist() == tensors["a", "b"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="Cannot update state_dict out of place"):
        strategy.apply_weights(arrays, weights, inplace=False)


def test_adapters_are_merged_into_a_copy() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(2, 2)

        def merge_and_unload(self) -> nn.Module:
            return fill(self.base, 9.0)

    adapted = Adapted()
    fill(adapted, 1.0)
    assert WeightStrategy("state_dict").extract_weights(adapted)["weight"].unique().item() == 9.0
    assert values(adapted) == {1.0}


def test_it_equals_its_name_and_refuses_others() -> None:
    assert WeightStrategy("state_dict") == "state_dict"
    assert WeightStrategy() == WeightStrategy("tensordict") != WeightStrategy("state_dict")
    assert str(WeightStrategy()) == "tensordict"
    with pytest.raises(ValueError, match="extract_as must be 'tensordict' or 'state_dict', got x"):
        WeightStrategy("x")  # type: ignore[arg-type]  # pyright: ignore


def test_what_has_no_weights() -> None:
    assert WeightStrategy().tensors_of(object()) == {}
    target = fill(Net(), 1.0)
    WeightStrategy().apply_weights(target, None)
    with pytest.raises(ValueError, match="Unsupported weights type"):
        WeightStrategy().apply_weights(target, 3)
    assert values(target) == {1.0}


def test_a_model_in_shared_memory_gets_memory_of_its_own_and_stays_tied() -> None:
    net = nn.Module()
    whole = torch.arange(8.0).share_memory_()
    net.first = nn.Parameter(whole[2:6].view(2, 2).t())
    net.second = nn.Parameter(whole[4:8], requires_grad=False)  # overlaps with the first
    net.register_buffer("unshared", torch.ones(2))
    kept, before = net.first, (net.first.detach().clone(), net.second.detach().clone())
    unshared = net.get_buffer("unshared").data_ptr()
    take_out_of_shared_memory(net)
    whole.fill_(-1.0)
    assert net.first is kept
    assert torch.equal(net.first, before[0])
    assert torch.equal(net.second, before[1])
    with torch.no_grad():
        net.second[0] = 9.0
    assert net.first[0, 1] == 9.0, "they are one memory no more"
    assert net.get_buffer("unshared").data_ptr() == unshared
