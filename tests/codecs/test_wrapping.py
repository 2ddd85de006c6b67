"""A model in a wrapper has other names: the first line of the difference says so."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from weightbus.codecs.apply import check
from weightbus.codecs.state import state_of
from weightbus.codecs.wrapping import explanation
from weightbus.python_client.schemes.strategy import DestinationError, WeightStrategy

# What the names are called that are shorter: those that are longer are published, or not.
OTHERS = {True: "those of the target", False: "the published ones"}


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


class Layer(nn.Module):
    """What an adapter makes of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 1, bias=False)


def adapted() -> nn.Module:
    model = policy()
    assert isinstance(model, nn.Sequential)
    model[0], model[2] = (
        Layer(each) for each in (model[0], model[2]) if isinstance(each, nn.Linear)
    )
    return model


def compiled(inner: nn.Module) -> Any:
    return torch.compile(inner, backend="eager")


WRAPPED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: compiled(policy()), "'_orig_mod.'", "model._orig_mod"),
    (lambda: nn.DataParallel(policy()), "'module.'", "model.module"),
    (lambda: torch.optim.swa_utils.AveragedModel(policy()), "'module.'", "AveragedModel"),
    (lambda: nn.DataParallel(compiled(policy())), "'module._orig_mod.'", "torch.compile in"),
    (lambda: nn.ModuleDict({"actor": policy()}), "'actor.'", "the module inside"),
    (adapted, "'base_layer.'", "merge_and_unload"),
]


@pytest.mark.parametrize(("wrapped", "part", "remedy"), WRAPPED)
@pytest.mark.parametrize("published", [False, True])
def test_the_first_line_names_the_wrapper_and_what_to_give_instead(
    wrapped: Callable[[], Any], part: str, remedy: str, *, published: bool
) -> None:
    pair = (wrapped(), policy()) if published else (policy(), wrapped())
    first, *others = check(state_of(pair[0]).layout(), pair[1])
    assert part in first
    assert remedy in first
    assert first.startswith("the published" if published else "the target's")
    assert others, "what differs is still told"


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
@pytest.mark.parametrize("published", [False, True])
def test_schemes_say_it_too(form: Any, *, published: bool) -> None:
    pair = (nn.DataParallel(policy()), policy())
    source, target = pair if published else pair[::-1]
    with pytest.raises(DestinationError) as raised:
        WeightStrategy(form).apply_weights(target, WeightStrategy(form).extract_weights(source))
    first, second = str(raised.value).splitlines()[:2]
    assert f"begin with 'module.' and {OTHERS[published]} do not" in first
    assert "not published" in second or "not in the target" in second


def test_ends_of_names_are_named_as_beginnings_are() -> None:
    averaged = {f"{name}_ema": tensor for name, tensor in policy().state_dict().items()}
    pruned = policy()
    normed = {f"{i}.weight_{end}": np.zeros(1) for i in (0, 2) for end in "gv"}
    normed |= {f"{i}.bias": np.zeros(1) for i in (0, 2)}
    for index in (0, 2):
        prune.random_unstructured(pruned[index], "weight", 0.5)  # type: ignore[index]
    for longer, end in ((averaged, "_ema"), (pruned, "_mask"), (normed, "_g")):
        for pair in ((longer, policy()), (policy(), longer)):
            first = check(state_of(pair[0]).layout(), pair[1])[0]
            others = OTHERS[pair[0] is longer]
            assert f"names end with '{end}' and {others} do not" in first
            computed = longer is not averaged
            assert ("rename=" in first) != computed, "these are not the values that are used"
            assert ("torch.nn.utils" in first) == computed


def test_a_mapping_of_the_other_names_is_the_way_out() -> None:
    wrapped: Any = nn.DataParallel(policy())
    target = {name.removeprefix("module."): t for name, t in wrapped.state_dict().items()}
    assert check(state_of(policy()).layout(), target) == []


@pytest.mark.parametrize("end", ["weight.absmax", "qweight", "qzeros", "weight.SCB"])
def test_a_quantised_module_is_named_as_such(end: str) -> None:
    plain, quantised = {"a.weight": np.zeros(4)}, {"a.weight": np.zeros(4), f"a.{end}": np.zeros(1)}
    assert check(state_of(quantised).layout(), plain)[0].startswith("the published model is quant")
    assert check(state_of(plain).layout(), quantised)[0].startswith("the target is quantised")


@pytest.mark.parametrize(
    ("published", "own"),
    [
        (["a.weight"], ["b.weight"]),
        (["a.weight", "b.weight"], ["a.weight"]),
        (["a", "b", "c", "d"], ["x.a", "q", "r", "s"]),
        ([], ["a"]),
        (["w1"], ["w10"]),
        (["a.w", "b.w"], ["a.w.x", "b.w.y", "c.w.z"]),
    ],
)
def test_what_is_no_wrapper_is_not_called_one(published: list[str], own: list[str]) -> None:
    assert explanation(published, own) is None
    assert explanation(own, published) is None


def test_names_by_the_ten_thousand_are_compared_in_no_time() -> None:
    names = [f"layers.{i}.weight" for i in range(30_000)]
    text = explanation(names, [f"module.{name}" for name in names])
    assert text is not None
    assert "'module.'" in text
