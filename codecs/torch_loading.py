"""What `load_state_dict()` does to a module beside copying tensors.

A module may make something of its weights when they are loaded: a transposed copy, a scale folded
in, one matrix of several parts. It says so by a hook of `load_state_dict()`, or by a method of its
own for loading. Copied to alone, it would go on computing with the old weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from .errors import StateError

# Whose own methods and pre-hooks only rename what older versions have saved, or copy as torch does.
# What is published has the target's names and shapes, so there they do what a copy does.
COPYING = ("torch.nn.", "torch.distributed.algorithms._checkpoint.", "tensordict.", "torchrl.")

ADVICE = (
    "give a worker the function `lambda pairs: model.load_state_dict(dict(pairs))` as its target, "
    "and weightbus.load() a mapping of tensors, which you load by load_state_dict() then"
)

Hook = Callable[[nn.Module, Any], object]

_TORCHS: Any = nn.modules.module  # what it calls private is what `load_state_dict()` is made of


@dataclass(frozen=True, slots=True)
class Loading:
    """How a module is loaded that makes something of its weights then.

    Attributes:
        module: It.
        makers: Paths of the parts that load in a way of their own, so that a copy is not enough.
        hooks: What is called once tensors are copied, in torch's order, with the part it is of.
    """

    module: nn.Module
    makers: tuple[str, ...]
    hooks: tuple[tuple[nn.Module, Hook], ...]

    def makes(self, name: str) -> bool:
        """Tell whether a tensor's name is of a part that loads in a way of its own."""
        return any(not path or name.startswith(f"{path}.") for path in self.makers)

    def load(self, values: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        """Have the module load tensors by itself, and what else it has as it is; it may keep them.

        Raises:
            Exception: What it raises; some of it may be loaded.
        """
        named: Any = self.module.state_dict()  # with the numbers of its versions
        for name, own in named.items():
            value = values.get(name, own)
            named[name] = value.clone() if value is own and isinstance(own, torch.Tensor) else value
        load: Callable[..., object] = self.module.load_state_dict
        load(named) if strict else load(named, strict=False)  # own methods may not have the word

    def finish(self, *, strict: bool) -> None:
        """Have the module do what it would, were the tensors that it has now loaded.

        Raises:
            Exception: What it raises.
        """
        if self.makers:
            self.load({}, strict=strict)
            return
        keys = _TORCHS._IncompatibleKeys([], [])  # noqa: SLF001
        for part, hook in self.hooks:
            hook(part, keys)
        if strict and (wrong := [*keys.missing_keys, *keys.unexpected_keys]):
            raise StateError(
                f"a load_state_dict hook of a {type(self.module).__name__} says that keys are "
                f"missing or unexpected: {', '.join(map(str, wrong[:9]))}"
            )


def loading_of(module: nn.Module) -> Loading | None:
    """Return how a module is loaded; None if a copy into its tensors is all there is to it."""
    parts = [*_in_order(module, "")]
    makers = [path for path, part in parts if _loads_by_itself(part)]
    if not _copies(module.load_state_dict):
        makers.append("")
    hooks = tuple(
        (part, cast("Hook", hook))
        for _, part in parts
        for hook in _hooks(part, "_load_state_dict_post_hooks")
    )
    return Loading(module, tuple(makers), hooks) if makers or hooks else None


def _in_order(module: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield every part as `load_state_dict` comes to its end: what is inside of it first."""
    for name, inner in module._modules.items():  # noqa: SLF001
        if inner is not None:
            yield from _in_order(inner, f"{path}.{name}".lstrip("."))
    yield path, module


def _loads_by_itself(part: Any) -> bool:
    before = _hooks(part, "_load_state_dict_pre_hooks")
    return not all(map(_copies, (part._load_from_state_dict, *before)))  # noqa: SLF001


def _copies(function: Any) -> bool:
    if isinstance(function, _TORCHS._WrappedHook):  # noqa: SLF001
        function = function.hook
    while isinstance(function, partial):
        function = cast("Any", function).func
    return str(getattr(function, "__module__", "")).startswith(COPYING)


def _hooks(part: nn.Module, kind: str) -> list[object]:
    return [*cast("Mapping[int, object]", getattr(part, kind, None) or {}).values()]
