"""Measure the publisher's processor time for many workers: `... SHAPE TRANSPORT WORKERS ROUNDS`.

Workers have numpy arrays, because 64 processes with torch would not fit into most machines. Only
the publisher's processor time is counted. Prints one line of JSON.
"""

import sys
import time
from typing import Any

from .bus import Bus, Transport, transport_of
from .comparison import WARM_UP
from .model import Model, Shape
from .process import Answers


def measure(shape: Shape, transport: Transport, workers: int, rounds: int) -> dict[str, Any]:
    """Publish `rounds` versions; return the publisher's processor seconds for each."""
    model = Model(shape, zeros=False)
    bus = Bus("weightbus", "weightbus_receive", transport, arrays=True)
    bus.start(workers, model)
    seconds: list[float] = []
    try:
        for _ in range(WARM_UP + rounds):
            model.advance()
            before = time.process_time()
            bus.publish_once()
            seconds.append(time.process_time() - before)
        bus.check()
    finally:
        bus.stop()
    return {
        "shape": shape.text,
        "transport": transport,
        "workers": workers,
        "cpu": seconds[WARM_UP:],
    }


if __name__ == "__main__":
    answers = Answers({})
    shape, transport, workers, rounds = sys.argv[1:]
    answers.say(measure(Shape.parse(shape), transport_of(transport), int(workers), int(rounds)))
