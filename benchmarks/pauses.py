"""What a version costs whoever reads a resident model: `... pauses SHAPE ROUNDS`.

Pages that were exchanged are not in the cache of whoever reads them next, so what the first reading
of all values takes longer than the second counts as well. Prints one line of JSON.
"""

import sys
from typing import Any

from .bus import Bus
from .comparison import WARM_UP
from .model import Model, Shape
from .process import Answers


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Publish so often; return what the worker noted, and plain copies of the same in turns."""
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
    """Return what a version costs a reader, over a memcpy, round by round."""
    rounds = zip(found["shut"], found["first"], found["warm"], found["memcpy"], strict=True)
    return [(shut + first - warm) / memcpy for shut, first, warm, memcpy in rounds]


if __name__ == "__main__":
    answers = Answers({})
    answers.say(measure(Shape.parse(sys.argv[1]), int(sys.argv[2])))
