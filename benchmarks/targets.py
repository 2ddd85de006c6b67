"""Measure weightbus and compare it with its targets: `python benchmarks/targets.py`.

Choose rows with `--rows tcp,small`, and numbers of workers with `--workers 1,2`; `--must` measures
only numbers with a bound that must be kept. Nearly every number is a ratio within one run (or
bytes), so the bounds are the same on other machines.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weightbus.benchmarks import report
from weightbus.benchmarks.contender import missing
from weightbus.benchmarks.goals import Line
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import Shape
from weightbus.benchmarks.process import ProcessError
from weightbus.benchmarks.rows import MUST, PEERS, ROWS, Scale, measure

WIDTH = 120  # characters
MUST_ROUNDS = 5  # rounds of each comparison: about ten minutes in total
COLORS = {"reached": "green", "met": "green", "MISSED": "red", "not reached": "yellow"}


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    usual = Scale()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=_rows, help=f"some of {', '.join(ROWS)}; else all")
    parser.add_argument("--must", action="store_true", help="in ten minutes: what must be kept")
    parser.add_argument(
        "--bench", type=Path, help="what bench.py --json wrote: what it holds is not measured again"
    )
    parser.add_argument("--workers", type=_integers, default=usual.workers, help="as 1,2,4")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--starts", type=int, default=usual.starts, help="fresh processes")
    parser.add_argument(
        "--seconds", type=float, default=usual.seconds, help="for which a worker is stopped"
    )
    parser.add_argument("--model", type=Shape.parse, default=usual.model, help="instead of 200 MiB")
    parser.add_argument("--json", type=Path, help="write all lines to this file")
    told = parser.parse_args(words)
    told.rows = told.rows or (MUST if told.must else set(ROWS))
    told.rounds = told.rounds or (MUST_ROUNDS if told.must else None)
    return told


def _rows(text: str) -> set[str]:
    unknown = set(text.split(",")) - set(ROWS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no rows {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}"
        )
    return set(text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def table_of(lines: list[Line]) -> Table:
    """Return the results as a table."""
    table = Table(title="targets", title_justify="left")
    for heading in ("row", "", "N", "measured (quartiles)", "must", "reach", "verdict"):
        table.add_column(heading, justify="right" if heading in ("N", "must", "reach") else "left")
    for line in lines:
        m, color = line.measured, COLORS[line.verdict]
        table.add_row(
            line.row,
            line.what,
            str(line.workers or ""),
            f"{m.median:.2f} ({m.low:.2f}-{m.high:.2f}) {line.unit}",
            _bound(line, line.must),
            _bound(line, line.reach),
            f"[{color}]{line.verdict}[/{color}]",
        )
    return table


def _bound(line: Line, bound: float | None) -> str:
    sign = "<=" if line.better == "less" else ">="
    return "" if bound is None else f"{sign} {bound:g}"


def main(words: list[str]) -> int:
    """Measure and report; return 1 if a measurement fails or a bound is not kept."""
    arguments = parse(words)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    machine = describe()
    report.print_machine(machine, console)
    report.print_left_out({name: missing(name) for name in sorted(PEERS)}, console)
    scale = Scale(
        model=arguments.model,
        workers=arguments.workers,
        rounds=arguments.rounds,
        starts=arguments.starts,
        seconds=arguments.seconds,
        bench=json.loads(arguments.bench.read_text())["comparisons"] if arguments.bench else (),
        must_alone=arguments.must,
    )
    lines: list[Line] = []
    try:
        with console.status("") as status:
            lines.extend(measure(arguments.rows, scale, status.update))
    except ProcessError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    finally:
        console.print(table_of(lines))
        if arguments.json:
            found = {"machine": machine, "lines": [line.as_json() for line in lines]}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(line.verdict == "MISSED" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
