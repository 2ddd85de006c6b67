"""Every client against every vector and every scenario: `python tests/conformance/run.py`.

Prints a matrix, writes docs/CONFORMANCE.md if everything was run, and ends with status 1 if
anything is red. Of thousands of plays side by side a busy machine spoils one now and then: a few
red ones are played again with nothing beside them, and what failed at first is printed, too.
"""

import argparse
import fnmatch
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from weightbus.tests.conformance import vectors
from weightbus.tests.conformance.languages import (
    CORE_LACKS,
    LANGUAGES,
    ROOT,
    Language,
    NotBuiltError,
    chosen,
)
from weightbus.tests.conformance.matrix import Cell, Matrix
from weightbus.tests.conformance.relaying import lacking
from weightbus.tests.conformance.scenarios import SCENARIOS, Scenario, play

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "CONFORMANCE.md"
AT_ONCE = 3  # scenarios of one language: they wait for timers more than for processors
AGAIN = 3  # times that a red scenario is played alone; and of more than so many, none is
SKIPPED = "skipped on this machine: "
SECTIONS = {"python": "scenarios", "rust": "core"}  # by who publishes

Row = tuple[str, str, Cell]  # section, row, cell


def examine(
    language: Language,
    names: Sequence[str],
    seed: int,
    *,
    on_vectors: bool,
    publishers: Sequence[str] = ("python",),
    publisher_of: Path = ROOT,
    relayed: bool = False,
) -> list[Row]:
    """Run one language; return its cells. (In a process of its own.)"""
    rows: list[Row] = []
    if on_vectors:
        for file, count in vectors.judge(language.command, language.unsupported).items():
            rows.append(("vectors", file, cell_of(count)))
    wanted = [s for s in SCENARIOS if s.name in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for publisher in publishers:
            play_one = partial(
                scenario_cell,
                language=language,
                seed=seed,
                publisher=publisher,
                publisher_of=publisher_of,
                relayed=relayed,
            )
            cells = pool.map(play_one, wanted)
            section = SECTIONS[publisher]
            rows += [(section, s.name, cell) for s, cell in zip(wanted, cells, strict=True)]
    return rows


def scenario_cell(
    scenario: Scenario,
    language: Language,
    seed: int,
    publisher: str = "python",
    publisher_of: Path = ROOT,
    *,
    relayed: bool = False,
) -> Cell:
    """Play one scenario; `publisher_of` is the checkout that has the Rust core as publisher."""
    if relayed and (why := lacking(scenario.name, publisher)):
        return Cell("unsupported", reason=why)
    unsupported = {**language.unsupported, **(CORE_LACKS if publisher == "rust" else {})}
    if scenario.name in unsupported:
        return Cell("unsupported", reason=unsupported[scenario.name])
    driver = chosen("rust", publisher_of)[0].command if publisher == "rust" else None
    fault = play(scenario, language.command, seed, publisher=driver, relayed=relayed)
    return Cell("wrong", faults=(fault,)) if fault else Cell("right")


def cell_of(count: vectors.Count) -> Cell:
    """Return the cell of a table of vectors."""
    total = count.right + len(count.unsupported) + len(count.faults)
    text = str(count.right) if count.right == total else f"{count.right} of {total}"
    if count.faults:
        return Cell("wrong", text, faults=tuple(count.faults))
    if count.unsupported:
        return Cell("unsupported", text, "; ".join(dict.fromkeys(count.unsupported)))
    return Cell("right", text)


def build(languages: Sequence[Language], *, must: bool) -> tuple[list[Language], dict[str, Cell]]:
    """Build the drivers; return the languages that can be run, and why the others cannot."""
    able: list[Language] = []
    others: dict[str, Cell] = {}
    for language in languages:
        lacking = language.missing()
        try:
            if not lacking:
                language.build()
                able.append(language)
                continue
        except NotBuiltError as error:
            others[language.title] = Cell("wrong", faults=(str(error),))
            continue
        others[language.title] = (
            Cell("wrong", faults=(lacking,)) if must else Cell("not run", reason=SKIPPED + lacking)
        )
    return able, others


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    keys = ",".join(language.key for language in LANGUAGES)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", help=f"some of {keys}; else all")
    parser.add_argument(
        "--scenarios", help="names or patterns, such as lost-chunks,'damaged*'; then no vectors"
    )
    parser.add_argument(
        "--publisher", choices=[*SECTIONS, "both"], help="of scenarios; else both where all is run"
    )
    parser.add_argument(
        "--clients", type=Path, default=ROOT, metavar="FOLDER", help="a checkout with the clients"
    )
    parser.add_argument(
        "--publisher-of",
        type=Path,
        default=ROOT,
        metavar="FOLDER",
        help="a checkout with the Rust core as publisher, built",
    )
    parser.add_argument("--seed", type=int, default=1, help="decides what the network does")
    parser.add_argument(
        "--keep-going", action="store_true", help="go on with other languages after a red one"
    )
    parser.add_argument(
        "--require-all", action="store_true", help="a missing toolchain is red (as where CI is set)"
    )
    parser.add_argument("--no-build", action="store_true", help="take the drivers that are there")
    parser.add_argument(
        "--relay", action="store_true", help="with a relay between publisher and worker; no vectors"
    )
    parser.add_argument("--jobs", type=int, default=2, help="languages at a time")
    options = parser.parse_args(words)
    options.clients = options.clients.resolve()
    options.publisher_of = options.publisher_of.resolve()
    return options


def chosen_scenarios(patterns: str | None) -> list[str]:
    """Return the names of the scenarios that are asked for."""
    names = [scenario.name for scenario in SCENARIOS]
    if patterns is None:
        return names
    wanted = [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns.split(","))]
    if not wanted:
        raise ValueError(f"no scenario {patterns}; there are {', '.join(names)}")
    return wanted


def examine_all(matrix: Matrix, languages: Sequence[Language], options: argparse.Namespace) -> None:
    """Run the languages, some at a time, and fill the matrix."""
    names = chosen_scenarios(options.scenarios)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        futures: dict[Future[list[Row]], Language] = {
            pool.submit(
                examine,
                language,
                names,
                options.seed,
                on_vectors=with_vectors(options),
                publishers=publishers_of(options),
                publisher_of=options.publisher_of,
                relayed=options.relay,
            ): language
            for language in languages
        }
        for future in as_completed(futures):
            title = futures[future].title
            rows = [] if future.cancelled() else future.result()
            wrong = sum(cell.verdict == "wrong" for _, _, cell in rows)
            if rows:
                print(f"{title}: {len(rows)} rows, {wrong} red", flush=True)
            for section, row, cell in rows:
                matrix.add(section, row, title, cell)
            if wrong and not options.keep_going:
                pool.shutdown(wait=False, cancel_futures=True)


def with_vectors(options: argparse.Namespace) -> bool:
    """Return whether the vectors are run, too: a relay makes no difference to them."""
    return options.scenarios is None and not options.relay


def play_again(
    matrix: Matrix,
    languages: Sequence[Language],
    seed: int,
    publisher_of: Path = ROOT,
    *,
    relayed: bool = False,
) -> list[str]:
    """Play a few red scenarios alone, and believe that; return what had failed, in words."""
    sections = {"python": matrix.scenarios, "rust": matrix.core}
    red = [
        (publisher, row, language, cells[language.title])
        for publisher, rows in sections.items()
        for row, cells in rows.items()
        for language in languages
        if language.title in cells and cells[language.title].verdict == "wrong"
    ]
    if len(red) > AGAIN:
        return []
    said: list[str] = []
    scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    for publisher, row, language, cell in red:
        given = (scenarios[row], language, seed, publisher, publisher_of)
        plays = (scenario_cell(*given, relayed=relayed) for _ in range(AGAIN))
        again = next((play for play in plays if play.verdict == "wrong"), None)
        matrix.add(SECTIONS[publisher], row, language.title, again or Cell("right"))
        alone = "fails again" if again else f"right {AGAIN} times alone"
        what = f"{language.title}, {row}, {publisher}"
        said.append(f"PLAYED AGAIN {what}: {alone}; it was: {cell.faults[0]}")
    return said


def publishers_of(options: argparse.Namespace) -> list[str]:
    """Return who is to publish: Python, the Rust core in its driver, or both in turn."""
    if options.publisher is None and options.publisher_of != ROOT:
        return ["rust"]
    both = options.publisher == "both" or (options.publisher is None and options.scenarios is None)
    return list(SECTIONS) if both else [options.publisher or "python"]


def in_order(matrix: Matrix) -> None:
    """Order rows as they are listed, whichever language came first."""
    matrix.vectors = dict(sorted(matrix.vectors.items()))
    for rows in (matrix.scenarios, matrix.core):
        by_name = dict(rows)
        rows.clear()
        rows.update({s.name: by_name[s.name] for s in SCENARIOS if s.name in by_name})


def counts_of(matrix: Matrix) -> list[str]:
    """Return how many scenarios each language passed, failed, and was not given."""
    counts: dict[str, Counter[str]] = {}
    for _, language, cell in matrix.cells():
        counts.setdefault(language, Counter())[cell.verdict] += 1
    return [
        f"{language}: {its['right']} passed, {its['wrong']} failed, {its['unsupported']} left out"
        for language, its in counts.items()
    ]


def complete(matrix: Matrix) -> bool:
    """Return whether every language was run on everything."""
    run_on = {language for _, language, cell in matrix.cells() if cell.verdict != "not run"}
    return run_on == {language.title for language in LANGUAGES}


def main(words: Sequence[str]) -> int:
    """Run, report, and return the exit status."""
    options = parse(words)
    try:
        languages = chosen(options.languages, options.clients)
        names = chosen_scenarios(options.scenarios)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    must = options.require_all or bool(os.environ.get("CI"))
    able, others = (languages, {}) if options.no_build else build(languages, must=must)
    matrix = Matrix(
        [language.title for language in languages], titles={s.name: s.title for s in SCENARIOS}
    )
    examine_all(matrix, able, options)
    again = play_again(matrix, able, options.seed, options.publisher_of, relayed=options.relay)
    for title, cell in others.items():
        for section in map(SECTIONS.__getitem__, publishers_of(options)):
            for name in names:
                matrix.add(section, name, title, cell)
        for file in vectors.tables() if with_vectors(options) else ():
            matrix.add("vectors", file, title, cell)
    in_order(matrix)
    print(matrix.plain(), *again, sep="\n")
    for title, cell in others.items():
        if cell.verdict == "not run":
            print(f"!!! {title} was NOT RUN: {cell.reason}")
    ours = options.clients == options.publisher_of == ROOT
    if options.relay:
        print(*counts_of(matrix), sep="\n")
    if with_vectors(options) and complete(matrix) and ours:
        PAGE.write_text(matrix.page())
        print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
    else:
        print("docs/CONFORMANCE.md is left as it is: not everything was run")
    return 1 if matrix.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
