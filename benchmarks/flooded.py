"""A publisher that is flooded, and honest workers: `... flooded SHAPE WORKERS`.

It publishes on and on while others attack it, and notes how long each publish took until all honest
workers had applied it.
"""

import sys
import threading
import time

from .bus import MODEL, Bus
from .model import Model, Shape
from .process import Answer, Answers

PAUSE_SECONDS = 0.005  # between two publishes, as a trainer has other things to do, too
PUBLISH_SECONDS = 10.0


class Flooded:
    """The publisher's process, from inside."""

    def __init__(self, shape: Shape, workers: int) -> None:
        self._model, self._workers = Model(shape, zeros=False), workers
        self._bus = Bus("flooded", "weightbus_receive", "network")
        self._bus.start(workers, self._model)
        self._seconds: list[float] = []
        self._turn = threading.Lock()
        threading.Thread(target=self._publish_for_ever, daemon=True).start()

    def addresses(self) -> Answer:
        """Tell where to attack."""
        publisher = self._bus.publisher
        return {"control": publisher.address, "data": publisher.data_address}

    def seconds(self) -> Answer:
        """Tell how long publishes took since this was asked last."""
        with self._turn:
            seconds, self._seconds = self._seconds, []
        return {"seconds": seconds}

    def check(self) -> Answer:
        """Raise if a worker's bytes are not the model's."""
        with self._turn:
            self._bus.check()
        return {"workers": len(self._bus.publisher.workers())}

    def stop(self) -> None:
        """End the workers."""
        self._turn.acquire()
        self._bus.stop()

    def _publish_for_ever(self) -> None:
        publish, tensors = self._bus.publisher.publish, self._model.tensors
        while True:
            with self._turn:
                self._model.advance()
                before = time.perf_counter()
                publish(MODEL, tensors, require=self._workers, timeout=PUBLISH_SECONDS)
                self._seconds.append(time.perf_counter() - before)
            time.sleep(PAUSE_SECONDS)


def main(shape: str, workers: str) -> None:
    """Serve until the parent closes our standard input."""
    flooded = Flooded(Shape.parse(shape), int(workers))
    answers = Answers({"seconds": flooded.seconds, "check": flooded.check})
    answers.say(flooded.addresses())
    try:
        answers.serve()
    finally:
        flooded.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
