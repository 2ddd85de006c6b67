"""Patches that several encoders make together lead to the target, too, and are hardly larger."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus.codecs.checksum import digest_of
from weightbus.codecs.delta import format as form
from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.delta.parts import (
    SAMPLED,
    agreed,
    blocks_of,
    encode_part,
    join,
    propose,
    tables_of,
)
from weightbus.codecs.delta.patch import Delta
from weightbus.codecs.delta.worth import estimate, estimated, sums
from weightbus.codecs.errors import PatchError
from weightbus.codecs.layout import Layout
from weightbus.tests.codecs.test_delta import (
    DENSITIES,
    LAYOUTS,
    WAYS,
    Bytes,
    changed,
    small_blocks,
    weights,
)

__all__ = ["small_blocks"]
CHUNK_BYTES = 64


def header_of(layout: Layout, base: Bytes, target: Bytes) -> form.Header:
    ends = (digest_of(layout.id, data, CHUNK_BYTES) for data in (base, target))
    return form.Header(layout.id, layout.nbytes, CHUNK_BYTES, *ends)


def only(blocks: list[form.Block], data: Bytes) -> Bytes:
    """Return a data section of which only the bytes of some blocks are here."""
    own = np.zeros_like(data)
    for block in blocks:
        own[block.begin : block.end] = data[block.begin : block.end]
    return own


def joined(
    layout: Layout, base: Bytes, target: Bytes, owners: list[int], *, classes: bool = True
) -> bytes:
    """Return the patch of encoders, each of which has only its own blocks."""
    every = blocks_of(layout)
    mine = [[b for b, o in zip(every, owners, strict=True) if o == n] for n in range(3)]
    have = [(blocks, only(blocks, base), only(blocks, target)) for blocks in mine]
    tables = tables_of(agreed([propose(*each, classes=classes) for each in have]))
    parts = [encode_part(*each, tables, nbytes_max=2 * layout.nbytes) for each in have]
    assert None not in parts
    header = header_of(layout, base, target)
    return join(layout, header, owners, [part or b"" for part in parts], tables)


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
def test_parts_of_any_encoders_make_one_patch(
    layout: Layout, start: str, way: str, density: float, classes: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = changed(rng, weights(rng, layout.nbytes), start, 0.3)
    target = changed(rng, base, way, density)
    choose = random.Random(seed)
    owners = [choose.randrange(3) for _ in blocks_of(layout)]
    patch = joined(layout, base, target, owners, classes=classes)
    assert np.array_equal(Delta(layout, patch).apply(base), target)


def trained(blocks: int) -> tuple[Layout, Bytes, Bytes]:
    """Return a layout, and weights before and after a step."""
    layout = Layout.plan([("n", "F32", (999,)), ("w", "BF16", (blocks * form.BLOCK_ELEMENTS,))])
    rng = np.random.default_rng(1)
    base = weights(rng, layout.nbytes)
    return layout, base, changed(rng, base, "units", 0.02)


def test_a_patch_in_parts_is_hardly_larger() -> None:
    layout, base, target = trained(9)
    owners = [index % 3 for index in range(len(blocks_of(layout)))]
    whole = encode(layout, base, target, check=False)
    assert len(joined(layout, base, target, owners)) < 1.02 * len(whole)


def test_costs_are_estimated_from_the_sums_of_all_encoders() -> None:
    layout, base, target = trained(9)
    every = blocks_of(layout)
    mine = [every[:2], [], every[2:]]
    parts = [sums(blocks, only(blocks, base), only(blocks, target)) for blocks in mine]
    (flat, classes), work = estimated(layout.nbytes, parts)
    would = estimate(layout, base, target)
    assert flat == pytest.approx(would.sizes[0], rel=0.1)
    assert classes == pytest.approx(would.sizes[1], rel=0.1)
    assert work == pytest.approx(would.work, rel=0.1)


def test_an_encoder_gives_up_what_is_too_large_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, base, target = trained(1)
    blocks = blocks_of(layout)
    tables = tables_of(agreed([propose(blocks, base, target)]))
    part = encode_part(blocks, base, target, tables, nbytes_max=layout.nbytes)
    assert part is not None
    about: Any = blocks, base, target, tables
    assert encode_part(*about, nbytes_max=len(part)) == part
    assert encode_part(*about, nbytes_max=len(part) - 1) is None
    monkeypatch.setattr("weightbus.codecs.delta.parts.encode_block", lambda *_: (0, b""))
    assert encode_part(*about, nbytes_max=layout.nbytes, check=False) == bytes(2)
    with pytest.raises(PatchError, match="is not that of the target"):
        encode_part(*about, nbytes_max=layout.nbytes)


def test_parts_of_other_blocks_are_refused() -> None:
    layout, base, target = trained(2)
    blocks = blocks_of(layout)
    tables = tables_of(agreed([propose(blocks, base, target)]))
    part = encode_part(blocks, base, target, tables, nbytes_max=layout.nbytes) or b""
    header, owners = header_of(layout, base, target), [0] * len(blocks)
    assert join(layout, header, owners, [part], tables)
    for wrong in ([part[:-1]], [part + b"\0"], [part, b"\0"]):
        with pytest.raises(PatchError):
            join(layout, header, owners, wrong, tables)


def test_a_table_fits_blocks_that_are_not_in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "BLOCK_ELEMENTS", 4096)
    layout = Layout.plan([("w", "BF16", (4 * SAMPLED * form.BLOCK_ELEMENTS,))])
    rng = np.random.default_rng(1)
    base = weights(rng, layout.nbytes)
    quiet = changed(rng, base, "units", 0.05)
    target = quiet.copy()
    target.view("<u2")[::199] ^= 32
    for block in blocks_of(layout)[::4]:  # these are the sample: few steps, all of size 1
        target[block.begin : block.end] = base[block.begin : block.end]
        target[block.begin : block.begin + 400] = quiet[block.begin : block.begin + 400]
    patch = Delta(layout, joined(layout, base, target, [0] * (4 * SAMPLED)))
    assert np.array_equal(patch.apply(base), target)
    modes = [part.mode for part in patch.parts]
    assert modes.count(form.STEPS) >= 3 * SAMPLED, "steps are shorter than what they change"
