"""The cases of `phases.json`: each arrow of the protocol's tables, and each pair without one."""

from collections.abc import Iterator
from pathlib import Path

from weightbus.tests.vectors.parts import Json

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "PROTOCOL.md"
TABLES = {
    "version": "| phase | event | next |",
    "model": "| a model is | when | it is |",
    "worker": "| a worker is | when | it is |",
}


def phase_cases() -> Iterator[Json]:
    """Yield each pair of a state and an event; `next` is null where nothing changes."""
    text = DOCUMENT.read_text()
    for of, head in TABLES.items():
        lines = text.split(head)[1].split("\n\n")[0].strip().splitlines()[1:]
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
        arrows = {(state, event): after for state, event, after in rows}
        states = dict.fromkeys([row[0] for row in rows] + [row[2] for row in rows])
        for state in states:
            for event in sorted({row[1] for row in rows}):
                after = arrows.get((state, event))
                yield {
                    "name": f"{of} {state} {event}",
                    "of": of,
                    "state": state,
                    "event": event,
                    "next": after,
                }
