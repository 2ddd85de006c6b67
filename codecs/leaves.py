"""Leaves: a model's tensors, of numpy or of torch. Torch is not imported without need."""

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from . import numpy_tensors

if TYPE_CHECKING:
    import torch

Leaf: TypeAlias = "torch.Tensor | numpy_tensors.Array"


@cache
def of_torch() -> Any:
    """Return the module `torch_tensors`. Cached, since an import for each publish is too slow."""
    from . import torch_tensors

    return torch_tensors
