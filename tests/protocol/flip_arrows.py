"""Flip each arrow of the tables of phases in turn: every flip must fail a test.

    python tests/protocol/flip_arrows.py [--client node|go]

An arrow is taken away, and led astray: to an end where it went on, and the other way round. The
tests are those of behaviour (the sequences of the golden vectors, the slot's and the worker's own
tests, those of a publisher's machine, roster and memory, seeds of the simulation), not those that
compare tables. Prints what caught each flip; the exit status is 1 if one was missed. Of another
client it is what its driver makes of the vectors, and then tests of its own, both told by
`WEIGHTBUS_FLIP`.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from weightbus.bus.publisher import tables as publisher_tables
from weightbus.bus.worker import tables as worker_tables
from weightbus.tests.conformance.languages import Language, chosen
from weightbus.tests.conformance.python_sequences import play
from weightbus.tests.conformance.python_vectors import blob
from weightbus.tests.conformance.sequences import fault_of_sequence
from weightbus.tests.conformance.vectors import faults, judge, tables
from weightbus.tests.simulation import simulate

OF_PUBLISHER = {"published version", "worker on the roster", "target", "decision"}
TABLES: dict[str, dict[str, dict[str, str]]] = {
    "version": worker_tables.TRANSITIONS,  # type: ignore[dict-item]
    "announced": worker_tables.LACKS,  # type: ignore[dict-item]
    "arriving": worker_tables.COMING,  # type: ignore[dict-item]
    "model": worker_tables.MODES,  # type: ignore[dict-item]
    "worker": worker_tables.SESSIONS,  # type: ignore[dict-item]
    "published version": publisher_tables.VERSIONS,  # type: ignore[dict-item]
    "worker on the roster": publisher_tables.WORKERS,  # type: ignore[dict-item]
    "target": publisher_tables.TARGETS,  # type: ignore[dict-item]
    "decision": publisher_tables.DECISIONS,  # type: ignore[dict-item]
}
ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "vectors"
SEQUENCES = ("sequences.json", "applying.json", "renaming.json")
TESTS = (
    *("worker/test_follower.py", "worker/test_worker_machine.py"),
    "protocol/test_machines.py",
)
TESTS_OF_PUBLISHER = (
    *("publisher/test_publisher_machine.py", "publisher/test_roster.py"),
    "publisher/test_publication.py",
    *("memory/test_snapshots.py", "protocol/test_machines.py"),
)
SEEDS = 150
OWN_TESTS = {  # of a client, run in its folder
    "node": "node --test dist/tests/machine.test.js dist/tests/patches.test.js",
    "go": "go test -count 1 -timeout 60s -run Simulation|Nothing|Whoever|Shared ./internal/wbp",
}
OF_THREADS = {("applying", "put-back"), ("applying", "failed"), ("applying", "newer")}
OF_COPIES = {("received", "copy-started"), ("copied", "copy-ended")}
OF_SEGMENTS = {("layout", "located"), ("segment", "opened")}
OF_PROBES = {  # whoever opens memory at once is welcomed before anything else can happen
    *(("outside", "located"), ("inside", "located"), ("probing", "located")),
    *(("probing", "unknown"), ("probing", "refused"), ("probing", "silent")),
}
NO_SHARED_MEMORY = {("announced", "mapped"), ("applying", "stale"), ("probing", "welcomed")}
UNUSED = {  # no version of a client goes along these: no shared memory, no room, no other thread
    "node": OF_THREADS | OF_COPIES | OF_SEGMENTS | OF_PROBES | NO_SHARED_MEMORY,
    "go": OF_THREADS | OF_COPIES | OF_PROBES,
}
DROPPED = ("running", "newer", "announced")  # at once, as it is not the newest
SAME = {DROPPED, ("ready", "newer", "announced"), ("inside", "welcomed", "")}  # in other clients
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
        looks: tuple[Callable[[], str], ...] = (sequence, partial(test, TESTS), seed)
        if of in OF_PUBLISHER:
            looks = (partial(test, TESTS_OF_PUBLISHER), seed)
        return flip, next((found for look in looks if (found := look())), "")
    finally:
        arrows[event] = right


def caught_by(key: str, flip: Flip) -> tuple[Flip, str]:
    """Return what fails in another client; nothing if all passes."""
    (language,) = chosen(key)
    os.environ["WEIGHTBUS_FLIP"] = " ".join(flip).strip()
    return flip, vector(language) or own_test(language)


def vector(language: Language) -> str:
    """Return the first case that a driver does not answer as it must."""
    counts = judge(language.command, language.unsupported)
    del counts["phases.json"]  # it compares tables
    return next(iter(faults(counts)), "").split(": step")[0]


def own_test(language: Language) -> str:
    """Return that tests of a client fail, if they do."""
    done = subprocess.run(  # noqa: S603 - of the client
        OWN_TESTS[language.key].split(), cwd=ROOT / language.folder, capture_output=True, text=True
    )
    return OWN_TESTS[language.key] if done.returncode else ""


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


def test(names: Iterable[str]) -> str:
    """Return the first test of some files that fails."""
    first = _First()
    files = [str(ROOT / "tests" / name) for name in names]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *files], [first])
    return first.name


def seed() -> str:
    """Return the first seed that fails."""
    return next((text.splitlines()[0] for n in range(SEEDS) if (text := simulate.run(n)[0])), "")


def main() -> int:
    """Flip them all, on all processors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", choices=OWN_TESTS, help="another client than Python's")
    client = parser.parse_args().client
    if client:
        chosen(client)[0].build()
    look: Callable[[Flip], tuple[Flip, str]] = partial(caught_by, client) if client else caught
    missed = 0
    every = [
        f
        for f in flips()
        if f[1:] != DROPPED
        and (
            not client
            or (f[0] not in OF_PUBLISHER and f[1:3] not in UNUSED[client] and f[1:] not in SAME)
        )
    ]
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=20) as pool:
        for (of, state, event, wrong), found in pool.imap(look, every):
            missed += not found
            print(
                f"{of}: {state} --{event}--> {wrong or '(none)'}: {found or 'MISSED'}", flush=True
            )
    print(f"{len(every)} flips, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
