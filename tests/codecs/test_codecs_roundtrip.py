"""Any state becomes bytes and comes back bit for bit, whatever its dtypes, shapes and strides."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightbus.codecs.apply import as_arrays, as_tensors, check, copy_into
from weightbus.codecs.dtypes import DTYPES, numpy_dtype, torch_dtype
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.state import State, Writer, state_of, write_into

IN_TORCH = [row.name for row in DTYPES.values() if row.torch]
IN_NUMPY = [row.name for row in DTYPES.values() if row.numpy]
WAYS = ["plain", "transposed", "stepped"]


@dataclass(frozen=True)
class Recipe:
    """One tensor to make, of random bits, so that NaNs with payloads are among its elements."""

    dtype: str
    shape: tuple[int, ...]
    way: str
    seed: int

    def bits(self) -> npt.NDArray[np.uint8]:
        size = max(DTYPES[self.dtype].bits // 8, 1)
        raw = np.random.default_rng(self.seed).integers(0, 256, (*self.shape, size), np.uint8)
        return raw & np.uint8(1) if self.dtype == "BOOL" else raw

    def array(self) -> npt.NDArray[Any]:
        return arranged(self.bits().view(numpy_dtype(self.dtype))[..., 0], self.way)

    def tensor(self) -> torch.Tensor:
        flat = torch.from_numpy(self.bits().reshape(-1))
        dtype = torch_dtype(self.dtype)
        plain = flat.view(dtype) if len(flat) else torch.empty(0, dtype=dtype)
        return arranged(plain.view(self.shape), self.way)

    def other(self) -> torch.Tensor:
        """A tensor of the same form with other elements."""
        return replace(self, seed=self.seed + 1).tensor()


def arranged(x: Any, way: str) -> Any:
    """Give the same elements other strides."""
    if way == "plain" or not x.ndim:
        return x
    if way == "transposed":
        numpy = isinstance(x, np.ndarray)
        return np.asfortranarray(x) if numpy else x.mT.contiguous().mT if x.ndim > 1 else x
    if isinstance(x, np.ndarray):
        return np.repeat(x, 2, 0)[::2]
    wide = torch.empty((2 * len(x), *x.shape[1:]), dtype=x.dtype)
    return wide[::2].copy_(x)


def recipes(dtypes: list[str]) -> st.SearchStrategy[dict[str, Recipe]]:
    shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
    one = st.builds(
        Recipe, st.sampled_from(dtypes), shapes, st.sampled_from(WAYS), st.integers(0, 2**32)
    )
    return st.dictionaries(st.text("ab._é", min_size=1, max_size=4), one, max_size=6).filter(
        lambda made: not any(recipe.dtype == "F4" and not recipe.shape for recipe in made.values())
    )


def packed(state: State) -> tuple[Layout, npt.NDArray[np.uint8]]:
    layout = state.layout()
    data = np.full(layout.nbytes, 0xAA, np.uint8)
    write_into(state, layout, data)
    again, chunk_bytes = np.full(layout.nbytes, 0xAA, np.uint8), max(layout.nbytes // 3, 1)
    crcs: Any = Writer(layout, again).begin(state, chunk_bytes=chunk_bytes)
    assert bytes(again) == bytes(data)
    begins = range(0, layout.nbytes, chunk_bytes)
    assert [*crcs] == [crc32c(data[begin : begin + chunk_bytes]) for begin in begins]
    return Layout.parse(layout.header), data


def raw(x: Any) -> bytes:
    if isinstance(x, torch.Tensor):
        x = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return bytes(x.reshape(-1).view(torch.uint8).numpy()) if x.numel() else b""
    return np.ascontiguousarray(x).tobytes()


@given(recipes(IN_NUMPY))
def test_numpy_arrays(made: dict[str, Recipe]) -> None:
    source = {name: recipe.array() for name, recipe in made.items()}
    layout, data = packed(state_of(source))
    target = {name: np.zeros_like(x) for name, x in source.items()}
    assert check(layout, target) == []
    copy_into(layout, data, target)
    read = as_arrays(layout, data)
    for name, x in source.items():
        assert raw(target[name]) == raw(read[name]) == raw(x) == made[name].bits().tobytes()
        assert target[name].strides == np.zeros_like(x).strides
        assert not read[name].flags.writeable


@given(recipes(IN_TORCH))
def test_torch_tensors(made: dict[str, Recipe]) -> None:
    source = {name: recipe.tensor() for name, recipe in made.items()}
    layout, data = packed(state_of(source))
    target = {name: recipe.other() for name, recipe in made.items()}
    pointers = {name: x.data_ptr() for name, x in target.items()}
    assert check(layout, target) == []
    copy_into(layout, bytes(data), target)  # read-only, as a shared mapping would be
    read = as_tensors(layout, data)
    for name, x in source.items():
        assert raw(target[name]) == raw(read[name]) == raw(x) == made[name].bits().tobytes()
        assert target[name].data_ptr() == pointers[name]


@given(recipes([name for name in IN_NUMPY if name in IN_TORCH]))
def test_numpy_and_torch_are_the_same_on_the_wire(made: dict[str, Recipe]) -> None:
    arrays = packed(state_of({name: recipe.array() for name, recipe in made.items()}))
    tensors = packed(state_of({name: recipe.tensor() for name, recipe in made.items()}))
    assert arrays[0] == tensors[0]
    assert bytes(arrays[1]) == bytes(tensors[1])


@pytest.mark.parametrize("dtype", IN_TORCH)
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_a_buffer_at_any_address_can_be_read(dtype: str, offset: int) -> None:
    recipe = Recipe(dtype, (3, 2), "plain", 5)
    layout, data = packed(state_of({"x": recipe.tensor(), "y": torch.zeros(1)}))
    moved = np.zeros(data.size + 16, np.uint8)[offset : offset + data.size]
    moved[:] = data
    target = {"x": recipe.other(), "y": torch.ones(1)}
    copy_into(layout, moved, target)
    assert raw(target["x"]) == raw(recipe.tensor())
    assert raw(as_tensors(layout, moved)["x"]) == raw(recipe.tensor())
    if DTYPES[dtype].numpy:
        assert raw(as_arrays(layout, moved)["x"]) == raw(recipe.tensor())


@given(st.integers(1, 5), st.booleans(), st.booleans())
def test_conjugate_and_negative_views_are_resolved(size: int, conj: bool, imag: bool) -> None:
    x = torch.randn(size, dtype=torch.complex64)
    x = x.conj() if conj else x
    x = x.imag if imag else x  # the imaginary part of a conjugate is a negative view
    layout, data = packed(state_of({"x": x, "y": x.resolve_conj().resolve_neg().clone()}))
    read = as_tensors(layout, data)
    assert raw(read["x"]) == raw(read["y"]) == raw(x)


def test_big_endian_arrays_are_turned_round() -> None:
    nan = np.array([0x7FC12345, 0x3F800000], np.uint32).view(np.float32)
    layout, data = packed(state_of({"x": nan.astype(">f4"), "y": nan.byteswap().view(">f4")}))
    assert raw(as_arrays(layout, data)["y"]) == raw(nan)
    target = {"x": np.zeros(2, ">f4"), "y": np.zeros(2, ">f4")}
    copy_into(layout, data, target)
    assert raw(target["y"]) == raw(nan.byteswap())


def test_a_writer_is_used_again_and_checks_what_it_is_given() -> None:
    state = state_of({"a": torch.ones(3), "b": np.zeros(2, np.int64)})
    layout = state.layout()
    data = np.zeros(layout.nbytes, np.uint8)
    writer = Writer(layout, data)
    writer.write(state)
    again = state_of({"a": torch.full((3,), 2.0), "b": np.ones(2, np.int64)})
    assert again.layout(layout) is layout
    writer.begin(again, chunk_bytes=5)
    assert as_tensors(layout, data)["a"].tolist() == [2.0] * 3
    assert as_arrays(layout, data)["b"].tolist() == [1, 1]
    before = bytes(data)
    for other in ({"a": torch.ones(1), "b": np.zeros(2, np.int64)}, {"a": torch.ones(3)}):
        with pytest.raises(ValueError, match="has other tensors than <Layout"):
            writer.write(state_of(other))
    assert bytes(data) == before


@pytest.mark.parametrize("nbytes", [0, 11, 13])
def test_a_buffer_of_another_size_is_refused(nbytes: int) -> None:
    state = state_of({"a": torch.ones(3)})
    with pytest.raises(ValueError, match="has 12 bytes; the buffer"):
        write_into(state, state.layout(), bytearray(nbytes))
    with pytest.raises(ValueError, match="has 12 bytes; the buffer"):
        as_arrays(state.layout(), bytes(nbytes))


def test_only_aligned_writable_memory_is_written_into() -> None:
    state = state_of({"a": torch.ones(3)})
    crooked = np.zeros(13, np.uint8)[1:]
    for data in (bytes(12), crooked):
        with pytest.raises(ValueError, match="writable buffer that is aligned"):
            write_into(state, state.layout(), data)
