"""A worker's module of whatever kind answers as the trainer's does, or the version is refused."""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrl")
pytest.importorskip("transformers")

import torch
from tensordict import TensorDict
from torch import nn

from weightbus import StateError
from weightbus.codecs.apply import copy_into
from weightbus.codecs.state import state_of, write_into
from weightbus.tests.training.kinds import KINDS, Given
from weightbus.torchrl import WeightStrategy

# What is refused, by name: the kind, and how the worker's module came to be.
NOT_YET = "has no shape yet|shape .* published, \\[0\\] here"
NO_VALUE = "a buffer on the meta device that is not persistent"
REFUSED: dict[tuple[str, str], str] = {
    (kind, how): why
    for kind, why in {
        "LazyLinear": NOT_YET,
        "MultiAgentMLP, lazy": NOT_YET,
        "quantisation-aware": NOT_YET,
    }.items()
    for how in ("new", "on meta", "handed over")
} | {
    (kind, how): NO_VALUE
    for kind in ("Llama, tied", "BERT")
    for how in ("on meta", "handed over", "handed over after a pass")
}


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def handed_over(model: Any) -> Any:
    """Return a model as TorchRL's collectors hand it to their processes."""
    TensorDict.from_module(model).data.to("meta").to_module(model)
    return model


def after_a_pass(model: Any, given: Given) -> Any:
    answer(model, given)
    return model


def answer(model: Any, given: Given) -> torch.Tensor:
    with torch.no_grad():
        return given(model)


def train(model: Any) -> None:
    """Change all that a `state_dict()` has, as training would."""
    with torch.no_grad():
        for value in model.state_dict(keep_vars=True).values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value += torch.rand_like(value) / 3


def load(source: Any, worker: Any, how: str) -> None:
    if how == "Subscriber":
        state = state_of(source)
        data = np.empty(state.layout().nbytes, np.uint8)
        write_into(state, state.layout(), data)
        copy_into(state.layout(), data, worker)
    else:
        strategy: Any = WeightStrategy(how)  # type: ignore[arg-type]
        strategy.apply_weights(worker, strategy.extract_weights(source))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["Subscriber", "tensordict", "state_dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_answers_as_the_trainer_or_refuses(kind: str, how: str) -> None:
    make, given = KINDS[kind]
    workers: dict[str, Callable[[], Any]] = {
        "new": make,
        "after a pass": lambda: after_a_pass(make(), given),
        "on meta": lambda: on_meta(make),
        "handed over": lambda: handed_over(make()),
        "handed over after a pass": lambda: handed_over(after_a_pass(make(), given)),
    }
    source = after_a_pass(make(), given)
    source.eval()
    train(source)
    for came, make_worker in workers.items():
        if kind == "script" and came.startswith("handed over"):
            continue  # TorchRL cannot
        worker = make_worker()
        worker.eval()
        refused = REFUSED.get((kind, came))
        if refused == NO_VALUE and how == "tensordict":
            refused = None  # which has every buffer
        if refused is not None:
            with pytest.raises(StateError, match=refused):
                load(source, worker, how)
            continue
        load(source, worker, how)
        assert torch.equal(answer(source, given), answer(worker, given)), came
        train(source)
        load(source, worker, how)
        assert torch.equal(answer(source, given), answer(worker, given)), f"{came}, again"


@pytest.mark.parametrize("how", ["Subscriber", "tensordict", "state_dict"])
@pytest.mark.parametrize("kind", ["Linear", "MultiAgentMLP", "EnsembleModule", "TensorDictParams"])
def test_a_source_that_was_handed_over_has_no_values(kind: str, how: str) -> None:
    """And not those that it lists and does not compute with."""
    make, _ = KINDS[kind]
    with pytest.raises(StateError, match="meta"):
        load(handed_over(make()), make(), how)


def test_tensordict_params_that_others_have_locked_are_filled() -> None:
    make, given = KINDS["TensorDictParams"]
    source, worker = make(), handed_over(make())
    whole = TensorDict({"of it": worker.params}).lock_()
    load(source, worker, "tensordict")
    assert whole.is_locked
    whole.unlock_()  # TensorDict itself calls no module with locked ones
    assert torch.equal(answer(source.eval(), given), answer(worker.eval(), given))
    assert worker.params.device.type == "cpu"


class Scaled(nn.Module):
    """Computes with a tensor that is neither parameter nor buffer."""

    def __init__(self, keep: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(3, 2), keep(torch.tensor(2.0))


@pytest.mark.parametrize("how", ["Subscriber", "tensordict", "state_dict"])
@pytest.mark.parametrize(
    "keep",
    [lambda t: t, lambda t: [t], lambda t: {"scale": t}, lambda t: TensorDict({"scale": t})],
    ids=["tensor", "list", "dict", "TensorDict"],
)
def test_a_tensor_on_meta_that_nothing_fills_is_named(keep: Any, how: str) -> None:
    source, worker = Scaled(keep), on_meta(lambda: Scaled(keep))
    with pytest.raises(StateError, match="kept: a tensor on the meta device that is neither"):
        load(source, worker, how)
    load(source, Scaled(keep), how)
