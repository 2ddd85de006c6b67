"""A data section in memory: the tensors of a layout as views of one buffer, made once and kept."""

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
    """The data section of a version, over a buffer that outlives it.

    Making a view costs more than copying a small tensor through it, so whoever uses a buffer for
    version after version should keep the section of it. Views of a tensor that is not aligned to
    its element are copies (see `numpy_tensors.views`); a planned layout in a buffer that is
    aligned to 8 bytes has none.
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
        """The tensors as torch tensors, aliases excluded; not to be written if read-only."""
        from . import torch_tensors

        views = torch_tensors.views(self.layout.tensors, self.data)
        return {spec.name: view for spec, view in zip(self.layout.tensors, views, strict=True)}

    def like(self, name: str, leaf: Leaf) -> Leaf:
        """Return a tensor of the kind of `leaf`, which decides who copies."""
        return self.arrays[name] if isinstance(leaf, np.ndarray) else self.tensors[name]

    def aligned(self) -> bool:
        """Tell whether every view shares the buffer's memory, so that writing into it counts."""
        address: int = self.data.__array_interface__["data"][0]
        return self.layout.aligned and not address % 8
