"""Finite values that a conversion loses are counted by name, alike in all dtypes."""

import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from weightbus.codecs.apply import Reader
from weightbus.codecs.dtypes import DTYPES, numpy_dtype
from weightbus.codecs.layout import Layout
from weightbus.codecs.overflow import Narrowed, narrows, sentence
from weightbus.codecs.state import state_of

FLOATS = [name for name, row in DTYPES.items() if row.kind == "float" and row.numpy]
NARROWING = [(a, b) for a in FLOATS for b in FLOATS if narrows(a, b)]


def rounded(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return values.astype(numpy_dtype(dtype)).astype(np.float64)


def section_of(values: np.ndarray[Any, Any]) -> tuple[Layout, np.ndarray[Any, Any]]:
    state = state_of({"w": values})
    return state.layout(), np.frombuffer(values.tobytes(), np.uint8)


def test_what_narrows() -> None:
    assert narrows("F32", "F16")
    assert narrows("BF16", "F16")
    assert narrows("F32", "BF16")  # the greatest of F32, which masks have, is infinite there
    assert narrows("F8_E5M2", "F8_E4M3")
    assert not narrows("F16", "BF16")
    assert not narrows("F16", "F32")
    assert not narrows("F32", "F32")
    assert not narrows("I64", "I32")


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize(("source", "destination"), NARROWING)
def test_the_edge_is_where_rounding_leaves_the_range(
    source: str, destination: str, with_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every value near the edge is lost exactly if it is rounded to what is not finite."""
    if not with_torch:
        monkeypatch.delitem(sys.modules, "torch")
    kind = numpy_dtype(destination)
    greatest = np.array(ml_dtypes.finfo(kind).max, kind)
    below = (greatest.view(f"u{kind.itemsize}") - 1).view(kind)
    edge = float(greatest) + (float(greatest) - float(below)) / 2
    with np.errstate(all="ignore"):
        near = np.array(edge).astype(numpy_dtype(source))
    code, unsigned = int(near.view(f"u{near.itemsize}")), f"u{near.itemsize}"
    by_single = source == "F64" and destination != "F32"  # some libraries round to F32 first
    around = np.arange(-40, 40)
    codes = code + around * (2**26 if by_single else 1)
    if by_single:  # half a step of F32 is so many of F64
        codes = np.concatenate([codes, code - 2**28 + around])
    values = codes[codes >= 0].astype(unsigned).view(numpy_dtype(source))
    values = values[np.isfinite(values.astype(np.float64))]
    if by_single:
        lost = ~np.isfinite(rounded(values.astype(np.float32), destination))
    else:
        lost = ~np.isfinite(rounded(values, destination))
    assert lost.any()
    assert not lost.all()
    layout, data = section_of(values)
    narrowed = Narrowed.of([(layout.tensors[0], source, destination)])
    assert narrowed is not None
    found = narrowed.found(data, {})
    assert found == {"w": (destination, int(np.count_nonzero(lost)))}
    layout, data = section_of(-values)
    assert narrowed.found(data, {}) == found
    layout, data = section_of(values[~lost])
    narrowed = Narrowed.of([(layout.tensors[0], source, destination)])
    assert narrowed is not None
    assert narrowed.found(data, {}) == {}


BEYOND = [1.0, -2.0, 1e5, -1e5, 7e4, math.inf, -math.inf, math.nan, 0.0]  # three were finite


@pytest.mark.parametrize("where", ["numpy", "torch", "torch transposed"])
@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("shape", [(9, 5), (900, 50)])
def test_a_target_that_cannot_hold_values(dtype: str, where: str, shape: tuple[int, int]) -> None:
    values = np.resize(np.array(BEYOND, np.float32), shape)
    layout, data = section_of(values)
    reader = Reader(layout, data)
    target: Any = np.zeros(shape, numpy_dtype({v.numpy: k for k, v in DTYPES.items()}[dtype]))
    if where != "numpy":
        target = torch.zeros(shape, dtype=getattr(torch, dtype))
    if where == "torch transposed":
        target = torch.zeros(shape[::-1], dtype=getattr(torch, dtype)).T
    name = {row.numpy: name for name, row in DTYPES.items()}[dtype]
    for _ in range(2):  # the second time it is known
        reader.copy_into({"w": target}, cast=True)
        assert reader.lost == {"w": (name, values.size // 3)}
    layout, data = section_of(np.ones(shape, np.float32))
    reader = Reader(layout, data)
    reader.copy_into({"w": target}, cast=True)
    assert reader.lost == {}


def test_one_target_after_another() -> None:
    layout, data = section_of(np.full(3, 1e5, np.float32))
    reader = Reader(layout, data)
    narrow, wide = {"w": torch.zeros(3, dtype=torch.half)}, {"w": torch.zeros(3)}
    reader.copy_into(narrow, cast=True)
    assert reader.lost == {"w": ("F16", 3)}
    for _ in range(2):
        reader.copy_into(wide, cast=True)
        assert reader.lost == {}


def test_the_sentence_names_the_first_few() -> None:
    found = {f"layer.{n}": ("F16", n) for n in range(1, 7)}
    assert sentence(found) == (
        "layer.1: 1 finite value is beyond F16 (at most 65504); "
        "layer.2: 2 finite values are beyond F16 (at most 65504); "
        "layer.3: 3 finite values are beyond F16 (at most 65504); "
        "layer.4: 4 finite values are beyond F16 (at most 65504); and likewise in 2 more tensors"
    )
    assert len(sentence({"\n" * 5000: ("F16", 1)})) < 1000


def test_what_lies_on_a_device_is_looked_at_there() -> None:
    """The same by torch alone, for a section that is a second copy on a device."""
    with np.errstate(over="ignore"):
        layout, data = section_of(np.array(BEYOND, np.float32).astype(np.float16))
    section = torch.from_numpy(data.copy())
    narrowed = Narrowed.of([(layout.tensors[0], "F32", "F16")])
    assert narrowed is not None
    sources = {"w": torch.tensor(BEYOND)}
    assert narrowed.found_on(section, sources) == {"w": ("F16", 3)}
    assert narrowed.found_on(torch.zeros_like(section), sources) == {}
    layout, data = section_of(np.array(BEYOND, np.float32))  # a worker's, which it converts from
    narrowed = Narrowed.of([(layout.tensors[0], "F32", "F8_E4M3")])
    assert narrowed is not None
    assert narrowed.found_on(torch.from_numpy(data.copy()), {}) == {"w": ("F8_E4M3", 3)}
    layout, data = section_of(np.array([448.0, -464.0], np.float32))
    narrowed = Narrowed.of([(layout.tensors[0], "F32", "F8_E4M3")])
    assert narrowed is not None
    assert narrowed.found_on(torch.from_numpy(data.copy()), {}) == {}
