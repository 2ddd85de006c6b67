"""The tables of phases: those of code and vectors are the same, and are obeyed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightbus.bus.limits import Timing
from weightbus.bus.messages import Announce, Running
from weightbus.bus.publisher.tables import DECISIONS, TARGETS, VERSIONS, WORKERS
from weightbus.bus.staged import StagedVersion
from weightbus.bus.worker.phases import DISPLACED
from weightbus.bus.worker.tables import COMING, LACKS, MODES, SESSIONS, TRANSITIONS, Event, Phase
from weightbus.bus.worker.transfer import Transfer
from weightbus.bus.worker.version_store import (
    IN_MEMORY,
    AnnouncedEntry,
    ArrivingEntry,
    Received,
    RunningEntry,
    VersionEntry,
    VersionStore,
    WholeEntry,
)
from weightbus.codecs.layout import Layout

ROOT = Path(__file__).parents[2]
IN_ORDER = [phase for phase, arrows in TRANSITIONS.items() if arrows]
LAYOUT = Layout.plan([("w", "U8", (8,))])
EVENTS: list[Event] = sorted({event for arrows in TRANSITIONS.values() for event in arrows})
Table = Mapping[Any, Mapping[Any, str]]
OF_WORKER: dict[str, Table] = {
    "version": TRANSITIONS,
    "announced": LACKS,
    "arriving": COMING,
    "model": MODES,
    "worker": SESSIONS,
}
OF_PUBLISHER: dict[str, Table] = {
    "worker on the roster": WORKERS,
    "target": TARGETS,
    "decision": DECISIONS,
    "published version": VERSIONS,
}
SIDES = [("phases.json", OF_WORKER), ("publisher_phases.json", OF_PUBLISHER)]


@pytest.mark.parametrize(("file", "tables"), SIDES, ids=["worker", "publisher"])
def test_the_vectors_have_every_pair(file: str, tables: dict[str, Table]) -> None:
    cases = json.loads((ROOT / "tests" / "vectors" / file).read_text())["cases"]
    assert {(c["of"], c["state"], c["event"]): c["next"] for c in cases} == {
        (of, state, event): arrows.get(event)
        for of, table in tables.items()
        for state, arrows in table.items()
        for event in {event for each in table.values() for event in each}
    }


@pytest.mark.parametrize("phase", TRANSITIONS)
@pytest.mark.parametrize("event", EVENTS)
def test_what_has_no_arrow_changes_nothing(phase: Phase, event: Event) -> None:
    holds = VersionStore()
    held = at(holds, phase)
    after, had = TRANSITIONS[phase].get(event), holds._in_use  # noqa: SLF001 # pyright: ignore
    assert holds.move(held, event) == (after is not None)
    assert held.phase == (after or phase)
    live = [p for p in TRANSITIONS if TRANSITIONS[p] and held in holds.all(p)]
    assert live == ([held.phase] if TRANSITIONS[held.phase] else [])
    taken = had if held.phase in IN_MEMORY else 0
    assert holds._in_use == taken, "memory is given back, and once"  # noqa: SLF001 # pyright: ignore
    assert (held.key in holds.rejected) == (held.phase == "rejected")


@pytest.mark.parametrize(
    ("phase", "event", "after"),
    [
        (phase, *arrow)
        for phase in IN_ORDER
        for arrow in TRANSITIONS[phase].items()
        if TRANSITIONS[arrow[1]]
    ],
)
def test_a_version_that_moves_on_leaves_none_behind(
    phase: Phase, event: Event, after: Phase
) -> None:
    holds = VersionStore()
    held = {p: at(holds, p, number) for number, p in enumerate(reversed(IN_ORDER))}
    assert holds.move(held[phase], event)
    first, last = IN_ORDER.index(phase), IN_ORDER.index(after)
    passed = set(IN_ORDER[:last] if event == "renamed" else IN_ORDER[first + 1 : last + 1])
    passed -= {"ready", "applying"}  # the user has them
    assert {p for p, each in held.items() if each.phase == "dropped"} == passed
    assert set(DISPLACED.get(event, ())) == passed


def at(holds: VersionStore, phase: Phase, number: int = 1) -> VersionEntry:
    """Return a version that has come to a phase along the arrows."""
    told = {"layout": "0" * 64, "layout_bytes": 10, "nbytes": 8, "chunk_bytes": 8}
    words = {"commit": "auto", "acknowledge": "applied", "encoding": "raw"}
    announce = Announce(model="a", epoch=1, version=number, **told, **words)  # type: ignore[arg-type]
    held: VersionEntry = holds.expect(announce, pushed=False)
    for event in way_to(phase):
        into: Received | None = None
        if event == "begun" and isinstance(held, AnnouncedEntry):
            holds.give(held, np.empty(8, np.uint8))
            assert held.chunks is not None
            transfer = Transfer(announce, held.chunks, 0.0, Timing())
            into = ArrivingEntry(held.key, announce, LAYOUT, transfer, held.chunks)
        elif event == "whole" and held.chunks is not None:
            staged = StagedVersion("a", held.key, LAYOUT, held.chunks.memory, "")
            into = WholeEntry(held.key, announce, staged, chunks=held.chunks)
        elif event == "applied" and isinstance(held, WholeEntry):
            into = RunningEntry(held.key, announce, held.staged, running=Running(1, 1, ""))
        assert holds.move(held, event, into)
        held = into or held
    return held


def way_to(phase: Phase) -> list[Event]:
    ways: dict[Phase, list[Event]] = {"announced": []}
    todo: list[Phase] = ["announced"]
    while todo:
        here = todo.pop(0)
        for event, after in TRANSITIONS[here].items():
            if after not in ways and event != "mapped":  # a segment is nobody's buffer
                ways[after] = [*ways[here], event]
                todo.append(after)
    return ways[phase]
