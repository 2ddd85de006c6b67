"""The walk of a version: how often it changes its room; a payload enters a machine once."""

import pytest

from weightbus.benchmarks.crossings import CHUNKS, changes, folded, traced

CHANGES_MAX = {"network": 21, "shared": 19}  # fewer is better: set it lower then


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


@pytest.mark.parametrize("road", CHANGES_MAX)
def test_the_walk_of_a_version(road: str) -> None:
    found = traced({}, road)
    assert changes(found) <= CHANGES_MAX[road]
    payloads = CHUNKS if road == "network" else 0
    assert [*found["entries"].values()] == [payloads] * bool(payloads), "each enters once"
