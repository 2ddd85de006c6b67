"""Leaves: a model's tensors, of numpy or of torch, whose module is reached only where it is loaded.

It must not be imported without need.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from . import numpy_tensors

if TYPE_CHECKING:
    import torch

Leaf: TypeAlias = "torch.Tensor | numpy_tensors.Array"


@cache
def of_torch() -> Any:
    """Return the module `torch_tensors`, for what is done in every publish.

    An import statement each time takes too long.
    """
    from . import torch_tensors

    return torch_tensors
