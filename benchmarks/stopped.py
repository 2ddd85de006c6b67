"""Measure a stopped worker's cost for the others: `... stopped SHAPE TRANSPORT WORKERS SECONDS`.

Two publishers take short turns. One has WORKERS workers. The other has one more, which gets SIGSTOP
in the middle of a version, and stays stopped for SECONDS: while the buffers of its connections
fill, until it is lost after 5 s, and until it is disconnected after 30 s. All times are until the
other workers have applied. At the end the worker continues and must get the last version. Prints
one line of JSON.
"""

import os
import signal
import statistics
import sys
import time
from concurrent.futures import Future
from typing import Any

from weightbus.types import Receipt

from .bus import MODEL, Bus, Transport, transport_of
from .comparison import Spread, over
from .model import Model, Shape
from .process import Answers

WARM_UP = 3
TURN_SECONDS = 0.25  # seconds of a turn, which has at least one publish
RETURN_SECONDS = 60.0

Blocks = list[list[float]]


def measure(shape: Shape, transport: Transport, workers: int, seconds: float) -> dict[str, Any]:
    """Return the seconds of all publishes without and with a stopped worker, by turn."""
    model = Model(shape, zeros=False)
    calm, disturbed = (Bus("weightbus", "weightbus_receive", transport) for _ in range(2))
    calm.start(workers, model)
    disturbed.start(workers + 1, model)
    stopped = disturbed.fleet.processes[-1].pid
    times: dict[str, Blocks] = {"calm": [], "stopped": []}
    try:
        for _ in range(WARM_UP):
            calm.publish_once()
            disturbed.publish_once()
        begun = time.perf_counter()
        under_way = _publish(disturbed, model, workers)
        os.kill(stopped, signal.SIGSTOP)
        under_way.result()
        while time.perf_counter() - begun < seconds:
            times["calm"].append(_turn(calm, model, workers))
            times["stopped"].append(_turn(disturbed, model, workers))
        os.kill(stopped, signal.SIGCONT)
        returned = _returned(disturbed, model, workers)
        for bus in (calm, disturbed):  # all workers have joined, and have the same version
            bus.publish_once()
            bus.check()
    finally:
        os.kill(stopped, signal.SIGCONT)
        calm.stop()
        disturbed.stop()
    return {"shape": shape.text, "transport": transport, "return_seconds": returned, **times}


def _publish(bus: Bus, model: Model, workers: int) -> Future[Receipt]:
    model.advance()
    return bus.publisher.publish_async(MODEL, model.tensors, require=workers)


def _turn(bus: Bus, model: Model, workers: int) -> list[float]:
    """Publish for one turn; return the seconds of each publish."""
    begun = time.perf_counter()
    times: list[float] = []
    while not times or time.perf_counter() - begun < TURN_SECONDS:
        model.advance()
        before = time.perf_counter()
        bus.publisher.publish(MODEL, model.tensors, require=workers)
        times.append(time.perf_counter() - before)
    return times


def _returned(bus: Bus, model: Model, workers: int) -> float:
    """Return the seconds until a continued worker runs the version that is published now."""
    before = time.perf_counter()
    version = _publish(bus, model, workers).result().version
    while any(w.running[MODEL][1] != version for w in bus.publisher.workers().values()):
        if time.perf_counter() - before > RETURN_SECONDS:
            raise TimeoutError(f"not all run version {version}: {bus.publisher.workers()}")
        time.sleep(0.001)
    return time.perf_counter() - before


def middle(times: dict[str, Blocks]) -> Spread:
    """Return the ratios of the medians, by turn."""
    return over(times["stopped"], times["calm"])


def tail(times: dict[str, Blocks]) -> Spread:
    """Return the ratio of the 99th percentiles, over all turns."""
    stopped, calm = (_percentile(times[side], 99) for side in ("stopped", "calm"))
    return Spread.of([stopped / calm])


def _percentile(blocks: Blocks, percent: int) -> float:
    every = [seconds for block in blocks for seconds in block]
    return statistics.quantiles(every, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    answers = Answers({})
    shape, transport, workers, seconds = sys.argv[1:]
    answers.say(measure(Shape.parse(shape), transport_of(transport), int(workers), float(seconds)))
