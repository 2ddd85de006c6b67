"""The benchmarks' model: float32 tensors of a given total size; every version changes all values.

Publisher and workers create the model from its shape, so only the shape is sent to workers before.
The tensors are allocated one by one, like those of a real model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weightbus import resident
from weightbus.codecs.native import crc32c

if TYPE_CHECKING:
    import torch

ITEM = 4  # bytes of a float32
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SHAPE = re.compile(r"(?P<count>\d+)(?P<unit>[KMG]iB)/(?P<tensors>\d+)\Z")

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model, such as `200MiB/100`: bytes, and the number of tensors."""

    text: str
    nbytes: int
    tensors: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse a shape.

        Raises:
            ValueError: The text is not a shape, or a tensor would have no element.
        """
        match = _SHAPE.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not a model size; write it like 256KiB/20 or 200MiB/100")
        nbytes, tensors = int(match["count"]) * UNITS[match["unit"]], int(match["tensors"])
        if not 1 <= tensors <= nbytes // ITEM:
            raise ValueError(f"{text!r}: give it 1 to {nbytes // ITEM} tensors")
        return cls(text, nbytes, tensors)

    @property
    def label(self) -> str:
        """The size without the number of tensors, for tables."""
        return self.text.partition("/")[0]

    def elements(self) -> list[int]:
        """Return the number of elements of each tensor, as equal as possible."""
        each, more = divmod(self.nbytes // ITEM, self.tensors)
        return [each + (i < more) for i in range(self.tensors)]


class Model:
    """The tensors of a model, in memory that has been touched.

    Args:
        shape: The size.
        zeros: True: all zeros, for a worker. False: the initial values of a publisher.
    """

    def __init__(self, shape: Shape, *, zeros: bool) -> None:
        self.shape = shape
        self.arrays: dict[str, Array] = {}
        for index, count in enumerate(shape.elements()):
            array = np.empty(count, np.float32)
            # Values differ at every offset and in every tensor, so that a misplaced chunk is
            # detected.
            array[:] = 0 if zeros else np.arange(count, dtype=np.float32) * 1e-3 + index
            self.arrays[f"layer{index:04d}.weight"] = array

    @property
    def tensors(self) -> "dict[str, torch.Tensor]":
        """The same memory as torch tensors."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    def moved_in(self) -> "dict[str, torch.Tensor]":
        """Make the model resident; return its tensors, which use the resident memory."""
        tensors = resident(self.tensors)
        self.arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        return tensors

    def advance(self) -> None:
        """Change every value, as a step of training does."""
        for array in self.arrays.values():
            array += 1

    def digest(self) -> int:
        """Return the CRC-32C of all tensors, in order."""
        value = 0
        for array in self.arrays.values():
            value = crc32c(array.view(np.uint8), value)
        return value

    def copy_to(self, other: "Model") -> None:
        """Copy all tensors: the memcpy with which other times are compared."""
        other.take(self.arrays)

    def take(self, arrays: Mapping[str, Array]) -> None:
        """Copy the values of other arrays of the same names."""
        for name, array in self.arrays.items():
            np.copyto(array, arrays[name])

    def rest_on(self, flat: NDArray[Any]) -> None:
        """Make the tensors views of one block of bytes, for contenders that receive a block."""
        at = 0
        for name, array in self.arrays.items():
            self.arrays[name] = flat[at : at + array.nbytes].view(np.float32)
            at += array.nbytes

    def read_from(self, flat: NDArray[Any]) -> None:
        """Copy the values from one block of bytes that has all tensors in order."""
        at = 0
        for array in self.arrays.values():
            np.copyto(array, flat[at : at + array.nbytes].view(np.float32))
            at += array.nbytes

    def write_to(self, flat: NDArray[Any]) -> None:
        """Copy the values to one block of bytes, all tensors in order."""
        at = 0
        for array in self.arrays.values():
            np.copyto(flat[at : at + array.nbytes].view(np.float32), array)
            at += array.nbytes
