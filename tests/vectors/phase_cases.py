"""Each arrow of the protocol's tables of states, and each pair without one."""

import re
from collections.abc import Iterator

from weightbus.tests.vectors.levels import highest
from weightbus.tests.vectors.parts import PROTOCOL, Json

WORKER = {  # by what the cases are of, the description's name for the table
    "version": "version",
    "announced": "announced",
    "arriving": "arriving",
    "model": "model",
    "worker": "session",
}
PUBLISHER = {
    "worker on the roster": "worker",
    "target": "target",
    "decision": "decision",
    "published version": "version",
}
RULE = re.compile(r"\b[WSPD]\d+\b")


def worker_cases() -> Iterator[Json]:
    """Yield those of `phases.json`."""
    yield from _cases("worker", WORKER)


def publisher_cases() -> Iterator[Json]:
    """Yield those of `publisher_phases.json`."""
    yield from _cases("publisher", PUBLISHER)


def _cases(side: str, tables: dict[str, str]) -> Iterator[Json]:
    """Yield each pair of a state and an event; `next` is null where nothing changes."""
    for of, name in tables.items():
        table = PROTOCOL.tables[f"{side}.{name}"]
        for state, arrows in table.arrows.items():
            for event in sorted(table.events):
                texts = f"{table.events[event]} {table.states[state]}"
                rules = list(dict.fromkeys(RULE.findall(texts)))
                yield {
                    "name": f"{of} {state} {event}",
                    "level": highest(rules),
                    "rules": rules,
                    "of": of,
                    "state": state,
                    "event": event,
                    "next": arrows.get(event),
                }
