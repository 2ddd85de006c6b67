"""Measure what a state folder costs a publish: `python benchmarks/keeping.py`.

Two publishers take turns, one of them with `state=`; each has workers of its own. A turn publishes
again and again, with a pause (a training step) between two publishes, or none. Before the other has
its turn, all is on disk: so what the thread that writes costs falls on its own publisher. What is
reported is the ratio of the medians of a turn and the one before it. A ratio above the bound, where
there is a pause, ends with status 1. Run it on a quiet machine.
"""

import argparse
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

from weightbus.benchmarks.bus import MODEL, ROADS, Bus, Road
from weightbus.benchmarks.comparison import Spread, over
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import Model, Shape
from weightbus.benchmarks.report import print_machine

BOUND = 1.02  # of the latency without a state folder
TURN_SECONDS = 2.0  # more than the thread that writes waits for a moment without a publish
DISK_SECONDS = 120.0
PAUSES = (0.05, 0.0)  # seconds between two publishes
SHAPES = ("256KiB/20", "200MiB/100")


def measure(shape: Shape, road: Road, pause: float, workers: int, rounds: int) -> Spread:
    """Return the ratio of publish latency with a state folder to that without."""
    with tempfile.TemporaryDirectory(prefix="weightbus-state-") as folder:
        plain = Bus("without", "weightbus_receive", road)
        keeping = Bus("with", "weightbus_receive", road, state=folder)
        model = Model(shape, zeros=False)
        times: dict[str, list[list[float]]] = {"without": [], "with": []}
        try:
            for bus in (plain, keeping):
                bus.start(workers, model)
            for number in range(rounds + 1):
                for bus in (plain, keeping):
                    took = turn(bus, model, pause)
                    if number:  # the first is for warming up
                        times[bus.title].append(took)
                wait_for_disk(keeping)
            for bus in (plain, keeping):
                bus.publish_once()
                bus.check()
        finally:
            plain.stop()
            keeping.stop()
    return over(times["with"], times["without"])


def turn(bus: Bus, model: Model, pause: float) -> list[float]:
    """Publish for a while; return the seconds that each publish took."""
    times: list[float] = []
    begun = time.perf_counter()
    while not times or time.perf_counter() - begun < TURN_SECONDS:
        model.advance()
        times.append(bus.publish_once())
        time.sleep(pause)
    return times


def wait_for_disk(bus: Bus) -> None:
    """Wait until what was published last is on disk."""
    deadline = time.perf_counter() + DISK_SECONDS
    (running,) = {worker.running[MODEL] for worker in bus.publisher.workers().values()}
    while [stored.key for stored in bus.publisher.history(MODEL)] != [running]:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"version {running} is not on disk after {DISK_SECONDS} s")
        time.sleep(0.01)


def main(words: list[str]) -> int:
    """Measure, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Shape.parse, action="append", help=f"else {SHAPES}")
    parser.add_argument("--road", choices=ROADS, help="else both")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    told = parser.parse_args(words)
    console = Console()
    print_machine(describe(), console)
    table = Table("model", "road", "pause", f"with / without (must: <= {BOUND})")
    missed = False
    for shape in told.model or map(Shape.parse, SHAPES):
        for road in [told.road] if told.road else ROADS:
            for pause in PAUSES:
                ratio = measure(shape, road, pause, told.workers, told.rounds)
                missed |= pause > 0 and ratio.median > BOUND
                shown = f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
                table.add_row(shape.text, road, f"{pause * 1000:g} ms", shown)
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
