"""Numpy arrays as tensors of a layout: what they are, how their bytes come and go."""

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .dtypes import name_of_numpy, numpy_dtype
from .errors import StateError
from .layout import Signature, TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Memory: TypeAlias = "Buffer | Bytes"  # numpy declares its buffer protocol from Python 3.12 on


def signature(name: str, array: Array) -> Signature:
    """Return an array's dtype name and shape; StateError if it cannot travel."""
    masked = sys.modules.get("numpy.ma")  # numpy imports it when asked for: there are none before
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise StateError(f"{name}: a masked array would lose its mask; give it .filled() instead")
    try:
        return name_of_numpy(array.dtype), array.shape
    except StateError as error:
        raise StateError(f"{name}: {error}") from None


def identity(array: Array) -> Hashable | None:
    """Return what two arrays share exactly if they are the same elements; None if empty."""
    if not array.size:
        return None
    address = array.__array_interface__["data"][0]
    return "numpy", address, array.shape, array.strides, array.dtype.str


def place(array: Array) -> tuple[Hashable, int, tuple[int, ...]]:
    """Return the memory that an array's elements lie in, where there, and the strides in bytes."""
    return "cpu", array.__array_interface__["data"][0], array.strides


def views(specs: Iterable[TensorSpec], data: Bytes) -> list[Array]:
    """Return each tensor's part of the data section as an array that shares its memory.

    A part that is not aligned to its element (only files written by others have such) is copied
    instead, so views to be written into must come from a layout that was planned here.
    """
    address: int = data.__array_interface__["data"][0]
    arrays: list[Array] = []
    for spec in specs:
        dtype, part = numpy_dtype(spec.dtype), data[spec.begin : spec.end]
        if (address + spec.begin) % dtype.itemsize:
            part = part.copy()
            part.flags.writeable = data.flags.writeable
        arrays.append(part.view(dtype).reshape(spec.shape))
    return arrays


def bytes_of(array: Array, spec: TensorSpec) -> Bytes:
    """Return the bytes that an array has in a version; its own memory where they lie there so."""
    plain = np.ascontiguousarray(array, dtype=numpy_dtype(spec.dtype))
    return plain.reshape(-1).view(np.uint8)


def copy(destinations: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy arrays pairwise, casting where the dtypes differ: too large a value is infinity then."""
    with np.errstate(over="ignore", invalid="ignore"):  # a warning may be an error, half-way
        for destination, source in zip(destinations, sources, strict=True):
            np.copyto(destination, source, casting="unsafe")


def target_fault(name: str, array: Array) -> str | None:
    """Say why an array cannot be written into; None if it can."""
    return None if array.flags.writeable else f"{name}: the array is read-only; give a writable one"
