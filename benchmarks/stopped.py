"""What a worker that has been stopped costs the others: `... stopped SHAPE ROAD WORKERS ROUNDS`.

Two publishers take turns. One has so many workers; the other has one more, which gets SIGSTOP right
before each publish that is timed, so that it is neither gone nor known to be lost. Both times are
until the same number of workers has applied. Prints one line of JSON.
"""

import os
import signal
import sys
import time
from typing import Any

from .bus import MODEL, Bus, Road, road_of
from .model import Model, Shape
from .process import Answers

WARM_UP = 2


def measure(shape: Shape, road: Road, workers: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of every publish, without and with a stopped worker."""
    model = Model(shape, zeros=False)
    calm, disturbed = (Bus("weightbus", "weightbus_receive", road) for _ in range(2))
    calm.start(workers, model)
    disturbed.start(workers + 1, model)
    stopped = disturbed.fleet.processes[-1].pid
    times: dict[str, list[float]] = {"calm": [], "stopped": []}
    try:
        for number in range(-WARM_UP, rounds):
            calm_seconds = _publish(calm, model, workers)
            os.kill(stopped, signal.SIGSTOP)
            stopped_seconds = _publish(disturbed, model, workers)
            os.kill(stopped, signal.SIGCONT)
            for bus in (calm, disturbed):  # all are there again, with the same version
                bus.publish_once()
                bus.check()
            if number >= 0:
                times["calm"].append(calm_seconds)
                times["stopped"].append(stopped_seconds)
    finally:
        os.kill(stopped, signal.SIGCONT)
        calm.stop()
        disturbed.stop()
    return {"shape": shape.text, "road": road, **times}


def _publish(bus: Bus, model: Model, workers: int) -> float:
    model.advance()
    before = time.perf_counter()
    bus.publisher.publish(MODEL, model.tensors, require=workers)
    return time.perf_counter() - before


if __name__ == "__main__":
    answers = Answers({})
    answers.say(
        measure(Shape.parse(sys.argv[1]), road_of(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    )
