"""No tensor without memory ends a process: each kind is refused by name, in each place."""

import json
from pathlib import Path

import pytest

from weightbus.tests.cli.starting import python
from weightbus.tests.client.odd_tensors import KINDS, SOURCES, TARGETS, cases

SCRIPT = Path(__file__).with_name("odd_tensors.py")
ALL_SECONDS = 600

FREED = "w: its memory has been freed (a storage of 0 bytes)"
BLOCK = "is not one block of elements"
NOWHERE = "w: a tensor without memory (data_ptr() is 0)"
SAID = {
    "freed": FREED,
    "freed, from the middle": FREED,
    "short": "w: its storage has 8 bytes, and its elements reach to 6291456",
    "short, not contiguous": "w: its storage has 8 bytes, and its elements reach to 6291456",
    "fake": "w: a FakeTensor, which has a shape and no values",
    "masked": "w: a MaskedTensor, which would lose its mask",
    "wrapper": "w: a Wrapper, a wrapper subclass that has no memory of its own",
    "two tensors": BLOCK,
    "functional": NOWHERE,
    "zeros": NOWHERE,
    "nested": BLOCK,
    "jagged": BLOCK,
    "sparse": BLOCK,
    "compressed": BLOCK,
    "quantised": "w: torch.qint8 has no safetensors name",
    "meta": "w: on the meta device",
    "ZeRO 3": "w: the placeholder that DeepSpeed's ZeRO 3 leaves of a parameter (ds_id 7)",
}
# Modules on the meta device are given memory by their first version.
FILLED = {f"meta | {place}" for place in TARGETS if "module" in place or "new tensors" in place}


@pytest.fixture(scope="module", name="came")
def _came() -> dict[str, str]:
    run = python(SCRIPT, timeout=ALL_SECONDS)
    came: dict[str, str] = json.loads(run.stdout)
    assert came.keys() == cases().keys()
    return came


pytestmark = [pytest.mark.slow, pytest.mark.timeout(ALL_SECONDS)]


def test_no_process_is_ended_by_a_signal(came: dict[str, str]) -> None:
    assert [name for name, text in came.items() if text.startswith("SIG")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_says_what_the_tensor_is(came: dict[str, str], kind: str) -> None:
    for place in (*SOURCES, *TARGETS):
        name, text = f"{kind} | {place}", came[f"{kind} | {place}"]
        if name in FILLED:
            assert text == "done", name
            continue
        assert SAID[kind] in text.replace("a.w: ", "w: "), (name, text)
        assert "share a part" not in text, "two at address 0 have nothing in common"


def test_what_is_freed_between_two_versions_is_found_and_comes_back(came: dict[str, str]) -> None:
    between = {name: text for name, text in came.items() if name.startswith("between")}
    assert set(between.values()) == {"done"}, between
    assert came["is taken"] == "done"


def test_a_large_tensor_is_measured_though_its_address_is_the_same(came: dict[str, str]) -> None:
    assert "w: its storage has 8 bytes" in came["still at its address"]
