"""Flip each arrow of the tables of phases in turn: every flip must fail a test.

    python tests/flip_arrows.py

An arrow is taken away, and led astray: to an end where it went on, and the other way round. The
tests are those of behaviour (the sequences of the golden vectors, the slot's and the worker's own
tests, seeds of the simulation), not those that compare tables. Prints what caught each flip; the
exit status is 1 if one was missed.
"""

import contextlib
import io
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightbus.bus.worker import phases
from weightbus.tests import simulate
from weightbus.tests.conformance.python_sequences import play
from weightbus.tests.conformance.python_vectors import blob
from weightbus.tests.conformance.sequences import fault_of_sequence
from weightbus.tests.conformance.vectors import tables

TABLES: dict[str, dict[str, dict[str, str]]] = {
    "version": phases.ARROWS,  # type: ignore[dict-item]
    "model": phases.MODES,  # type: ignore[dict-item]
    "worker": phases.SESSIONS,  # type: ignore[dict-item]
}
VECTORS = Path(__file__).parent / "vectors"
SEQUENCES = ("sequences.json", "applying.json", "renaming.json")
TESTS = ("test_slot.py", "test_worker_machine.py", "test_machines.py")
SEEDS = 150
Flip = tuple[str, str, str, str]  # table, state, event, and where it leads; "": nowhere


def flips() -> Iterator[Flip]:
    """Yield every flip."""
    for of, table in TABLES.items():
        for state, arrows in table.items():
            for event, right in arrows.items():
                others = [other for other in table if other != right]
                ended = not table[right]
                astray = next((o for o in others if bool(table[o]) == ended), others[0])
                yield from ((of, state, event, wrong) for wrong in ("", astray))


def caught(flip: Flip) -> tuple[Flip, str]:
    """Return what fails once an arrow is flipped; nothing if all passes."""
    of, state, event, wrong = flip
    arrows = TABLES[of][state]
    right = arrows[event]
    if wrong:
        arrows[event] = wrong
    else:
        del arrows[event]
    try:
        return flip, next((found for look in (sequence, test, seed) if (found := look())), "")
    finally:
        arrows[event] = right


def sequence() -> str:
    """Return the first sequence that is not played as it must be."""
    for file in SEQUENCES:
        for name, case in tables()[file].items():
            if "steps" in case:
                with contextlib.suppress(Exception):
                    steps = play(case, lambda value: blob(value, VECTORS))
                    if not fault_of_sequence(case, {"steps": steps}):
                        continue
                return f"{file}: {name}"
    return ""


class _First:
    """Remembers the first test that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Look at a test's outcome."""
        if report.failed and not self.name:
            self.name = report.nodeid


def test() -> str:
    """Return the first test that fails."""
    first = _First()
    files = [str(Path(__file__).parent / name) for name in TESTS]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *files], [first])
    return first.name


def seed() -> str:
    """Return the first seed that fails."""
    return next((text.splitlines()[0] for n in range(SEEDS) if (text := simulate.check(n))), "")


def main() -> int:
    """Flip them all, on all processors."""
    missed = 0
    every = [*flips()]
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=20) as pool:
        for (of, state, event, wrong), found in pool.imap(caught, every):
            missed += not found
            print(
                f"{of}: {state} --{event}--> {wrong or '(none)'}: {found or 'MISSED'}", flush=True
            )
    print(f"{len(every)} flips, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
