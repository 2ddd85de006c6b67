"""Measure weightbus beside its limits, in one run: `python benchmarks/bench.py`.

Every contender has processes of its own, all of a comparison are alive together and take turns,
every round's bytes are checked, and what counts are the ratios. `docs/PERFORMANCE.md` explains how
to read the result.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from weightbus.benchmarks import contender, plots, report
from weightbus.benchmarks.bus import ROADS
from weightbus.benchmarks.comparison import Comparison, Plan, compare
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import Shape
from weightbus.benchmarks.process import Process, ProcessError

SIZES = ("256KiB/20", "16MiB/40", "200MiB/100")
FULL = ("512MiB/200",)
WORKERS = (1, 2, 4)
QUICK = (("256KiB/20", 1), ("256KiB/20", 4), ("16MiB/40", 1), ("200MiB/100", 1), ("200MiB/100", 2))
COSTS = "200MiB/100"
COSTS_SECONDS = 300.0
WIDTH = 100  # characters

# By size up to so many bytes: rounds, and publishes in a row in each. Small ones vary more.
EFFORT = ((2**20, 30, 5), (2**26, 15, 2), (2**40, 9, 1))


def plan(shape: Shape, workers: int, rounds: int | None) -> Plan:
    """Return how often to measure a size."""
    for nbytes, usual, burst in EFFORT:
        if shape.nbytes <= nbytes:
            return Plan(shape, workers, rounds or usual, burst)
    raise ValueError(f"{shape.text} is more than can be measured here")


def plans(arguments: argparse.Namespace) -> list[Plan]:
    """Return what the user wants measured."""
    if arguments.quick:
        return [plan(Shape.parse(s), w, arguments.rounds or 7) for s, w in QUICK]
    sizes = arguments.sizes or [Shape.parse(s) for s in (*SIZES, *(FULL * arguments.full))]
    return [plan(s, w, arguments.rounds) for s in sizes for w in arguments.workers]


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under two minutes")
    parser.add_argument("--full", action="store_true", help="512 MiB as well")
    parser.add_argument("--sizes", type=_shapes, help="such as 256KiB/20,200MiB/100")
    parser.add_argument("--workers", type=_integers, default=list(WORKERS), help="such as 1,2,4")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument(
        "--contenders", type=_names, default=contender.names(), help="such as weightbus_receive"
    )
    parser.add_argument("--costs", type=Shape.parse, default=Shape.parse(COSTS), help="a size")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--plots", type=Path, help="write pictures into this folder")
    return parser.parse_args(words)


def _shapes(text: str) -> list[Shape]:
    return [Shape.parse(word) for word in text.split(",")]


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _names(text: str) -> list[str]:
    known = contender.names()
    unknown = set(text.split(",")) - set(known)
    if unknown:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = {*text.split(","), *(contender.load(name).LIMIT for name in text.split(","))}
    return [name for name in known if name in wanted]


def measure_costs(shape: Shape) -> list[dict[str, Any]]:
    """Measure memory and pauses on either road, each in a process of its own."""
    costs: list[dict[str, Any]] = []
    for road in ROADS:
        with Process("costs", "costs", shape.text, road) as process:
            costs.append(process.answer(COSTS_SECONDS))
    return costs


def main(words: list[str]) -> int:
    """Measure and report; return the exit status."""
    arguments = parse(words)
    # A file or a pipe has no width of its own; the tables need this much.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    machine = describe()
    report.print_machine(machine, console)
    comparisons: list[Comparison] = []
    try:
        with console.status("") as status:
            for planned in plans(arguments):
                comparison = compare(planned, arguments.contenders, status.update)
                report.print_comparison(comparison, console)
                comparisons.append(comparison)
            status.update("memory and pauses")
            costs = measure_costs(arguments.costs)
        for each in costs:
            report.print_costs(each, console)
    except ProcessError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    results: dict[str, Any] = {
        "machine": machine,
        "comparisons": [c.as_json() for c in comparisons],
        "costs": costs,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plots:
        for path in plots.draw(results["comparisons"], arguments.plots):
            console.print(f"wrote {path}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
