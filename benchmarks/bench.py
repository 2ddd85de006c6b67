"""Measure weightbus, its limits and its peers: `python benchmarks/bench.py`.

Every contender has its own processes. The contenders of a comparison take turns, the bytes of every
round are checked, and the ratios are the result. `docs/PERFORMANCE.md` explains how to read it.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from weightbus.benchmarks import against, cases, contender, plots, report
from weightbus.benchmarks.bus import TRANSPORTS
from weightbus.benchmarks.comparison import Comparison, Plan, compare
from weightbus.benchmarks.losses import losses
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import Shape
from weightbus.benchmarks.process import Process, ProcessError

COSTS_SECONDS = 300.0
PAUSE_MAX = 60.0  # seconds; after a longer pause, each publish is like the first
WIDTH = 130  # characters


def plans(arguments: argparse.Namespace) -> list[tuple[Plan, list[str]]]:
    """Return the plans that the user requested, each with its peers."""
    chosen, rounds = arguments.contenders, arguments.rounds
    peers = [name for name in chosen if contender.kind(name) == "peer"]
    if arguments.quick:
        few = [name for name in peers if name in cases.QUICK_PEERS]
        return [(replace(each, pause=arguments.pause), few) for each in cases.quick(rounds)]
    sizes = arguments.sizes or [Shape.parse(s) for s in cases.SIZES]
    sizes += [Shape.parse(s) for s in cases.FULL * arguments.full]
    planned = [(cases.plan(s, w, rounds), peers) for s in sizes for w in arguments.workers]
    if arguments.sizes is None or arguments.counts:
        few = [name for name in peers if name in cases.COUNT_PEERS]
        planned += [(each, few) for each in cases.counts(rounds)]
    if arguments.pause:
        return [(replace(each, pause=arguments.pause), with_it) for each, with_it in planned]
    if arguments.sizes is None:
        cold = [each for each in cases.cold(rounds) if each.workers in arguments.workers]
        planned += [(each, peers) for each in cold]
    return planned


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under two minutes")
    parser.add_argument("--full", action="store_true", help="512 MiB as well")
    parser.add_argument("--sizes", type=_shapes, help="such as 256KiB/20,200MiB/100")
    parser.add_argument("--counts", action="store_true", help="10 MiB in 1 to 10,000 tensors")
    parser.add_argument("--workers", type=_integers, default=list(cases.WORKERS), help="as 1,2,4")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument(
        "--pause", type=_pause, default=0.0, help="seconds of computing before each publish"
    )
    parser.add_argument(
        "--contenders", type=_names, default=contender.names(), help="such as ray_put,gloo_flat"
    )
    parser.add_argument("--costs", type=Shape.parse, help="a size")
    parser.add_argument(
        "--against", type=Path, help="another checkout: its time under ours, and nothing else"
    )
    parser.add_argument("--rows", type=_rows, default=list(against.ROWS), help="of --against")
    parser.add_argument("--bound", type=float, default=against.BOUND, help="of --against")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--plots", type=Path, help="write pictures into this folder")
    return parser.parse_args(words)


def _shapes(text: str) -> list[Shape]:
    return [Shape.parse(word) for word in text.split(",")]


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _pause(text: str) -> float:
    if not 0 <= (seconds := float(text)) <= PAUSE_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not 0 to {PAUSE_MAX:g} seconds")
    return seconds


def _rows(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(against.ROWS):
        known = ", ".join(against.ROWS)
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {known}")
    return text.split(",")


def _names(text: str) -> list[str]:
    """Return the named contenders, and the limits and weightbus contenders to compare them with."""
    known, wanted = contender.names(), set(text.split(","))
    if wanted - set(known):
        unknown = ", ".join(sorted(wanted - set(known)))
        raise argparse.ArgumentTypeError(f"no {unknown} here; there are {', '.join(known)}")
    for name in list(wanted):
        limit = contender.load(name).LIMIT
        wanted.add(limit)
        if contender.kind(name) == "peer":
            rivals = (contender.RIVALS, contender.RESIDENT)
            wanted |= {each[limit] for each in rivals if limit in each}
    return [name for name in known if name in wanted]


def measure_costs(shape: Shape) -> list[dict[str, Any]]:
    """Measure memory and pauses for each transport, in separate processes."""
    costs: list[dict[str, Any]] = []
    for transport in TRANSPORTS:
        with Process("costs", "costs", shape.text, transport) as process:
            costs.append(process.answer(COSTS_SECONDS))
    return costs


def measure(arguments: argparse.Namespace, console: Console) -> list[Comparison]:
    """Run all comparisons, and print each result as soon as it exists."""
    base = [name for name in arguments.contenders if contender.kind(name) != "peer"]
    done: list[Comparison] = []
    with console.status("") as status:
        for planned, peers in plans(arguments):
            comparisons = compare(planned, base, status.update, peers)
            report.print_comparison(comparisons[0], console)
            report.print_peers(comparisons[1:], console)
            done += comparisons
    return done


def hold(arguments: argparse.Namespace, console: Console) -> int:
    """Compare this checkout with another; return 1 if it is slower than the bound allows."""
    lines: list[against.Held] = []
    with against.imported_from(arguments.against) as environment, console.status("") as status:
        for shape in arguments.sizes or [None]:
            chosen = arguments.rows, arguments.workers, arguments.rounds
            measuring = status.update, shape, arguments.pause
            for held in against.measure(environment, *chosen, *measuring):
                report.print_held(held, arguments.bound, console)
                lines.append(held)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(held) for held in lines], indent=1) + "\n")
    return 1 if any(held.ratio.low > arguments.bound for held in lines) else 0


def main(words: list[str]) -> int:
    """Measure and report; return the exit status."""
    arguments = parse(words)
    # A file or a pipe has no width of its own; the tables need this much.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    machine = describe()
    report.print_machine(machine, console)
    if arguments.against is not None:
        try:
            return hold(arguments, console)
        except ProcessError as error:
            console.print(f"[red]{error}[/red]", highlight=False)
            return 1
    report.print_left_out(
        {name: contender.missing(name) for name in contender.all_names()}, console
    )
    try:
        comparisons = measure(arguments, console)
        with console.status("memory and pauses"):
            usual = cases.QUICK_COSTS if arguments.quick else cases.COSTS
            costs = measure_costs(arguments.costs or Shape.parse(usual))
    except ProcessError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    for each in costs:
        report.print_costs(each, console)
    results: dict[str, Any] = {
        "machine": machine,
        "comparisons": [c.as_json() for c in comparisons],
        "costs": costs,
    }
    report.print_losses(losses(results["comparisons"]), "copying", console)
    report.print_losses(losses(results["comparisons"], "over_resident"), "resident", console)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plots:
        for path in plots.draw(results["comparisons"], arguments.plots):
            console.print(f"wrote {path}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
