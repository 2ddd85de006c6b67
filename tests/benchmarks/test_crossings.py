"""The way of a version through the code becomes no longer; a payload enters a machine once."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from weightbus.benchmarks.crossings import (
    CASES,
    CHUNKS,
    COUNTS,
    PYTHON,
    TOGETHER,
    Counted,
    folded,
    least,
    read,
    risen,
    traced,
)

ROOT = Path(__file__).parents[2]
ENOUGH = 100  # versions in time: into some of so many no timer falls
VERSIONS = 200  # at most: it ends with the first that show that nothing has risen


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
    steps = [(folder, "f") for folder in walk]
    assert "".join(folder for folder, _ in folded(steps)) == kept


@cache
def counted(case: str) -> dict[str, Any]:
    """Trace a case once, in the first test that needs it."""
    kept = read()[0] == PYTHON
    return traced({}, case, VERSIONS if kept else 1, until_kept=kept)


@pytest.mark.parametrize("case", CASES)
def test_the_way_of_a_version_becomes_no_longer(case: str) -> None:
    python, kept = read()
    if python != PYTHON:
        pytest.skip(f"the counts that are kept are of Python {python}")
    found = counted(case)
    rose = risen(case, found["counts"], kept)
    if rose and len(found["calls"]) < ENOUGH:
        pytest.skip("too busy a machine: a timer falls into each of the few versions in time")
    assert not rose, f"{', '.join(rose)} of {case}: {found['counts']}; kept is {kept[case]}"


def test_a_rise_is_what_is_beyond_the_least_of_all_versions_and_a_slack() -> None:
    few: dict[str, int] = dict.fromkeys(COUNTS, 100)
    many = {**few, "calls": 102}
    case = "4 KiB, network"
    kept: dict[str, Counted] = {case: {TOGETHER: few}}
    assert risen(case, {TOGETHER: many}, kept) == ["calls"]
    assert risen(case, {TOGETHER: {**few, "calls": 101}}, kept) == []
    assert risen(case, least([{TOGETHER: many}, {TOGETHER: few}]), kept) == []


@pytest.mark.parametrize("case", CASES)
def test_a_payload_enters_a_machine_once(case: str) -> None:
    payloads = CHUNKS if case == "four chunks, network" else 0
    assert [*counted(case)["entries"].values()] == [payloads] * bool(payloads)


def test_the_map_names_files_by_the_thread_that_they_run_in() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    walk = text.split("### The path of a version\n")[1].split("\n## ")[0]
    files = counted("four chunks, network")["files"]
    thread, named = "", 0
    for bold, file in re.findall(r"^\| (?:\*\*(.+)\*\*|`(.+?)`) \|", walk, re.MULTILINE):
        thread, named = bold or thread, named + bool(file)
        assert not file or file in files[thread], f"{file} in {thread}"
    assert named > 20
