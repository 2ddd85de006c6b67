"""Handles modules that compute with other tensors than they have between two forward passes.

accelerate can offload a module (`cpu_offload`, `disk_offload`, a `device_map`): its tensors are on
the meta device, and a hook fetches their values from a mapping before each pass. FSDP2 gathers
parameters for a pass, and discards writes to the gathered parameters.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]

OFFLOADED = (
    "offloaded by accelerate to where it is not in memory (disk_offload, or `disk` in a "
    "device_map): "
)
PUBLISH = "publish accelerate.utils.modeling.get_state_dict_offloaded_model(model)"
LOAD = (
    "a version put into its tensors would be thrown away before the next pass; give a function "
    "that loads the version and offloads the model anew, or offload to the cpu alone"
)
MADE = (
    "offloaded by accelerate, in a module that makes something of its weights when they are "
    "loaded, which it cannot meanwhile; give a function that loads the version and offloads anew"
)


def offloaded(module: nn.Module) -> tuple[Tensors, list[str]]:
    """Return (offloaded tensors in memory, by name; names of offloaded tensors not in memory)."""
    found: Tensors = {}
    gone: list[str] = []
    for path, part in _modules(module):
        for hook in _hooks(part):
            recurse = bool(getattr(hook, "place_submodules", False))
            own = chain(part.named_parameters(recurse=recurse), part.named_buffers(recurse=recurse))
            for name, tensor in own:
                whole = f"{path}.{name}".lstrip(".")
                if not tensor.is_meta:
                    continue
                value = _in_memory(hook.weights_map, name)
                if value is None:
                    gone.append(whole)
                else:
                    found[whole] = value
    return found, gone


def offload_faults(module: nn.Module, *, loaded: bool) -> list[str]:
    """Return error texts for offloaded tensors that cannot be written to.

    `loaded` is True if a copy into the module's tensors is not enough (`torch_loading`).
    """
    found, gone = offloaded(module)
    if found and loaded:
        return [f"{next(iter(found))}: {MADE}"]
    return [f"{name}: {OFFLOADED}{LOAD}" for name in gone]


def gathered_fault(module: nn.Module) -> str | None:
    """Return an error text if a submodule's parameters are now gathered by FSDP2; else None."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    path = next(
        (
            path
            for path, part in _modules(module)
            if kind is not None and isinstance(part, kind)
            # Parameters that are not gathered are DTensors, which have an error text of their own.
            if any(type(each) in (torch.Tensor, nn.Parameter) for each in part.parameters())
        ),
        None,
    )
    if path is None:
        return None
    return (
        f"{path or 'the module'}: sharded by fully_shard(), which writes over what is put into a "
        "gathered parameter: give a function that loads the version into all ranks' shards "
        "(set_model_state_dict)"
    )


def quantised_fault(module: nn.Module) -> str | None:
    """Return an error text if bitsandbytes has quantised a submodule; else None."""
    for path, part in _modules(module):
        home = any(kind.__module__.startswith("bitsandbytes.") for kind in type(part).__mro__)
        weight: Any = vars(part)["_parameters"].get("weight") if home else None
        if weight is not None and weight.dtype in (torch.int8, torch.uint8):
            return (
                f"{path or 'the module'}: quantised by bitsandbytes, whose scales are not tensors "
                "of the module: publish a module that is not quantised, or its state_dict(), and "
                "give a worker a function that loads a version and quantises it"
            )
    return None


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))


def _hooks(part: nn.Module) -> Iterator[Any]:
    """Yield the hooks of accelerate that offload a submodule."""
    hook: Any = vars(part).get("_hf_hook")
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "offload", False) is True and hasattr(each, "weights_map"):
            yield each


def _in_memory(held: Any, name: str) -> torch.Tensor | None:
    """Return the tensor of this name in accelerate's mapping; None if it is not in memory."""
    while hasattr(held, "dataset") and hasattr(held, "prefix"):
        held, name = held.dataset, f"{held.prefix}{name}"
    inside = cast("object", held if isinstance(held, dict) else getattr(held, "state_dict", None))
    if not isinstance(inside, Mapping):
        return None
    value = cast("Mapping[str, object]", inside).get(name)
    return value.detach() if isinstance(value, torch.Tensor) and not value.is_meta else None
