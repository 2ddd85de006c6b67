"""Measure what looking on costs a publish: `python benchmarks/looking.py`.

    observer    somebody looks on as `weightbus top` does, in a process of its own
    dashboard   the publisher serves its page, and a process reads its stream as a browser does
    traces      OpenTelemetry takes spans of each publish; and without anybody who does

Two publishers take turns, one of which is looked at (or has spans made) in its own; each has
workers of its own. What is reported is the ratio of the medians of a turn and the one before it, of
both roads. A ratio above its bound ends with status 1. Run it on a quiet machine.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Generator
from importlib import import_module
from math import inf
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from weightbus.benchmarks.bus import ROADS, Bus, Road
from weightbus.benchmarks.comparison import Spread, over
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import Model, Shape
from weightbus.benchmarks.process import Process
from weightbus.benchmarks.report import print_machine
from weightbus.python_client.observing import shown, traces

# Of what nobody asks for; spans are for whoever wants them more than they cost.
BOUNDS = {"observer": 1.02, "dashboard": 1.02, "traces": inf, "no traces": 1.01}
SHAPES = ("256KiB/20", "200MiB/100")
TURN_SECONDS = 2.0  # several looks
ANSWER_SECONDS = 30.0

Looked = Callable[[], contextlib.AbstractContextManager[object]]


def turn(bus: Bus, model: Model, looked: Looked) -> list[float]:
    """Publish for a while, being looked at; return the seconds that each publish took."""
    times: list[float] = []
    with looked():
        bus.publish_once()  # whoever looks has begun
        begun = time.perf_counter()
        while not times or time.perf_counter() - begun < TURN_SECONDS:
            model.advance()
            times.append(bus.publish_once())
    return times


@contextlib.contextmanager
def looking(what: str, bus: Bus) -> Generator[Looked]:
    """Have what looks on at a publisher, when told to."""
    if what not in ("observer", "dashboard"):
        yield traced if what == "traces" else contextlib.nullcontext
        return
    publisher = bus.publisher
    address = publisher.address if what == "observer" else publisher.shown.dashboard
    with Process(f"the {what}", "looker", what, address) as looker:

        @contextlib.contextmanager
        def looked() -> Generator[None]:
            before = looker.ask("on", ANSWER_SECONDS)["looks"]
            yield
            if looker.ask("off", ANSWER_SECONDS)["looks"] == before:
                raise RuntimeError(f"the {what} has not looked")

        yield looked


@contextlib.contextmanager
def traced() -> Generator[None]:
    """Have spans made, and kept in memory for a while."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    with patch.object(traces, "tracer", lambda: provider.get_tracer("weightbus")):
        yield
    provider.shutdown()


def without(what: str) -> Looked:
    """Return how the other one publishes: without what is measured."""
    if "traces" not in what:
        return contextlib.nullcontext
    return lambda: patch.object(shown, "on_publish", _nothing)


def _nothing(_started: object) -> None:
    """Show nothing."""


def measure(what: str, shape: Shape, road: Road, workers: int, rounds: int) -> Spread:
    """Return the ratio of publish latency being looked at to that of nobody looking."""
    plain = Bus("plain", "weightbus_receive", road)
    page = "127.0.0.1:0" if what == "dashboard" else None
    seen = Bus("seen", "weightbus_receive", road, dashboard=page)
    model = Model(shape, zeros=False)
    times: dict[str, list[list[float]]] = {"plain": [], "seen": []}
    with contextlib.ExitStack() as stack:
        for bus in (plain, seen):
            stack.callback(bus.stop)
            bus.start(workers, model)
        looked = stack.enter_context(looking(what, seen))
        for number in range(rounds + 1):
            order = [(plain, without(what)), (seen, looked)]
            for bus, how in order if number % 2 else reversed(order):
                took = turn(bus, model, how)
                if number:  # the first is for warming up
                    times[bus.title].append(took)
        for bus in (plain, seen):
            bus.publish_once()
            bus.check()
    return over(times["seen"], times["plain"])


def main(words: list[str]) -> int:
    """Measure, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=BOUNDS, action="append", help="else all of them")
    parser.add_argument("--model", type=Shape.parse, action="append", help=f"else {SHAPES}")
    parser.add_argument("--road", choices=ROADS, help="else both")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    told = parser.parse_args(words)
    if "traces" in (told.what or BOUNDS):
        try:
            import_module("opentelemetry.sdk")
        except ImportError:
            parser.error("spans need pip install 'weightbus[traces]'; or choose --what")
    console = Console()
    print_machine(describe(), console)
    table = Table("what", "model", "road", "looked at / not", "must")
    missed = False
    for what in told.what or BOUNDS:
        for shape in told.model or map(Shape.parse, SHAPES):
            for road in [told.road] if told.road else ROADS:
                ratio = measure(what, shape, road, told.workers, told.rounds)
                missed |= ratio.median > BOUNDS[what]
                shown_as = f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
                console.print(f"{what}, {shape.text}, {road}: {shown_as}")  # a row takes its time
                table.add_row(
                    what,
                    shape.text,
                    road,
                    shown_as,
                    f"<= {BOUNDS[what]}" if BOUNDS[what] < inf else "",
                )
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
