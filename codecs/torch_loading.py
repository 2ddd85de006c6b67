"""Loads modules whose `load_state_dict()` does more than copy tensors.

A module may derive data from its weights when they are loaded: a transposed copy, a folded scale,
one matrix made of several parts. It does so in a hook of `load_state_dict()`, or in a loading
method of its own. After a plain copy, such a module would still compute with the old weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from .errors import StateError

# Packages whose loading methods and pre-hooks only rename entries of old checkpoints, or copy as
# torch does. A version has the target's names and shapes, so for a version they only copy.
COPYING = ("torch.nn.", "torch.distributed.algorithms._checkpoint.", "tensordict.", "torchrl.")

ADVICE = (
    "give a worker the function `lambda pairs: model.load_state_dict(dict(pairs))` as its target, "
    "and weightbus.load() a mapping of tensors, which you load by load_state_dict() then"
)

Hook = Callable[[nn.Module, Any], object]

_TORCHS: Any = nn.modules.module  # torch's module with private parts of `load_state_dict()`


@dataclass(frozen=True, slots=True)
class Loading:
    """How to load a module that derives data from its weights.

    Attributes:
        module: The module.
        makers: Paths of submodules with their own loading method, for which a copy is not enough.
        hooks: Pairs (submodule, hook to call after a copy), in torch's order.
    """

    module: nn.Module
    makers: tuple[str, ...]
    hooks: tuple[tuple[nn.Module, Hook], ...]

    def makes(self, name: str) -> bool:
        """Return whether a tensor's name belongs to a submodule with its own loading method."""
        return any(not path or name.startswith(f"{path}.") for path in self.makers)

    def load(self, values: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        """Call `load_state_dict()` with `values`, and the module's own tensors for other names.

        The module may keep references to the tensors of `values`.

        Raises:
            Exception: `load_state_dict()` raised it; some tensors may be loaded.
        """
        named: Any = self.module.state_dict()  # with its `_metadata`, the modules' format versions
        for name, own in named.items():
            value = values.get(name, own)
            named[name] = value.clone() if value is own and isinstance(own, torch.Tensor) else value
        load: Callable[..., object] = self.module.load_state_dict
        load(named) if strict else load(named, strict=False)  # an override may not take `strict`

    def finish(self, *, strict: bool) -> None:
        """Run the module's loading code on its current tensors, after a copy into them.

        Raises:
            StateError: A hook reports missing or unexpected keys.
            Exception: The module's code raised it.
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
    """Return how to load a module; None if a copy into its tensors is enough."""
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
    """Yield (path, submodule) in the order in which `load_state_dict` loads them: inner first."""
    for name, inner in module._modules.items():  # noqa: SLF001
        if inner is not None:
            yield from _in_order(inner, f"{path}.{name}".lstrip("."))
    yield path, module


def _loads_by_itself(part: Any) -> bool:
    """Return whether a submodule has its own loading method, for which a copy is not enough."""
    before = _hooks(part, "_load_state_dict_pre_hooks")
    return not all(map(_copies, (part._load_from_state_dict, *before)))  # noqa: SLF001


def _copies(function: Any) -> bool:
    """Return whether a function is known only to copy (`COPYING`)."""
    if isinstance(function, _TORCHS._WrappedHook):  # noqa: SLF001
        function = function.hook
    while isinstance(function, partial):
        function = cast("Any", function).func
    return str(getattr(function, "__module__", "")).startswith(COPYING)


def _hooks(part: nn.Module, kind: str) -> list[object]:
    return [*cast("Mapping[int, object]", getattr(part, kind, None) or {}).values()]
