"""The table of dtypes is safetensors' own, and every row means the same bytes everywhere."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from weightbus.codecs.dtypes import (
    DTYPES,
    castable,
    name_of_numpy,
    name_of_torch,
    numpy_dtype,
    torch_dtype,
)
from weightbus.codecs.errors import StateError

IN_TORCH = [row.name for row in DTYPES.values() if row.torch]
IN_NUMPY = [row.name for row in DTYPES.values() if row.numpy]


def test_the_rows_are_those_of_the_installed_safetensors() -> None:
    text = json.dumps({"x": {"dtype": "NONE", "shape": [], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(SafetensorError) as caught:
        deserialize(len(text).to_bytes(8, "little") + text)
    known = re.findall(r"`([A-Z0-9_]+)`", str(caught.value).split("expected one of")[1])
    assert set(DTYPES) == set(known)


def test_rows_never_get_narrower() -> None:
    eight = [max(row.bits, 8) for row in DTYPES.values()]
    assert eight == sorted(eight)


def test_the_order_is_the_one_that_safetensors_writes() -> None:
    sixteen = torch.zeros(16, dtype=torch.uint8)
    header = save({name: sixteen.view(torch_dtype(name)).clone() for name in IN_TORCH})
    size = int.from_bytes(header[:8], "little")
    assert list(json.loads(header[8 : 8 + size])) == IN_TORCH[::-1]


@pytest.mark.parametrize("name", IN_NUMPY)
def test_numpy_names_come_back(name: str) -> None:
    dtype = numpy_dtype(name)
    assert name_of_numpy(dtype) == name
    assert name_of_numpy(dtype.newbyteorder(">")) == name
    assert dtype.itemsize * 8 == DTYPES[name].bits


@pytest.mark.parametrize("name", IN_TORCH)
def test_torch_names_come_back(name: str) -> None:
    dtype = torch_dtype(name)
    assert name_of_torch(dtype) == name
    assert dtype.itemsize * 8 == DTYPES[name].bits * (2 if name == "F4" else 1)


@pytest.mark.parametrize("name", sorted(set(IN_NUMPY) & set(IN_TORCH)))
def test_numpy_and_torch_read_the_same_values(name: str) -> None:
    raw = np.arange(256, dtype=np.uint8).repeat(2)
    if name == "BOOL":
        raw &= 1
    wide = np.complex128 if name == "C64" else np.float64
    here = raw.view(numpy_dtype(name)).astype(wide)
    there = torch.frombuffer(raw, dtype=torch_dtype(name))
    there = there.to(torch.complex128 if name == "C64" else torch.float64)
    np.testing.assert_array_equal(here, np.asarray(there))


@pytest.mark.parametrize("dtype", ["O", "U4", "M8[s]", "c16", "f4,i4", "V3"])
def test_other_numpy_dtypes_are_refused_with_the_list(dtype: str) -> None:
    with pytest.raises(StateError, match=r"no safetensors name; convert .* float32"):
        name_of_numpy(np.dtype(dtype))


def test_float4_of_ml_dtypes_is_not_the_packed_one() -> None:
    with pytest.raises(StateError, match="no safetensors name"):
        name_of_numpy(np.dtype(ml_dtypes.float4_e2m1fn))
    with pytest.raises(StateError, match=r"numpy has no dtype that holds F4.*Use a torch target"):
        numpy_dtype("F4")
    with pytest.raises(StateError, match="Use a file target"):
        numpy_dtype("F6_E2M3")


@pytest.mark.parametrize("dtype", [torch.complex128, torch.quint8, torch.complex32])
def test_other_torch_dtypes_are_refused_with_the_list(dtype: torch.dtype) -> None:
    with pytest.raises(StateError, match=r"no safetensors name; convert .* torch.float32"):
        name_of_torch(dtype)


def test_unknown_names_are_refused_with_the_list() -> None:
    with pytest.raises(StateError, match=r"'F128' is not a safetensors dtype.*F64"):
        numpy_dtype("F128")
    with pytest.raises(StateError, match=r"no dtype that holds F6_E2M3; it can hold .*F32"):
        torch_dtype("F6_E2M3")


@pytest.mark.parametrize(
    ("source", "destination", "allowed"),
    [
        ("F32", "BF16", True),
        ("BF16", "F32", True),
        ("F32", "F8_E4M3", True),
        ("F4", "F4", True),
        ("I32", "I64", True),
        ("U8", "I16", True),
        ("U8", "U64", True),
        ("I64", "I32", False),
        ("U8", "I8", False),
        ("I8", "U16", False),
        ("I64", "F32", False),
        ("F32", "I64", False),
        ("C64", "F32", False),
        ("F32", "C64", False),
        ("F8_E8M0", "F32", False),
        ("F4", "F32", False),
        ("BOOL", "U8", False),
    ],
)
def test_casts_round_floats_and_widen_integers(
    source: str, destination: str, allowed: bool
) -> None:
    assert castable(source, destination) is allowed
