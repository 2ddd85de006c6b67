"""Slices of tensors: their bytes in the data section, in chunks, and in the memory of a part."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import ChunkPlan
from weightbus.bus.cut import Cut, piece_of
from weightbus.bus.cut import ranges_of as wire
from weightbus.bus.protocol_limits import RANGES_MAX
from weightbus.codecs.errors import LayoutError
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.parts import (
    Box,
    PartLayout,
    Range,
    clipped,
    gather,
    ranges_of,
    scatter,
    size_of,
)

PIECES = json.loads((Path(__file__).parents[1] / "vectors" / "parts.json").read_text())["pieces"]
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)
DTYPES = {"U8": np.uint8, "F16": np.float16, "F32": np.float32, "I64": np.int64}


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    sides = list[tuple[int, int]]()
    for size in shape:
        begin = draw(st.integers(0, size))
        whole = draw(st.booleans())
        sides.append((0, size) if whole else (begin, draw(st.integers(begin, size))))
    return tuple(sides)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, Box | None]]:
    tensors, taken = dict[str, np.ndarray](), dict[str, Box | None]()
    for index in range(draw(st.integers(1, 5))):
        name, shape = f"t{index}", draw(SHAPES)
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        values = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype)
        tensors[name] = values.reshape(shape)
        if draw(st.booleans()):
            taken[name] = draw(st.none() | boxes(shape))
    return tensors, taken


def whole_of(tensors: dict[str, np.ndarray]) -> tuple[Layout, np.ndarray]:
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    layout = Layout.plan((n, names[t.dtype], t.shape) for n, t in tensors.items())
    data = np.empty(layout.nbytes, np.uint8)
    for spec in layout.tensors:
        data[spec.begin : spec.end] = np.frombuffer(tensors[spec.name].tobytes(), np.uint8)
    return layout, data


def sliced(tensor: np.ndarray, box: Box | None) -> bytes:
    return tensor[tuple(slice(*side) for side in box) if box is not None else ()].tobytes()


@given(models(), st.integers(1, 40))
def test_a_part_has_the_bytes_of_its_slices(
    model: tuple[dict[str, np.ndarray], dict[str, Box | None]], chunk_bytes: int
) -> None:
    tensors, taken = model
    layout, data = whole_of(tensors)
    part = PartLayout(layout, taken)
    memory = np.zeros(part.nbytes, np.uint8)
    cut = Cut(part, ChunkPlan(layout.nbytes, chunk_bytes))
    for index in range(-(-layout.nbytes // chunk_bytes)):
        chunk = data[index * chunk_bytes : (index + 1) * chunk_bytes]
        if index in cut.unneeded:
            continue
        if index % 2:
            cut.put(memory, index, chunk)
            continue
        ((_, _, numbers),) = cut.requests(index, 1)
        found = piece_of(chunk.tobytes(), index * chunk_bytes, wire(numbers))
        if found is None:
            cut.put(memory, index, chunk)
        else:
            piece, crc, rest = found
            of_chunk = cut.put_piece(memory, index, piece.tobytes(), crc, rest)
            assert of_chunk == crc32c(
                chunk.tobytes()
            )  # the checksum of a chunk that never was here
    assert {spec.name for spec in part.layout.tensors} == {*taken}
    for spec in part.layout.tensors:
        assert memory[spec.begin : spec.end].tobytes() == sliced(
            tensors[spec.name], taken[spec.name]
        )


@given(models(), st.integers(1, 40), st.data())
def test_one_request_for_many_chunks_has_the_pieces_of_each(
    model: tuple[dict[str, np.ndarray], dict[str, Box | None]],
    chunk_bytes: int,
    data: st.DataObject,
) -> None:
    tensors, taken = model
    layout, _ = whole_of(tensors)
    plan, part = ChunkPlan(layout.nbytes, chunk_bytes), PartLayout(layout, taken)
    if not plan.count:
        return
    cut, everything = Cut(part, plan), np.arange(layout.nbytes, dtype=np.uint8)
    needed = [index for index in range(plan.count) if index not in cut.unneeded]
    if not needed:
        return
    first = last = data.draw(st.sampled_from(needed))
    while last + 1 in needed:
        last += 1
    asked = list[int]()
    for begin, size, numbers in cut.requests(first, last + 1 - first):
        assert len(numbers) <= RANGES_MAX
        ranges = [Range(*numbers[at : at + 4]) for at in range(0, len(numbers), 4)]
        for index in range(begin, begin + size):
            asked.append(index)
            low, high = plan.span(index)
            piece = np.empty(size_of(part.within(low, high)), np.uint8)
            gather(everything[low:high], part.within(low, high), piece)
            if not numbers:
                assert piece.tobytes() == everything[low:high].tobytes()
                continue
            sent = np.empty(size_of(clipped(ranges, low, high)), np.uint8)
            gather(everything[low:high], clipped(ranges, low, high), sent)
            assert sent.tobytes() == piece.tobytes()
    assert asked == [*range(first, last + 1)]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 5), st.integers(0, 7), st.integers(1, 6)).map(
            lambda n: Range(n[0], n[1], n[1] + n[2], n[3])
        ),
        max_size=3,
    ),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_clipped_ranges_are_those_between_two_positions(
    ranges: list[Range], begin: int, length: int
) -> None:
    end = begin + length
    inside = [
        at - begin
        for each in ranges
        for k in range(each.times)
        for at in range(each.begin + k * each.stride, each.begin + k * each.stride + each.length)
        if begin <= at < end
    ]
    found = [*clipped(ranges, begin, end)]
    there = np.arange(length, dtype=np.uint8)
    into = np.zeros(size_of(found), np.uint8)
    gather(there, found, into)
    assert into.tolist() == inside
    back = np.full(length, 255, np.uint8)
    scatter(into, found, back)
    assert all(back[at] == at for at in inside)
    assert all(back[at] == 255 for at in {*range(length)} - {*inside})


def test_a_row_or_column_slice_is_one_range() -> None:
    layout = Layout.plan([("w", "BF16", (64, 4096, 256))])
    (spec,) = layout.tensors
    rows = ranges_of(spec, ((16, 32), (0, 4096), (0, 256)))
    assert rows == [Range(16 * 4096 * 512, 16 * 4096 * 512, 16 * 4096 * 512)]
    columns = ranges_of(spec, ((16, 32), (0, 4096), (128, 256)))
    assert columns == [Range(16 * 4096 * 512 + 256, 256, 512, 16 * 4096)]


def test_more_ranges_than_a_message_holds_are_fetched_whole() -> None:
    layout = Layout.plan([("w", "U8", (2000, 2, 2))])  # a corner of each square
    cut = Cut(
        PartLayout(layout, {"w": ((0, 2000), (0, 1), (0, 1))}), ChunkPlan(layout.nbytes, 4000)
    )
    assert [numbers for _, _, numbers in cut.requests(0, 2)] == [[0, 1, 4, 2000]]
    layout = Layout.plan([(f"t{i:04}", "U8", (4,)) for i in range(RANGES_MAX)])
    corner = {spec.name: ((0, 1),) for spec in layout.tensors}
    cut = Cut(PartLayout(layout, corner), ChunkPlan(layout.nbytes, layout.nbytes))
    assert cut.requests(0, 1) == [(0, 1, [])]


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [0, 1, 1],  # not four
        [0, 0, 1, 1],  # no bytes
        [0, 2, 1, 1],  # intervals that overlap
        [0, 1, 1, 0],  # none
        [100, 1, 1, 1],  # elsewhere
        [0, 10, 10, 1],  # all of it
        [0, 1, 2, 2**53 - 1, 0, 1, 2, 2**53 - 1],  # all of it, in a way
    ],
)
def test_a_request_that_names_no_piece_gets_the_chunk(numbers: list[int]) -> None:
    assert piece_of(bytes(10), 0, wire(numbers)) is None


def test_a_huge_range_costs_no_more_than_the_chunk() -> None:
    found = piece_of(bytes(range(100)), 2**50, wire([1, 1, 2, 2**53 - 1]))
    assert found is not None
    assert found[0].tolist() == [*range(1, 100, 2)]


@pytest.mark.parametrize(
    ("box", "text"),
    [
        (((0, 5), (0, 4)), r"is not inside of the published shape \[4, 4\]"),
        (((2, 1), (0, 4)), "is not inside"),
        (((0, 4),), "is not inside"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused_by_name(box: Box, text: str) -> None:
    layout = Layout.plan([("w", "F32", (4, 4))])
    with pytest.raises(LayoutError, match=rf"^w: the slice .*{text}"):
        PartLayout(layout, {"w": box})


def test_a_tensor_that_is_not_published_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"^v: in the part of this worker, not published"):
        PartLayout(Layout.plan([("w", "F32", (4, 4))]), {"v": None})


def test_a_tied_tensor_has_one_slice() -> None:
    layout = Layout.plan([("w", "F32", (4, 4))], {"v": "w"})
    part = PartLayout(layout, {"w": ((0, 2), (0, 4)), "v": ((0, 2), (0, 4))})
    assert (part.nbytes, part.layout.aliases) == (32, {"v": "w"})
    with pytest.raises(LayoutError, match="name one slice that has both"):
        PartLayout(layout, {"w": ((0, 2), (0, 4)), "v": ((2, 4), (0, 4))})


def test_a_slice_within_a_byte_is_refused() -> None:
    layout = Layout.plan([("w", "F4", (2, 4))])
    with pytest.raises(LayoutError, match="begins or ends within a byte"):
        PartLayout(layout, {"w": ((0, 2), (0, 1))})
    assert PartLayout(layout, {"w": ((0, 2), (0, 2))}).nbytes == 2


@pytest.mark.parametrize("case", PIECES, ids=[case["name"] for case in PIECES])
def test_pieces_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    chunk, numbers, begin = bytes.fromhex(case["chunk"]), case["ranges"], case["begin"]
    found = piece_of(chunk, begin, wire(numbers))
    expected = case["ok"]
    if expected is None:
        assert found is None
        return
    assert found is not None
    piece, crc, rest = found
    assert {"piece": piece.tobytes().hex(), "crc": crc, "rest": rest} == expected
