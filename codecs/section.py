"""Views a data section in memory: each tensor of a layout as a cached view of one buffer."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from . import numpy_tensors
from .errors import LayoutError
from .layout import Layout
from .leaves import Leaf

if TYPE_CHECKING:
    import torch


class Section:
    """The data section of a version, in a buffer that must outlive this object.

    To make a view takes longer than to copy a small tensor, so callers that use one buffer for many
    versions should keep its section. The view of a tensor that is not aligned to its element is a
    copy (see `numpy_tensors.views`). This does not occur with a layout of `Layout.plan` in a buffer
    that is aligned to 8 bytes.

    Raises:
        LayoutError: The buffer does not have `layout.nbytes` bytes.
    """

    def __init__(self, layout: Layout, data: numpy_tensors.Memory) -> None:
        flat = np.frombuffer(cast("memoryview", data), dtype=np.uint8)
        if flat.size != layout.nbytes:
            raise LayoutError(
                f"the data section of {layout!r} has {layout.nbytes} bytes; the buffer {flat.size}"
            )
        self.layout = layout
        self.data = flat

    @cached_property
    def arrays(self) -> Mapping[str, numpy_tensors.Array]:
        """The tensors as numpy arrays, by name, aliases excluded."""
        views = numpy_tensors.views(self.layout.tensors, self.data)
        return {spec.name: view for spec, view in zip(self.layout.tensors, views, strict=True)}

    @cached_property
    def tensors(self) -> "Mapping[str, torch.Tensor]":
        """The tensors as torch tensors, by name, aliases excluded; read-only if the buffer is."""
        from . import torch_tensors

        views = torch_tensors.views(self.layout.tensors, self.data)
        return {spec.name: view for spec, view in zip(self.layout.tensors, views, strict=True)}

    def like(self, name: str, leaf: Leaf) -> Leaf:
        """Return a tensor as a numpy array if `leaf` is one, otherwise as a torch tensor."""
        return self.arrays[name] if isinstance(leaf, np.ndarray) else self.tensors[name]

    def aligned(self) -> bool:
        """Return whether every view shares the buffer's memory, so that none is a copy."""
        address: int = self.data.__array_interface__["data"][0]
        return self.layout.aligned and not address % 8
