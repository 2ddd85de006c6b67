"""What a user calls a model becomes named tensors, or an error that names what cannot travel."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictParams
from torch import nn

from weightbus.codecs.errors import StateError
from weightbus.codecs.state import state_of
from weightbus.python_client.schemes.model import references


def names(source: object) -> list[str]:
    return list(state_of(source).tensors)


def test_a_module_gives_what_its_state_dict_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    state = state_of(model)
    assert set(state.tensors) == set(model.state_dict())
    weight = state.tensors["0.weight"]
    assert isinstance(weight, torch.Tensor)
    assert weight.data_ptr() == model.state_dict()["0.weight"].data_ptr()


def test_nested_mappings_and_tensordicts_are_joined_with_dots() -> None:
    a, b = torch.zeros(1), torch.zeros(2)
    nested = {"x": {"y": a}, "z.w": b}
    assert names(nested) == names(TensorDict({"x": {"y": a}, "z.w": b})) == ["x.y", "z.w"]
    assert names({"td": TensorDict(nested), "n": np.zeros(1)}) == ["n", "td.x.y", "td.z.w"]
    assert names(TensorDictParams(TensorDict({"x": {"y": a}, "z": b}))) == ["x.y", "z"]


def test_a_module_that_holds_tensordict_params_is_a_module() -> None:
    model = nn.Module()
    model.params = TensorDictParams(TensorDict({"x": {"y": torch.zeros(1)}}))
    assert names(model) == ["params.x.y"]


def test_a_lazy_stack_travels_stacked() -> None:
    stack = LazyStackedTensorDict(*(TensorDict({"a": torch.full((2,), n)}) for n in range(3)))
    state = state_of(stack)
    assert state.signatures == {"a": ("I64", (3, 2))}


def test_numpy_scalars_are_0d_arrays() -> None:
    assert state_of({"x": np.float32(1.5)}).signatures == {"x": ("F32", ())}


def test_the_name_that_the_source_has_first_of_a_tied_tensor_is_kept() -> None:
    w, n = torch.zeros(2, 3), np.zeros(4)
    state = state_of({"m": w, "z": w.detach(), "a": nn.Parameter(w), "n": n, "o": n[:]})
    assert list(state.tensors) == ["m", "n"]
    assert state.aliases == {"a": "m", "o": "n", "z": "m"}
    assert state.layout().aliases == state.aliases


@pytest.mark.parametrize("names", ["ab", "ba", "abc", "acb", "cab"])
def test_the_values_are_the_tensors_in_the_order_of_their_names(names: str) -> None:
    a, b = torch.zeros(1), torch.ones(2)
    each = {"a": a, "b": b, "c": a}  # which is tied to the first
    state = state_of({name: each[name] for name in names})
    kept = next(name for name in names if name in "ac")
    assert [id(value) for value in state.values] == (
        [id(a), id(b)] if kept == "a" else [id(b), id(a)]
    )
    assert [*state.tensors] == sorted([kept, "b"])


def test_views_that_are_not_the_same_elements_travel_separately() -> None:
    w = torch.zeros(4, 4, dtype=torch.complex64)
    views = {
        "whole": w,
        "row": w[0],
        "turned": w.T,
        "flat": w.view(16),
        "conjugate": w.conj(),
        "real": w.real,
        "imaginary": w.conj().imag,
        "bits": w.view(torch.float64),
    }
    assert state_of(views).aliases == {}
    n = np.zeros((4, 4))
    assert state_of({"n": n, "t": n.T, "i": n.view(np.int64)}).aliases == {}


def test_empty_tensors_are_never_tied() -> None:
    assert state_of({"a": torch.zeros(0), "b": torch.zeros(0), "c": np.zeros(0)}).aliases == {}


class Extra(nn.Module):
    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_extra_state_travels_if_it_is_a_tensor() -> None:
    model = nn.ModuleDict({"e": Extra(torch.ones(2))})
    assert names(model) == ["e._extra_state"]
    with pytest.raises(StateError, match=r"e\._extra_state: extra state of type dict cannot"):
        state_of(nn.ModuleDict({"e": Extra({"a": 1})}))


def cyclic() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    return loop


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (torch.zeros(1), "^a Tensor cannot travel; give an nn.Module, a TensorDict, or"),
        (np.zeros(1), "^a ndarray cannot travel"),
        (None, "^a NoneType cannot travel"),
        ([torch.zeros(1)], "^a list cannot travel"),
        ({"a": {"b": 1.0}}, "^a.b: a float cannot travel"),
        ({"a": "text"}, "^a: a str cannot travel"),
        ({"a": [torch.zeros(1)]}, "^a: a list cannot travel"),
        ({"a": {1: torch.zeros(1)}}, "^a: the key 1 is not a string"),
        ({1: torch.zeros(1)}, "^the key 1 is not a string"),
        ({"": torch.zeros(1)}, "^'' cannot name a tensor"),
        ({"__metadata__": torch.zeros(1)}, "^'__metadata__' cannot name"),
        ({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, "^a.b: two entries have this name"),
        ({"a" * 5000: torch.zeros(1)}, "cannot travel: .* 5000 bytes; a name has 1 to 4096"),
        ({"\ud800": torch.zeros(1)}, "cannot travel: .* not plain JSON"),
        (cyclic(), "nested deeper than 64 levels"),
        ({"a": torch.zeros(1, device="meta")}, "^a: on the meta device"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "^a: a Tensor of layout torch.sparse_coo"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "^a: torch.complex128 has no safetensors"),
        ({"a": nn.UninitializedParameter()}, "^a: has no shape yet"),
        ({"a": torch.zeros((), dtype=torch.float4_e2m1fn_x2)}, "^a: a 0-d .* has no dimension"),
        ({"a": np.array(["x"])}, "^a: numpy dtype <U1 has no safetensors name"),
        ({"a": np.array([None])}, "^a: numpy dtype object has no"),
        ({"a": np.ma.masked_array([1.0], [True])}, "^a: a masked array"),
        (TensorDict({"t": {"n": NonTensorData("x")}}), "^t.n: a NonTensorData cannot travel"),
    ],
)
def test_what_cannot_travel_is_named(source: object, words: str) -> None:
    with pytest.raises(StateError, match=words):
        state_of(source).layout()


@pytest.mark.filterwarnings("ignore")  # torch warns of both kinds, in words that change
def test_nested_and_quantised_tensors_are_named() -> None:
    ragged = [torch.zeros(1), torch.zeros(2)]
    for kind in (torch.strided, torch.jagged):
        with pytest.raises(StateError, match=r"^a: a \w+ of layout .* not one block of elements"):
            state_of({"a": torch.nested.nested_tensor(ragged, layout=kind)}).layout()
    with pytest.raises(StateError, match=r"^a: torch\.quint8 has no safetensors name"):
        state_of({"a": torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.quint8)}).layout()


@pytest.mark.parametrize("half", ["torch", "torch.nn", "tensordict"])
def test_what_another_thread_is_importing_has_no_kinds_yet(
    monkeypatch: pytest.MonkeyPatch, half: str
) -> None:
    """A worker's thread examines its target while the user's imports: that must not fail."""
    monkeypatch.setitem(sys.modules, half, ModuleType(half))
    assert names({"x": {"y": np.zeros(1)}}) == ["x.y"]
    if half == "tensordict":
        assert names(nn.Linear(1, 1)) == ["bias", "weight"]


def test_a_half_imported_ray_has_no_references_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert references([1]) == []
