"""No tensor without memory ends a process: each kind is refused by name, in each place."""

import json
from pathlib import Path

import pytest

from weightbus.tests.cli.starting import python
from weightbus.tests.client.odd_tensors import KINDS, TARGETS, cases

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


def fault_of(name: str, text: str) -> str:
    """Say what is wrong with what came of a case; empty if it is right."""
    kind, _, place = name.partition(" | ")
    if text.startswith("SIG"):
        return f"ended by {text}"
    if kind in KINDS and name not in FILLED:
        wanted = SAID[kind].replace("w: ", "a.w: " if "mapping of mappings" in place else "w: ")
    else:
        return "" if text == "done" else f"not done: {text}"
    if "share a part" in text:
        return f"two at address 0 have nothing in common: {text}"
    return "" if wanted in text else f"{wanted!r} is not in {text}"


# One test, since each worker of a run in parallel would run the script for itself.
@pytest.mark.slow
@pytest.mark.timeout(ALL_SECONDS)
def test_no_tensor_ends_a_process_and_each_is_named_in_each_place() -> None:
    came: dict[str, str] = json.loads(python(SCRIPT, timeout=ALL_SECONDS).stdout)
    assert came.keys() == cases().keys()
    faults = {name: fault_of(name, text) for name, text in came.items()}
    assert {name: fault for name, fault in faults.items() if fault} == {}
