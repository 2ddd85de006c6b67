"""The walk of a version: how often it changes its room; a payload enters a machine once."""

import re
from pathlib import Path
from typing import Any

import pytest

from weightbus.benchmarks.crossings import CHUNKS, changes, folded, traced

ROOT = Path(__file__).parents[2]
CHANGES_MAX = {"network": 17, "shared": 13}  # fewer is better: set it lower then
TRIES = 10


@pytest.mark.parametrize(
    ("walk", "kept"),
    [
        ("", ""),
        ("PBP", "PBP"),
        ("PBPBPBP", "PBP"),
        ("PBPBPBC", "PBC"),
        ("PCPBCBCBPB", "PCPBCBPB"),
        ("PBCPBC", "PBCPBC"),
    ],
)
def test_a_loop_counts_once(walk: str, kept: str) -> None:
    steps = [(room, "f") for room in walk]
    assert "".join(room for room, _ in folded(steps)) == kept


@pytest.fixture(scope="module", name="walks")
def _walks() -> dict[str, dict[str, Any]]:
    return {road: _calm(road, most) for road, most in CHANGES_MAX.items()}


def _calm(road: str, most: int) -> dict[str, Any]:
    """Trace a publish until one is calm: a timer may be due in any, on a busy machine in most."""
    found = traced({}, road)
    for _ in range(TRIES - 1):
        if changes(found) <= most:
            break
        found = min(found, traced({}, road), key=changes)
    return found


@pytest.mark.parametrize("road", CHANGES_MAX)
def test_the_walk_of_a_version(road: str, walks: dict[str, dict[str, Any]]) -> None:
    found = walks[road]
    assert changes(found) <= CHANGES_MAX[road]
    payloads = CHUNKS if road == "network" else 0
    assert [*found["entries"].values()] == [payloads] * bool(payloads), "each enters once"


def test_the_map_names_files_by_the_thread_that_they_run_in(
    walks: dict[str, dict[str, Any]],
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    walk = text.split("### The path of a version\n")[1].split("\n## ")[0]
    thread, named = "", 0
    for bold, file in re.findall(r"^\| (?:\*\*(.+)\*\*|`(.+?)`) \|", walk, re.MULTILINE):
        thread, named = bold or thread, named + bool(file)
        assert not file or file in walks["network"]["files"][thread], f"{file} in {thread}"
    assert named > 20
