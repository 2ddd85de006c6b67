"""Handles numpy arrays as tensors of a layout: signatures, views, copies."""

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
Memory: TypeAlias = "Buffer | Bytes"  # numpy's types declare the buffer protocol from Python 3.12


def signature(name: str, array: Array) -> Signature:
    """Return an array's dtype name and shape; StateError if it cannot be published."""
    masked = sys.modules.get("numpy.ma")  # None: not imported, so there are no masked arrays
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise StateError(f"{name}: a masked array would lose its mask; give it .filled() instead")
    try:
        return name_of_numpy(array.dtype), array.shape
    except StateError as error:
        raise StateError(f"{name}: {error}") from None


def identity(array: Array) -> Hashable | None:
    """Return a key that is equal for arrays with the same elements; None for an empty array."""
    if not array.size:
        return None
    address = array.__array_interface__["data"][0]
    return "numpy", address, array.shape, array.strides, array.dtype.str


def place(array: Array) -> tuple[Hashable, int, tuple[int, ...]]:
    """Return the address space of an array, its address there, and its strides in bytes."""
    return "cpu", array.__array_interface__["data"][0], array.strides


def views(specs: Iterable[TensorSpec], data: Bytes) -> list[Array]:
    """Return each tensor as an array that shares the memory of the data section.

    A tensor that is not aligned to its element is a copy instead. This occurs only in files that
    other software wrote. So only views of a layout made by `Layout.plan` can be written through.
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
    """Return an array's bytes in the form of a version; they share its memory if possible."""
    plain = np.ascontiguousarray(array, dtype=numpy_dtype(spec.dtype))
    return plain.reshape(-1).view(np.uint8)


def copy(destinations: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy arrays pairwise. If dtypes differ, convert: values beyond the range become infinite."""
    with np.errstate(over="ignore", invalid="ignore"):  # users may turn warnings into errors
        for destination, source in zip(destinations, sources, strict=True):
            np.copyto(destination, source, casting="unsafe")


def target_fault(name: str, array: Array) -> str | None:
    """Return why an array cannot be written to; None if it can."""
    return None if array.flags.writeable else f"{name}: the array is read-only; give a writable one"
