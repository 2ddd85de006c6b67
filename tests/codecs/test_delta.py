"""Patches lead from any base to any target of its layout, bit for bit, or are refused."""

import importlib
import os
import tracemalloc
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weightbus.codecs import native
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.delta import format as form
from weightbus.codecs.delta import kernels, numpy_kernels
from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.delta.patch import Delta
from weightbus.codecs.dtypes import DTYPES
from weightbus.codecs.errors import PatchError
from weightbus.codecs.layout import Layout

Bytes = NDArray[np.uint8]

# At all the edges: zeros, denormals, infinities, NaN, the least and the largest.
EDGES = np.array(
    [
        *(0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0x3FFF, 0x7BFF, 0x7C00, 0x7C01, 0x7F7F, 0x7F80),
        *(0x7F81, 0x7FC0, 0x7FFF, 0xFC00, 0xFF80, 0xFFC0, 0xFFFF),
    ],
    np.uint16,
)
WAYS = ("same", "units", "steps", "noise", "edges")


def weights(rng: np.random.Generator, nbytes: int) -> Bytes:
    """Return bytes that are weights in bfloat16, as far as they are anything."""
    normal = rng.normal(0, 0.02, -(-nbytes // 2)).astype(np.float32)
    return (normal.view(np.uint32) >> 16).astype("<u2").view(np.uint8)[:nbytes].copy()


def changed(rng: np.random.Generator, base: Bytes, way: str, density: float) -> Bytes:
    """Return what some elements of 16 bits are changed to, or some bytes of an odd number."""
    target = base.copy()
    halves = target[: base.size // 2 * 2].view("<u2")
    at = np.flatnonzero(rng.random(halves.size) < density)
    if way == "units":
        halves[at] ^= 1
    elif way == "steps":
        sizes = rng.geometric(0.1, at.size) * rng.choice([-1, 1], at.size)
        halves[at] = (halves[at].astype(np.int64) + sizes).astype(np.uint16)
    elif way == "noise":
        halves[at] = rng.integers(0, 2**16, at.size)
    elif way == "edges":
        halves[at] = rng.choice(EDGES, at.size)
    if way != "same" and target.size % 2:
        target[-1] ^= 1
    return target


def layout_of(tensors: list[tuple[str, tuple[int, ...]]], tied: bool) -> Layout:
    entries = [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)]
    return Layout.plan(entries, {"alias": "t0"} if tied and entries else {})


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(form, "GROUP_BLOCKS", 3)


# Sub-byte elements must fill whole bytes: F4 by twos, F6 by fours.
TAILS = {"F4": (2,), "F6_E2M3": (4,), "F6_E3M2": (4,)}
TENSORS = st.builds(
    lambda dtype, shape: (dtype, (*shape, *TAILS.get(dtype, ()))),
    st.sampled_from(["BF16", "F16", "I16", "U16"]) | st.sampled_from([*DTYPES]),
    st.lists(st.integers(0, 40), max_size=2),
)
LAYOUTS = st.builds(layout_of, st.lists(TENSORS, max_size=4), st.booleans())
DENSITIES = st.sampled_from([0.0, 0.003, 0.01, 0.1, 0.5, 1.0])


@pytest.mark.usefixtures("small_blocks")
@given(
    LAYOUTS,
    st.sampled_from(WAYS),
    st.sampled_from(WAYS),
    DENSITIES,
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_a_patch_leads_from_the_base_to_the_target(
    layout: Layout, start: str, way: str, density: float, classes: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = changed(rng, weights(rng, layout.nbytes), start, 0.3)
    target = changed(rng, base, way, density)
    patch = encode(layout, base, target, classes=classes)
    assert np.array_equal(Delta(layout, patch).apply(base), target)
    in_place = base.copy()
    assert Delta(layout, patch).apply(in_place, in_place) is in_place
    assert np.array_equal(in_place, target)


def test_blocks_of_full_size_in_more_than_one_group() -> None:
    elements = form.BLOCK_ELEMENTS * form.GROUP_BLOCKS + 1
    layout = Layout.plan([("w", "BF16", (elements,))])
    rng = np.random.default_rng(1)
    base = weights(rng, layout.nbytes)
    target = changed(rng, base, "units", 0.01)
    target[-1] ^= 1
    patch = Delta(layout, encode(layout, base, target))
    assert [part.mode for part in patch.parts] == [form.STEPS] * form.GROUP_BLOCKS + [form.RAW]
    assert np.array_equal(patch.apply(base), target)


def modes_of(base: Bytes, target: Bytes, dtype: str = "BF16", **how: Any) -> list[str]:
    layout = Layout.plan([("w", dtype, (base.size * 8 // DTYPES[dtype].bits,))])
    patch = Delta(layout, encode(layout, base, target, **how))
    names = {form.OVERWRITE: "overwrite", form.RAW: "raw"}
    return [
        names.get(part.mode)
        or ("class" if part.table is not None and len(part.table) > 1 else "flat")
        for part in patch.parts
    ]


def test_the_mode_is_the_one_that_costs_least() -> None:
    rng = np.random.default_rng(2)
    base = weights(rng, 2 * form.BLOCK_ELEMENTS)
    exponents = (base.view("<u2") >> 7) & 255
    likely = np.where(rng.random(exponents.size) < 2.0 ** (112.0 - exponents), 1, 0)
    target = (base.view("<u2") ^ likely.astype(np.uint16)).view(np.uint8)
    assert modes_of(base, base) == []
    assert modes_of(base, target) == ["class"]
    assert modes_of(base, target, classes=False) == ["flat"]
    assert modes_of(base, changed(rng, base, "units", 0.001)) == ["flat"]
    assert modes_of(base, changed(rng, base, "noise", 0.01)) == ["overwrite"]
    assert modes_of(base, changed(rng, base, "noise", 1.0)) == ["raw"]
    assert modes_of(base, changed(rng, base, "units", 0.01), "F32") == ["overwrite"]
    assert modes_of(base, changed(rng, base, "units", 1.0), "F32") == ["raw"]


def test_one_block_of_noise_does_not_cost_the_others_their_codes() -> None:
    rng = np.random.default_rng(3)
    base = weights(rng, 8 * form.BLOCK_ELEMENTS)
    target = changed(rng, base, "units", 0.01)
    noisy, begin = target.copy(), 2 * form.BLOCK_ELEMENTS
    noisy[begin : 2 * begin] = changed(rng, base, "noise", 1.0)[begin : 2 * begin]
    assert modes_of(base, noisy, classes=False) == ["flat", "raw", "flat", "flat"]
    layout = Layout.plan([("w", "BF16", (base.size // 2,))])
    quiet, loud = (len(encode(layout, base, made)) for made in (target, noisy))
    assert loud - begin < quiet


def test_the_codes_cost_what_they_should() -> None:
    rng = np.random.default_rng(4)
    base = weights(rng, 2**22)
    layout = Layout.plan([("w", "BF16", (base.size // 2,))])
    for density in (0.002, 0.01, 0.1):
        target = changed(rng, base, "units", density)
        changes = np.count_nonzero(base.view("<u2") != target.view("<u2"))
        p = changes / (base.size // 2)
        entropy = (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p + 1
        nbytes = len(encode(layout, base, target, classes=False)) - form.HEADER.size
        assert 8 * nbytes / changes < 1.02 * entropy


def test_keys_put_bit_patterns_in_order() -> None:
    every = np.arange(2**16).astype(np.uint16)
    places = numpy_kernels.keys(every)
    assert sorted(places) == [*range(2**16)]
    assert np.array_equal(numpy_kernels.elements_of(places), every)
    numbers = (every.astype(np.uint32) << 16).view(np.float32)
    ordered = numbers[np.argsort(places)]
    finite = ordered[np.isfinite(ordered)]
    assert (np.diff(finite) >= 0).all()


# What is wrong is refused, and changes nothing.


def small_patch() -> tuple[Layout, Bytes, Bytes, bytes]:
    return _small_patch(form.BLOCK_ELEMENTS)


@cache
def _small_patch(_blocks: int) -> tuple[Layout, Bytes, Bytes, bytes]:
    layout = Layout.plan([("a", "BF16", (300,)), ("b", "F32", (40,)), ("c", "I16", (50,))])
    rng = np.random.default_rng(5)
    base = weights(rng, layout.nbytes)
    target = changed(rng, base, "steps", 0.1)
    return layout, base, target, encode(layout, base, target)


def refused(layout: Layout, patch: bytes, base: Bytes) -> PatchError:
    with pytest.raises(PatchError) as caught:
        Delta(layout, patch).apply(base)
    return caught.value


@pytest.mark.usefixtures("small_blocks")
def test_no_bit_of_a_patch_can_be_flipped() -> None:
    layout, base, _, patch = small_patch()
    digest = digest_of(layout.id, base, 2**20)
    for bit in range(8 * len(patch)):
        damaged = bytearray(patch)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PatchError):
            Delta(layout, damaged).apply(base, base_digest=digest)


@pytest.mark.usefixtures("small_blocks")
@given(st.binary(max_size=200), st.integers(120, 400), st.integers(0, 60))
@settings(max_examples=150)
@example(b"\xff" * 200, 120, 200)
@example(b"", 223, 1)
def test_any_bytes_are_a_patch_or_refused(noise: bytes, at: int, cut: int) -> None:
    layout, base, _, patch = small_patch()
    other = patch[:at] + noise + b"\0" + patch[at + cut :]
    if other != patch:  # there are zeros in it
        refused(layout, other, base)
    refused(layout, noise, base)


def test_another_base_is_refused() -> None:
    layout, base, _, patch = small_patch()
    other = base.copy()
    other[17] ^= 1
    assert "for the base" in str(refused(layout, patch, other))
    assert "for the layout" in str(refused(Layout.plan([("a", "U8", (base.size,))]), patch, base))
    with pytest.raises(PatchError, match="data section of"):
        encode(layout, base[1:], base)


def test_a_base_that_is_not_what_it_is_said_to_be_is_found_out() -> None:
    layout, base, _, patch = small_patch()
    digest = digest_of(layout.id, base, 2**20)
    for seed in range(20):
        other = weights(np.random.default_rng(seed + 100), base.size)
        with pytest.raises(PatchError):
            Delta(layout, patch).apply(other, base_digest=digest)


@pytest.mark.parametrize("helper", [True, False] if kernels.BUILT else [False])
def test_what_a_body_claims_takes_no_memory(helper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BUILT", helper)
    table = np.array([[19, 0, 31, 0, 15]], np.uint8)
    base = np.zeros(2 * form.BLOCK_ELEMENTS, np.uint8)
    body = np.array([0, 0, 4, 1, 1, 1], np.uint8)  # it says that 2^18 steps follow
    tracemalloc.start()
    try:
        with pytest.raises(PatchError):
            kernels.read(body, table, base, form.BF16)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_an_encoder_that_fails_its_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, base, target, _ = small_patch()
    write = kernels.write
    monkeypatch.setattr(kernels, "write", lambda c, g, s, *rest: write(c, g, -s, *rest))
    with pytest.raises(PatchError, match="not that of the target"):
        encode(layout, base, target)
    encode(layout, base, target, check=False)


# The helper in C does what numpy does, at every level of instructions.

HELPER: Any = importlib.import_module("weightbus.codecs._delta") if kernels.BUILT else None
BLOCKS = st.sampled_from([1, 2, 63, 64, 65, 200, 1000, 5000])
KINDS = st.sampled_from([form.INTEGER, form.BF16, form.F16])
built = pytest.mark.skipif(not kernels.BUILT, reason="the helper was not built")
CHANGES = given(
    BLOCKS, KINDS, st.sampled_from(WAYS), DENSITIES, st.booleans(), st.integers(0, 2**32)
)


@pytest.fixture(params=HELPER.levels() if kernels.BUILT else [])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    HELPER.use(request.param)
    yield request.param
    HELPER.use(HELPER.levels()[0])


def test_the_helper_is_built_where_changes_are_tested() -> None:
    if os.environ.get("CI") and os.environ.get(native.CHOICE) != "0":
        assert kernels.BUILT, "a C compiler and Python's headers are needed here"


@pytest.mark.usefixtures("level")
def test_the_helper_finds_and_writes_what_numpy_does() -> None:
    @CHANGES
    def same(n: int, kind: int, way: str, density: float, odd: bool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        base = weights(rng, 2 * n + odd)[odd:]  # at an odd address
        target = changed(rng, changed(rng, base, "edges", 0.1), way, density)
        found = kernels.compare(base, target, kind)
        for one, other in zip(found, numpy_kernels.compare(base, target, kind), strict=True):
            assert np.array_equal(one, other)
        half = (found[0] + 1) // 2  # as if it were two blocks
        counts = np.stack([half, found[0] - half])
        order = np.argsort(
            np.concatenate([np.arange(c) >= h for c, h in zip(found[0], half, strict=True)]),
            kind="stable",
        )
        gaps, steps = found[1][order], found[2][order]
        table = kernels.tune(counts, gaps, steps)
        assert np.array_equal(table, numpy_kernels.tune(counts, gaps, steps))
        table = kernels.tune(found[0][None], *found[1:])
        for room in (2 * n, 10**6):
            body = kernels.write(*found, table, room)
            assert body == numpy_kernels.write(*found, table, room)
        assert body is not None
        at, values = kernels.read(np.frombuffer(body, np.uint8), table, base, kind)
        made = base.copy().view("<u2")
        made[at] = values
        assert np.array_equal(made, target.view("<u2"))
        assert len(at) == len(set(at.tolist()))

    same()


@pytest.mark.usefixtures("level")
def test_the_helper_refuses_what_numpy_does() -> None:
    @CHANGES
    @settings(max_examples=100)
    def same(n: int, kind: int, way: str, density: float, table_too: bool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        base = weights(rng, 2 * n)
        found = numpy_kernels.compare(base, changed(rng, base, way, density), kind)
        table = numpy_kernels.tune(found[0][None], *found[1:])
        body = np.frombuffer(numpy_kernels.write(*found, table, 10**6) or b"", np.uint8).copy()
        for _ in range(3):
            if body.size:
                body[rng.integers(body.size)] ^= 1 << rng.integers(8)
        if table_too:
            table[:, :4] = np.where(table[:, :4] == 31, 31, (table[:, :4] + rng.integers(2)) % 19)
        body = body[: rng.integers(body.size + 1)] if seed % 4 == 0 else body
        assert outcome(kernels.read, body, table, base, kind) == outcome(
            numpy_kernels.read, body, table, base, kind
        )

    same()


def outcome(read: Any, *args: Any) -> Any:
    """Return what a block is changed to, or that it is refused."""
    try:
        at, values = read(*args)
    except PatchError:
        return "refused"
    return sorted(zip(at.tolist(), values.tolist(), strict=True))


def test_no_more_steps_are_large_than_there_are() -> None:
    table = np.array([[1, 0, 2, 0, 0]], np.uint8)  # bits of a count: 1, of larges: 2
    for large in (2, 3):  # of one step; there is memory for no more
        bits = [1, large & 1, large >> 1, 1, 0, *[1] * (2 * large)]
        body = np.packbits(np.array(bits, np.uint8), bitorder="little")
        with pytest.raises(PatchError, match="large"):
            kernels.read(body, table, np.zeros(2048, np.uint8), 0)
