"""Reads and replaces the tensors of a `TensorDictParams`.

This module of tensordict computes with the tensors of a TensorDict inside it. It may list other
tensors as its parameters: code that moves a policy to the meta device, such as TorchRL's
collectors, replaces only the tensors of the TensorDict.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def is_params(part: nn.Module) -> bool:
    """Return whether a module is a `TensorDictParams`, without importing tensordict."""
    kind: Any = getattr(sys.modules.get("tensordict"), "TensorDictParams", None)
    return kind is not None and isinstance(part, kind)


def own_tensors(params: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a `TensorDictParams` under their names in `state_dict()`."""
    for key, value in params._param_td.items(True, True):  # noqa: SLF001 - nothing else leads there
        if isinstance(value, torch.Tensor):
            yield _name(key), value


def put(params: Any, others: Mapping[str, torch.Tensor]) -> None:
    """Replace the tensors of a `TensorDictParams` that have a name in `others`."""
    if not others:
        return
    # Install a new TensorDict, since the current one may be locked as a part of others, and would
    # move tensors that are set in it to its device.
    inside = params._param_td  # noqa: SLF001
    made = inside.copy().clear_device_()
    for key in [*made.keys(True, True)]:
        if _name(key) in others:
            made.set(key, others[_name(key)])
    if inside.device is not None:
        made.auto_device_()
    if inside.is_locked:
        made.lock_()
    params._param_td = made  # noqa: SLF001
    params._reset_params()  # noqa: SLF001 - so that it lists the new tensors


def _name(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else ".".join(key)
