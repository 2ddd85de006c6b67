"""The publisher process of a contender: `... benchmarks.host NAME SHAPE WORKERS [PAUSE]`.

It sleeps until it is asked to publish, so that contenders whose processes exist at once take turns.
"""

import functools
import sys
import time

from .contender import Contender, load
from .model import Model, Shape
from .process import Answer, Answers
from .trainer import Trainer

BURSTS = (1, 2, 5, 10)  # the numbers of publishes that one question may request


def publish(contender: Contender, model: Model, trainer: Trainer, times: int) -> Answer:
    """Publish `count` versions, one after the other, then compare every worker's bytes."""
    seconds: list[float] = []
    cpu: list[float] = []
    for _ in range(times):
        trainer.compute()
        model.advance()
        before = time.process_time()
        seconds.append(contender.publish_once())
        cpu.append(time.process_time() - before)
    contender.check()
    return {"seconds": seconds, "cpu": cpu}


def stray(contender: Contender, model: Model) -> Answer:
    """Change the model without a publish and compare: this must raise an error.

    Otherwise the comparison does not work, or the workers use the publisher's own memory.
    """
    model.advance()
    contender.check()
    return {}


def main(name: str, shape: str, workers: str, pause: str = "0") -> None:
    """Serve until the parent closes our standard input."""
    model = Model(Shape.parse(shape), zeros=False)
    contender = load(name).create()
    publishing = functools.partial(publish, contender, model, Trainer(float(pause)))
    questions = {f"publish {n}": functools.partial(publishing, n) for n in BURSTS}
    answers = Answers({**questions, "stray": functools.partial(stray, contender, model)})
    try:
        contender.start(int(workers), model)
    except Exception as error:
        answers.say({"error": f"{type(error).__name__}: {error}"})
        raise  # the workers end with this process
    try:
        answers.say({"title": contender.title, "kind": contender.kind})
        answers.serve()
    finally:
        contender.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
