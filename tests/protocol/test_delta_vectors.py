"""The codec of patches agrees with `deltas.json`, in numpy and in C."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus.codecs.checksum import digest_of
from weightbus.codecs.delta import kernels
from weightbus.codecs.delta.patch import Delta
from weightbus.codecs.errors import PatchError
from weightbus.codecs.layout import Layout
from weightbus.tests.conformance.python_vectors import base_of, blob

VECTORS = Path(__file__).parents[1] / "vectors"
CASES: list[dict[str, Any]] = json.loads((VECTORS / "deltas.json").read_text())["cases"]


@pytest.fixture(params=[True, False] if kernels.BUILT else [False], ids=lambda b: "C" if b else "")
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(kernels, "BUILT", request.param)
    return request.param


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_deltas(case: dict[str, Any]) -> None:
    layout = Layout.parse(blob(case["layout"], VECTORS))
    base, patch = base_of(case), blob(case["patch"], VECTORS)
    if "error" in case["expect"]:
        out = np.full(base.size, 7, np.uint8)
        with pytest.raises(PatchError):
            Delta(layout, patch).apply(base, out)
        if case["name"] != "another target":
            assert (out == 7).all()
        return
    made = Delta(layout, patch).apply(base)
    wanted = case["expect"]["ok"]
    assert digest_of(layout.id, made, 2**12) == wanted["digest"]
    assert made.tobytes().hex() == case.get("target", made.tobytes().hex())


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", [c for c in CASES if "ok" in c["expect"]], ids=lambda c: c["name"])
def test_a_patch_that_ends_early_changes_nothing(case: dict[str, Any]) -> None:
    layout = Layout.parse(blob(case["layout"], VECTORS))
    base, patch = base_of(case), blob(case["patch"], VECTORS)
    out = np.full(base.size, 7, np.uint8)
    for end in range(len(patch)):
        with pytest.raises(PatchError):
            Delta(layout, patch[:end]).apply(base, out)
    assert (out == 7).all()
