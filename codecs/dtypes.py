"""Lists the supported dtypes, with their names in safetensors, numpy and torch.

The rows of the table are in the order of safetensors (0.8.0), which decides where a tensor is in a
file: tensors of the last row come first. No row is narrower than a row above it, so this order also
aligns every tensor. A dtype that numpy or torch lacks can still be sent, for example to a file
target. An attempt to make an array or tensor of it in that library raises StateError.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

import ml_dtypes
import numpy as np

from .errors import StateError

if TYPE_CHECKING:
    import torch

Kind = Literal["bool", "uint", "int", "float", "complex", "scale", "packed"]


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype: its bits, and its names in numpy and torch (None: the library lacks this dtype)."""

    name: str
    bits: int
    kind: Kind
    numpy: str | None
    torch: str | None


# F4 has two elements per byte. torch counts the pair as one element (`_x2`), safetensors counts
# two: a torch shape [2, 4] is [2, 8] in the file. ml_dtypes has float4 and float6, too, but uses a
# whole byte for each element, so its bytes differ from the file's.
# F8_E8M0 is a power of two without a sign, for block scales, so no float is cast to it.
_ROWS = (
    DType("BOOL", 8, "bool", "bool", "bool"),
    DType("F4", 4, "packed", None, "float4_e2m1fn_x2"),
    DType("F6_E2M3", 6, "packed", None, None),
    DType("F6_E3M2", 6, "packed", None, None),
    DType("U8", 8, "uint", "uint8", "uint8"),
    DType("I8", 8, "int", "int8", "int8"),
    DType("F8_E5M2", 8, "float", "float8_e5m2", "float8_e5m2"),
    DType("F8_E4M3", 8, "float", "float8_e4m3fn", "float8_e4m3fn"),
    DType("F8_E8M0", 8, "scale", "float8_e8m0fnu", "float8_e8m0fnu"),
    DType("F8_E4M3FNUZ", 8, "float", "float8_e4m3fnuz", "float8_e4m3fnuz"),
    DType("F8_E5M2FNUZ", 8, "float", "float8_e5m2fnuz", "float8_e5m2fnuz"),
    DType("I16", 16, "int", "int16", "int16"),
    DType("U16", 16, "uint", "uint16", "uint16"),
    DType("F16", 16, "float", "float16", "float16"),
    DType("BF16", 16, "float", "bfloat16", "bfloat16"),
    DType("I32", 32, "int", "int32", "int32"),
    DType("U32", 32, "uint", "uint32", "uint32"),
    DType("F32", 32, "float", "float32", "float32"),
    DType("C64", 64, "complex", "complex64", "complex64"),
    DType("F64", 64, "float", "float64", "float64"),
    DType("I64", 64, "int", "int64", "int64"),
    DType("U64", 64, "uint", "uint64", "uint64"),
)

DTYPES: Mapping[str, DType] = {row.name: row for row in _ROWS}
RANK: Mapping[str, int] = {row.name: rank for rank, row in enumerate(_ROWS)}

_FROM_TORCH = {row.torch: row.name for row in _ROWS if row.torch}


def _numpy_type(name: str) -> "np.dtype[Any]":
    own = getattr(ml_dtypes, name, None)  # bfloat16 and the float8 family; numpy has the rest
    return np.dtype(own if own is not None else name).newbyteorder("<")


_TO_NUMPY = {row.name: _numpy_type(row.numpy) for row in _ROWS if row.numpy}
_FROM_NUMPY = {dtype: name for name, dtype in _TO_NUMPY.items()}


def dtype_named(name: str) -> DType:
    """Return the dtype of a safetensors name; raise StateError for an unknown name."""
    row = DTYPES.get(name)
    if row is None:
        raise StateError(f"{name!r} is not a safetensors dtype; these are: {', '.join(DTYPES)}")
    return row


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """Return numpy's dtype (little-endian) for a safetensors dtype name."""
    row = dtype_named(name)
    if row.numpy is None:
        raise StateError(
            f"numpy has no dtype that holds {name}; it can hold {', '.join(_TO_NUMPY)}. "
            f"{'Use a torch target' if row.torch else 'Use a file target'} for this model"
        )
    return _TO_NUMPY[name]


@cache
def name_of_numpy(dtype: "np.dtype[Any]") -> str:
    """Return the safetensors name of a numpy dtype of any byte order."""
    name = _FROM_NUMPY.get(dtype.newbyteorder("<"))
    if name is None:
        allowed = ", ".join(str(d) for d in _FROM_NUMPY)
        raise StateError(
            f"numpy dtype {dtype} has no safetensors name; convert it to one of: {allowed}"
        )
    return name


@cache
def torch_dtype(name: str) -> "torch.dtype":
    """Return torch's dtype for a safetensors dtype name."""
    import torch

    if sys.byteorder != "little":  # versions are little-endian, and torch has no byte orders
        raise StateError("torch tensors need a little-endian host; use numpy arrays on this one")
    row = dtype_named(name)
    found = getattr(torch, row.torch, None) if row.torch else None
    if found is None:
        allowed = ", ".join(r.name for r in _ROWS if r.torch and hasattr(torch, r.torch))
        raise StateError(
            f"torch {torch.__version__} has no dtype that holds {name}; it can hold {allowed}"
        )
    return cast("torch.dtype", found)


@cache
def name_of_torch(dtype: "torch.dtype") -> str:
    """Return the safetensors name of a torch dtype; raise StateError if there is none."""
    name = _FROM_TORCH.get(str(dtype).removeprefix("torch."))
    if name is None:
        allowed = ", ".join(f"torch.{known}" for known in _FROM_TORCH)
        raise StateError(f"{dtype} has no safetensors name; convert the tensor to one of {allowed}")
    return name


def castable(source: str, destination: str) -> bool:
    """Return whether values of dtype `source` may be cast to dtype `destination`.

    Floats may be rounded (for example, a worker has bfloat16 and its trainer float32). Integers may
    only be widened: a token id or step counter that wraps is data corruption, not rounding.
    """
    if source == destination:
        return True
    a, b = dtype_named(source), dtype_named(destination)
    if a.kind == "float" and b.kind == "float":
        return True
    widens = a.kind == b.kind or (a.kind == "uint" and b.kind == "int")
    return a.kind in ("int", "uint") and widens and a.bits < b.bits
