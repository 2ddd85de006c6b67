"""Defines the type of a model's tensors, numpy arrays or torch tensors, without importing torch."""

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from . import numpy_tensors

if TYPE_CHECKING:
    import torch

Leaf: TypeAlias = "torch.Tensor | numpy_tensors.Array"


@cache
def of_torch() -> Any:
    """Return the module `torch_tensors`; cached, since an import statement per publish is slow."""
    from . import torch_tensors

    return torch_tensors
