"""What was found out about a model is kept only as long as nothing but its values changes."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from weightbus.codecs.apply import Reader, as_arrays, copy_into
from weightbus.codecs.errors import StateError
from weightbus.codecs.state import State, Writer, state_of
from weightbus.tests.codecs.test_codecs_apply import published

Change = Callable[[Any], object]


def model() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 20_000))
    made.get_submodule("0").get_parameter("weight").requires_grad_(False)
    return made


def mapping() -> dict[str, Any]:
    return {"a": torch.rand(4, 4), "b": torch.rand(3), "c": torch.rand(20_000), "n": torch.ones(())}


def arrays() -> dict[str, Any]:
    return {"a": np.ones((4, 4), np.float32), "b": np.arange(3.0), "c": np.zeros(20_000)}


def nested() -> dict[str, Any]:
    return {"a": {"b": torch.rand(3), "c": torch.rand(2, 2)}}


def tensordict() -> Any:
    return TensorDict({"a": {"b": torch.rand(3)}, "c": torch.rand(2, 2)})


def first(source: Any) -> Any:
    """Return one tensor of a source."""
    return state_of(source).values[0]


def bytes_of(state: State) -> dict[str, bytes]:
    """Return what a fresh writer makes of a state."""
    layout = state.layout()
    data = np.zeros(layout.nbytes, np.uint8)
    Writer(layout, data).write(state)
    return {name: array.tobytes() for name, array in as_arrays(layout, data).items()}


@pytest.mark.parametrize("make", [model, mapping, arrays, nested, tensordict])
def test_new_values_are_seen_and_the_form_is_kept(make: Callable[[], Any]) -> None:
    source = make()
    state = state_of(source)
    assert state.form.outline is not None
    layout = state.layout()
    data = np.zeros(layout.nbytes, np.uint8)
    writer = Writer(layout, data)
    writer.write(state)
    for _ in range(3):
        for leaf in state_of(source).values:
            with torch.no_grad():
                leaf += 1
        again = state_of(source, state.form)
        assert again.form is state.form
        assert again.layout(layout) is layout
        writer.write(again)
        read = {name: array.tobytes() for name, array in as_arrays(layout, data).items()}
        assert read == bytes_of(state_of(source))


def put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module.get_parameter(name).data = tensor


def tie(module: Any) -> None:
    module[1].weight = module[0].weight


def swap(module: Any) -> None:
    module[0], module[1] = module[1], module[0]


def rename(module: Any) -> None:
    module.add_module("last", module[3])
    del module[3]


def doubling(module: Any) -> None:
    def hook(_module: object, state: dict[str, Any], *_: object) -> None:
        state["0.weight"] = 2 * state["0.weight"]

    module.register_state_dict_post_hook(hook)


CHANGES: list[tuple[Callable[[], Any], Change]] = [
    (model, lambda m: put(m, "0.weight", torch.rand(4, 4))),
    (model, lambda m: put(m, "0.weight", m[0].weight.data.t())),
    (model, lambda m: put(m, "0.weight", m[0].weight.data.view(2, 8))),
    (model, lambda m: put(m, "0.weight", m[0].weight.data.view(torch.int32))),
    (model, lambda m: put(m, "0.weight", torch.rand(4, 5))),
    (model, lambda m: setattr(m[0], "bias", None)),
    (model, lambda m: setattr(m[0], "bias", nn.Parameter(torch.rand(4)))),
    (model, lambda m: m.append(nn.Linear(1, 1))),
    (model, lambda m: m[0].register_buffer("more", torch.ones(2))),
    (model, lambda m: m.half()),
    (model, tie),
    (model, swap),
    (model, rename),
    (model, doubling),
    (mapping, lambda m: m.update(a=torch.rand(4, 4))),
    (mapping, lambda m: m.update(a=m["a"].t())),
    (mapping, lambda m: m["b"].resize_(2)),
    (mapping, lambda m: m.update(b=m["a"])),
    (mapping, lambda m: m.update(z=m.pop("b"))),
    (mapping, lambda m: m.update(b=torch.rand(3, dtype=torch.float64))),
    (mapping, lambda m: m.update(n=torch.ones(0))),
    (arrays, lambda m: m.update(a=m["a"].T)),
    (arrays, lambda m: m.update(b=np.arange(3.0)[::-1])),
    (arrays, lambda m: m.update(c=m["c"].view(np.int64))),
    (nested, lambda m: m["a"].update(b=torch.rand(3))),
    (nested, lambda m: m.update(d=m["a"].pop("b"))),
    (tensordict, lambda m: m.set("c", torch.rand(5))),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_any_other_change_of_a_source_is_seen(make: Callable[[], Any], change: Change) -> None:
    source = make()
    before = state_of(source)
    change(source)
    after, fresh = state_of(source, before.form), state_of(source)
    assert (after.signatures, after.aliases) == (fresh.signatures, fresh.aliases)
    assert after.layout(before.layout()) == fresh.layout()
    assert bytes_of(after) == bytes_of(fresh)


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_any_other_change_of_a_target_is_seen(make: Callable[[], Any], change: Change) -> None:
    source, target = make(), make()
    layout, data = published(source)
    reader = Reader(layout, data)
    reader.copy_into(target)
    change(target)
    fresh = make()
    change(fresh)
    expected = refusal(lambda: copy_into(layout, data, fresh))
    assert refusal(lambda: reader.copy_into(target)) == expected
    if not expected:
        assert bytes_of(state_of(target)) == bytes_of(state_of(fresh))


def refusal(act: Callable[[], None]) -> str:
    """Return why something is refused; nothing if it is not."""
    try:
        act()
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_that_keeps_its_tensors_elsewhere_is_looked_at_each_time() -> None:
    source, target = torch.jit.script(nn.Linear(2, 2)), torch.jit.script(nn.Linear(2, 2))
    state = state_of(source)
    assert state_of(source, state.form).tensors.keys() == state.tensors.keys()
    layout = state.layout()
    data = np.zeros(layout.nbytes, np.uint8)
    Writer(layout, data).write(state)
    reader = Reader(layout, data)
    for _ in range(2):
        reader.copy_into(target)
    assert torch.equal(target.weight, source.weight)


def test_the_model_is_not_kept_alive() -> None:
    source = {"small": torch.rand(3), "large": torch.rand(100_000)}
    alive = [weakref.ref(tensor) for tensor in source.values()]
    state = state_of(source)
    layout = state.layout()
    writer = Writer(layout, np.zeros(layout.nbytes, np.uint8))
    writer.write(state)
    form = state.form
    del source, state
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert form.outline is not None
    again = {"small": torch.rand(3), "large": torch.rand(100_000)}
    writer.write(state_of(again, form))
    assert bytes(writer.section.data) == b"".join(
        again[spec.name].numpy().tobytes() for spec in layout.tensors
    )


def test_a_backward_pass_that_needs_the_old_values_fails() -> None:
    worker = nn.Linear(2, 2)
    reader = Reader(*published(nn.Linear(2, 2)))
    reader.copy_into(worker)
    loss = (worker.weight**2).sum()
    reader.copy_into(worker)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
