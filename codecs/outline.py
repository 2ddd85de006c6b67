"""Has anything but values changed? A cheap look at a model that was taken apart before.

To take a model apart (names, dtypes, shapes, which tensors are tied) costs more than to copy it,
for small tensors many times more. A trainer publishes the same tensors again and again, so what was
found is kept, together with an outline: who is there, and where each tensor lies.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import numpy as np

from . import numpy_tensors

if TYPE_CHECKING:
    import torch

Leaf: TypeAlias = "torch.Tensor | numpy_tensors.Array"


class Outline(msgspec.Struct, frozen=True, eq=False):
    """A model's tensors, and what would be otherwise if it had been changed.

    Attributes:
        key: Names and structure, compared with ==.
        marks: Address, shape, contiguity and dtype of every tensor.
        leaves: The tensors, in the order of the marks.
    """

    key: Sequence[object]
    marks: Sequence[object]
    leaves: Sequence[Leaf]

    def same(self, other: "Outline | None") -> bool:
        """Tell whether only values can be different."""
        return other is not None and self.key == other.key and self.marks == other.marks

    def bare(self) -> "Outline":
        """Return it without the tensors, to be kept: whoever keeps them keeps their memory."""
        return Outline(self.key, self.marks, ())


def outline_of(key: Sequence[object], leaves: Sequence[Leaf]) -> Outline | None:
    """Return an outline; None if these tensors are of a kind that has to be looked at each time."""
    kinds = set(map(type, leaves))
    marks: Sequence[object] | None = None
    if kinds <= {np.ndarray}:
        marks = numpy_tensors.marks(cast("Sequence[numpy_tensors.Array]", leaves))
    elif "torch" in sys.modules:  # else there can be no tensor, and it must not be imported
        torch_tensors = of_torch()
        marks = torch_tensors.marks(leaves) if kinds <= torch_tensors.PLAIN else None
    return None if marks is None else Outline(key, marks, leaves)


@cache
def of_torch() -> Any:
    """Return the module `torch_tensors`, for what is done in every publish.

    It must not be imported without need, and an import statement each time takes too long.
    """
    from . import torch_tensors

    return torch_tensors
