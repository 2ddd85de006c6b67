"""A publisher that is flooded, and honest workers: `... flooded SHAPE WORKERS [LANGUAGE]`.

It publishes on and on while others attack it, and notes how long each publish took until all honest
workers had applied it. The publisher may be that of another language, in a process of its own: then
what counts is the time that its receipts tell, since this process only hands it a file.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightbus.bus.limits import Timing
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT
from weightbus.python_client.keys import KEYS
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.tests.conformance.languages import chosen
from weightbus.tests.conformance.scenarios import IN_MEMORY

from .bus import MODEL, Bus
from .fleet import START_SECONDS
from .model import Model, Shape
from .process import Answer, Answers

PAUSE_SECONDS = 0.005  # between two publishes, as a trainer has other things to do, too
PUBLISH_SECONDS = 10.0


class Here(Bus):
    """A publisher in Python, in this process."""

    def __init__(self) -> None:
        super().__init__("flooded", "weightbus_receive", "network")

    def start(self, workers: int, model: Model) -> None:
        super().start(workers, model)
        self.flooded: Any = self.publisher
        self.pid = os.getpid()

    def publish_once(self) -> float:
        before = time.perf_counter()
        tensors = self._model.tensors
        self.publisher.publish(MODEL, tensors, require=self._workers, timeout=PUBLISH_SECONDS)
        return time.perf_counter() - before


class Elsewhere(Here):
    """A publisher in another language, in another process."""

    def __init__(self, language: str) -> None:
        super().__init__()
        self._command = chosen(language)[0].command

    def start(self, workers: int, model: Model) -> None:
        self._model, self._workers = model, workers
        self._folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.flooded = ProcessPublisher(
            self._command,
            folder=Path(self._folder.name),
            chunk_bytes=CHUNK_BYTES_DEFAULT,
            timing=Timing(),
            keys=Path(os.environ[KEYS]) if KEYS in os.environ else None,
        )
        self.pid = self.flooded.pid
        self.employ(self.flooded.address)

        def missing(known: Mapping[str, WorkerStatus]) -> str:
            there = [w for w in known.values() if w.road == "pushed"]
            return "" if len(there) == workers else f"{len(there)} of {workers} workers are there"

        self.flooded.wait_until(missing, START_SECONDS)

    def publish_once(self) -> float:
        options = {"require": self._workers, "timeout": PUBLISH_SECONDS}
        receipt = self.flooded.publish_async(MODEL, self._model.arrays, **options).result()
        seconds: float = receipt.seconds
        return seconds

    def stop(self) -> None:
        self.fleet.stop()
        self.flooded.close()
        self._folder.cleanup()


class Flooded:
    """The publisher's process, from inside."""

    def __init__(self, shape: Shape, workers: int, language: str) -> None:
        self._model = Model(shape, zeros=False)
        self._bus = Here() if language == "python" else Elsewhere(language)
        self._bus.start(workers, self._model)
        self._seconds: list[float] = []
        self._turn = threading.Lock()
        threading.Thread(target=self._publish_for_ever, daemon=True).start()

    def addresses(self) -> Answer:
        """Tell where to attack, and whom to look at."""
        publisher = self._bus.flooded
        addresses = {"control": publisher.address, "data": publisher.data_address}
        return {**addresses, "pid": self._bus.pid}

    def seconds(self) -> Answer:
        """Tell how long publishes took since this was asked last."""
        with self._turn:
            seconds, self._seconds = self._seconds, []
        return {"seconds": seconds}

    def check(self) -> Answer:
        """Raise if a worker's bytes are not the model's."""
        with self._turn:
            self._bus.check()
        return {"workers": len(self._bus.flooded.workers())}

    def stop(self) -> None:
        """End the workers."""
        self._turn.acquire()
        self._bus.stop()

    def _publish_for_ever(self) -> None:
        while True:
            with self._turn:
                self._model.advance()
                self._seconds.append(self._bus.publish_once())
            time.sleep(PAUSE_SECONDS)


def main(shape: str, workers: str, language: str = "python") -> None:
    """Serve until the parent closes our standard input."""
    flooded = Flooded(Shape.parse(shape), int(workers), language)
    answers = Answers({"seconds": flooded.seconds, "check": flooded.check})
    answers.say(flooded.addresses())
    try:
        answers.serve()
    finally:
        flooded.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
