"""Modules that make something of their weights when they are loaded, each in its own way."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

WIDTH = 3


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.rand(WIDTH, WIDTH))


class Transposed(nn.Module):
    """A hook after the load keeps a copy of the weight, transposed, to compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = matrix()
        self.made = self.weight.detach().t().clone()
        self.register_load_state_dict_post_hook(Transposed._make)

    @staticmethod
    def _make(module: Any, keys: Any) -> None:
        assert keys.missing_keys == keys.unexpected_keys == []
        module.made = module.weight.detach().t().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.made


class Folded(nn.Module):
    """A class with its own `_load_from_state_dict`, which folds the scale in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = matrix(), nn.Parameter(torch.rand(()))
        self.made = self.weight.detach() * self.scale.detach()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.made = self.weight.detach() * self.scale.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.made


class Fused(nn.Module):
    """One matrix, of which `state_dict()` makes two parts, and a hook before the load makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.rand(2 * WIDTH, WIDTH))
        self.register_state_dict_post_hook(Fused._part)
        self.register_load_state_dict_pre_hook(Fused._join)

    @staticmethod
    def _part(_: nn.Module, state: Any, prefix: str, __: Any) -> None:
        whole = state.pop(f"{prefix}qk")
        state[f"{prefix}q"], state[f"{prefix}k"] = whole[:WIDTH].clone(), whole[WIDTH:].clone()

    @staticmethod
    def _join(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
        state[f"{prefix}qk"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.qk[:WIDTH] + x @ self.qk[WIDTH:]


class Halved(nn.Module):
    """A class that saves half of what it computes with, and loads twice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = matrix()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] / 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        twice = OrderedDict(state_dict)
        twice[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(twice, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Prepared(nn.Module):
    """A hook before the load, which sees the whole state, keeps what it finds there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = matrix()
        self.made = self.weight.detach()
        self._register_load_state_dict_pre_hook(self._keep)

    def _keep(self, state: Any, prefix: str, *_: Any) -> None:
        self.made = state[f"{prefix}weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.made


class Counted(nn.Module):
    """A `load_state_dict` of its own, without `strict`, at the root; and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.offset = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)
        self.made = self.inner.weight.detach().clone()

    def get_extra_state(self) -> torch.Tensor:
        return self.offset

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.offset = state

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]  # pyright: ignore
        super().load_state_dict(state_dict)
        self.made = self.inner.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.made + self.offset


PARTS = [Transposed, Folded, Fused, Halved, Prepared]


def model_of(part: type[nn.Module]) -> nn.Module:
    """Return a model with such a part, which is tied: torch loads it once for each of its names."""
    if part is Counted:
        return Counted()
    inner = part()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.BatchNorm1d(WIDTH).eval(), inner)


def trained(part: type[nn.Module]) -> nn.Module:
    """Return such a model after a step of training, as it would be after a restart."""
    model = model_of(part)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.rand_like(tensor))
    if isinstance(model, Counted):
        model.offset = torch.rand(WIDTH)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model


def answers(model: nn.Module) -> torch.Tensor:
    """Return what a model computes."""
    with torch.no_grad():
        given = torch.linspace(0.1, 1, 2 * WIDTH).reshape(2, WIDTH)
        answer: torch.Tensor = model(given)
        return answer
