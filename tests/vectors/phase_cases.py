"""Each arrow of the protocol's tables of phases, and each pair without one."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightbus.tests.vectors.levels import highest, section
from weightbus.tests.vectors.parts import Json

WORKER = {
    "version": "| phase | event | next |",
    "announced": "| an announced version lacks | event | next |",
    "arriving": "| state of an arriving version | event | next |",
    "model": "| state of a model | event | next |",
    "worker": "| state of a worker | event | next |",
}
PUBLISHER = {
    of: f"| state of a {of} | event | next |"
    for of in ("worker on the roster", "target", "decision", "published version")
}
RULES = {  # of the events that the document explains in a sentence; a table has the others'
    "known": ["W6"],
    "located": ["S2", "S6"],
    "opened": ["S6"],
    "full": ["W6"],
    "freed": ["W6"],
    "unpushed": ["W30", "W31"],
    "copy-started": ["S6"],
    "copy-ended": ["S6"],
    "patched": ["D5"],
    "replaced": ["W26"],
    "completed": ["W26"],
    "welcomed": ["W2"],
    "unknown": ["W20"],
    "refused": ["W20"],
    "silent": ["W19"],
}


def worker_tables() -> str:
    """Return the protocol's section of a worker's tables, and the tables that it does not require.

    The latter stand in the README of the vectors.
    """
    readme = (Path(__file__).parent / "README.md").read_text()
    more = readme.split("\n## Two more tables of phases\n")[1].split("\n## ")[0]
    return section("worker", "The states of a version") + more


def worker_cases() -> Iterator[Json]:
    """Yield those of `phases.json`."""
    yield from _cases(worker_tables(), WORKER)


def publisher_cases() -> Iterator[Json]:
    """Yield those of `publisher_phases.json`."""
    yield from _cases(section("publisher", "States"), PUBLISHER)


def _cases(text: str, tables: Mapping[str, str]) -> Iterator[Json]:
    """Yield each pair of a state and an event; `next` is null where nothing changes."""
    tables_of_events = re.findall(r"^\| event \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    events = "".join(tables_of_events)
    explained = dict(re.findall(r"^\| ([a-z-]+) \| (.*) \|$", events, re.MULTILINE))
    about = RULES | {e: re.findall(r"[WSP]\d+", words) for e, words in explained.items()}
    for of, head in tables.items():
        lines = text.split(head)[1].split("\n\n")[0].strip().splitlines()[1:]
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
        arrows = {(state, event): after for state, event, after in rows}
        states = dict.fromkeys([row[0] for row in rows] + [row[2] for row in rows])
        for state in states:
            for event in sorted({row[1] for row in rows}):
                after = arrows.get((state, event))
                yield {
                    "name": f"{of} {state} {event}",
                    "level": highest(about[event]),
                    "rules": about[event],
                    "of": of,
                    "state": state,
                    "event": event,
                    "next": after,
                }
