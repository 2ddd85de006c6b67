"""Measure what a version costs a reader of a resident model: `... pauses SHAPE ROUNDS`.

Exchanged pages are not in the cache of the next reader. So the cost includes how much longer the
first read of all values takes than the second. Prints one line of JSON.
"""

import sys
from typing import Any

from .bus import Bus
from .comparison import WARM_UP
from .model import Model, Shape
from .process import Answers


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Publish `rounds` versions; return the worker's times, and plain copies measured in turns."""
    model = Model(shape, zeros=False)
    bus = Bus("weightbus", "weightbus_resident", "network", resident="workers", timed=True)
    bus.start(1, model)
    found: dict[str, list[float]] = {"shut": [], "first": [], "warm": [], "memcpy": []}
    try:
        for _ in range(WARM_UP + rounds):
            model.advance()
            bus.publish_once()
            (reads,) = bus.fleet.ask("read")
            (noted,) = bus.fleet.ask("shut")
            (copied,) = bus.fleet.ask("memcpy")
            for name, seconds in {**noted, **reads, "memcpy": copied["seconds"]}.items():
                found[name].append(seconds)
        bus.check()
    finally:
        bus.stop()
    return {"shape": shape.text, **{name: each[WARM_UP:] for name, each in found.items()}}


def ratios(found: dict[str, Any]) -> list[float]:
    """Return the ratio of a reader's cost to a memcpy, round by round."""
    rounds = zip(found["shut"], found["first"], found["warm"], found["memcpy"], strict=True)
    return [(shut + first - warm) / memcpy for shut, first, warm, memcpy in rounds]


if __name__ == "__main__":
    answers = Answers({})
    answers.say(measure(Shape.parse(sys.argv[1]), int(sys.argv[2])))
