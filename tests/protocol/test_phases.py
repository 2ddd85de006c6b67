"""The tables of phases: those of document, code and vectors are the same, and are obeyed."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from weightbus.bus.messages import Announce
from weightbus.bus.worker.holdings import IN_MEMORY, Held, Holdings
from weightbus.bus.worker.phases import ARROWS, MODES, SESSIONS, Event, Phase

ROOT = Path(__file__).parents[2]
WORKER = (ROOT / "docs" / "PROTOCOL.md").read_text().split("\n## 8. ")[1].split("\n## 9. ")[0]
CASES = json.loads((ROOT / "tests" / "vectors" / "phases.json").read_text())["cases"]
EVENTS: list[Event] = sorted({event for arrows in ARROWS.values() for event in arrows})


def of_the_document(head: str) -> dict[str, dict[str, str]]:
    """Return a table of the document whose first row is this."""
    block = WORKER.split(head)[1].split("\n\n")[0]
    found: dict[str, dict[str, str]] = {}
    for line in block.strip().splitlines()[1:]:
        state, event, after = (cell.strip() for cell in line.strip().strip("|").split("|"))
        found.setdefault(state, {})[event] = after
    return found


@pytest.mark.parametrize(
    ("head", "table"),
    [
        ("| phase | event | next |", ARROWS),
        ("| a model is | when | it is |", MODES),
        ("| a worker is | when | it is |", SESSIONS),
    ],
    ids=["versions", "models", "sessions"],
)
def test_the_document_has_the_tables_of_the_code(
    head: str, table: Mapping[str, Mapping[str, str]]
) -> None:
    assert of_the_document(head) == {state: dict(e) for state, e in table.items() if e}


def test_the_document_explains_every_phase_and_event() -> None:
    explained = re.findall(r"^\| ([a-z-]+) \| [^|]+ \|$", WORKER, re.MULTILINE)
    assert {*ARROWS, *EVENTS} <= {*explained}


def test_the_vectors_have_every_pair() -> None:
    versions = {(c["state"], c["event"]): c["next"] for c in CASES if c["of"] == "version"}
    assert versions == {
        (phase, event): arrows.get(event) for phase, arrows in ARROWS.items() for event in EVENTS
    }


@pytest.mark.parametrize("phase", ARROWS)
@pytest.mark.parametrize("event", EVENTS)
def test_what_has_no_arrow_changes_nothing(phase: Phase, event: Event) -> None:
    holds = Holdings()
    held = at(holds, phase)
    after, had = ARROWS[phase].get(event), held.buffer is not None
    assert holds.move(held, event) == (after is not None)
    assert held.phase == (after or phase)
    live = [p for p in ARROWS if ARROWS[p] and held in holds.all(p)]
    assert live == ([held.phase] if ARROWS[held.phase] else [])
    kept = had and held.phase in IN_MEMORY
    assert (held.buffer is not None) == kept, "memory is given back, and once"
    assert (held.key in holds.rejected) == (held.phase == "rejected")


def at(holds: Holdings, phase: Phase) -> Held:
    """Return a version that has come to a phase along the arrows."""
    told = {"layout": "0" * 64, "layout_bytes": 10, "nbytes": 8, "chunk_bytes": 8}
    words = {"commit": "auto", "acknowledge": "applied", "encoding": "raw"}
    announce = Announce(model="a", epoch=1, version=1, **told, **words)  # type: ignore[arg-type]
    held = holds.expect(announce, pushed=False, payload=None)
    for event in way_to(phase):
        if event == "begun":
            holds.give(held, np.empty(8, np.uint8))
        assert holds.move(held, event)
    return held


def way_to(phase: Phase) -> list[Event]:
    ways: dict[Phase, list[Event]] = {"announced": []}
    todo: list[Phase] = ["announced"]
    while todo:
        here = todo.pop(0)
        for event, after in ARROWS[here].items():
            if after not in ways and event != "mapped":  # a segment is nobody's buffer
                ways[after] = [*ways[here], event]
                todo.append(after)
    return ways[phase]
