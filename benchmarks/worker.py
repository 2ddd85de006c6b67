"""A worker process of a contender: `python -m weightbus.benchmarks.worker NAME SHAPE INDEX TOLD`.

The main thread runs the contender's `work`. A second thread answers questions about the model's
bytes and the costs.
"""

import json
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from . import memory
from .contender import load
from .fleet import START_SECONDS, Worker
from .model import Model, Shape
from .process import Answer, Answers


class Questions:
    """The questions that a worker answers."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._scratch: Model | None = None

    def ready(self) -> Answer:
        """Wait until versions can be published."""
        if not self._worker.ready.wait(START_SECONDS):
            raise TimeoutError("the worker is not ready in time")
        return {}

    def digest(self) -> Answer:
        """Return the digest of the bytes."""
        return {"digest": self._worker.model.digest()}

    def memory(self) -> Answer:
        """Return the memory in use, and its peak since the last call."""
        answer = {
            "resident": memory.resident(),
            "peak": memory.peak(),
            "before": self._worker.resident_before,
            "private_before": self._worker.private_before,
        }
        memory.reset_peak()
        return answer

    def memcpy(self) -> Answer:
        """Time a plain copy of the same values into the model."""
        if self._scratch is None:
            self._scratch = Model(self._worker.model.shape, zeros=True)
        self._worker.model.copy_to(self._scratch)
        before = time.perf_counter()
        self._scratch.copy_to(self._worker.model)
        return {"seconds": time.perf_counter() - before}

    def read(self) -> Answer:
        """Time two reads of all values, the first with cold caches."""
        return {"first": self._read(), "warm": self._read()}

    def _read(self) -> float:
        before = time.perf_counter()
        for array in self._worker.model.arrays.values():
            array.sum()
        return time.perf_counter() - before

    def pauses(self) -> Answer:
        """Return the times of the applies since the last call."""
        pauses, self._worker.pauses[:] = list(self._worker.pauses), []
        return {"pauses": pauses}

    def shut(self) -> Answer:
        """Return how long the apply of the next version blocked readers.

        A version is acknowledged before its reader continues, so this waits for the reader's
        record.
        """
        return {"shut": self._worker.shut.get(timeout=START_SECONDS)}

    def transports(self) -> Answer:
        """Return the transports of all versions."""
        latest = self._worker.latest_transport
        return {"transports": sorted(self._worker.transports | (latest() if latest else set()))}


def main(name: str, shape: str, index: str, told: str) -> None:
    """Work until the parent closes our standard input."""
    worker = _worker(shape, index, told)
    Answers(_questions(worker)).serve_beside()
    load(name).work(worker)


def spawned(
    about: tuple[str, str, str, str], inherited: object, questions: Connection, answers: Connection
) -> None:
    """Run the worker in a process that multiprocessing has spawned."""
    name, *rest = about
    worker = _worker(*rest)
    worker.inherited = inherited
    Answers(_questions(worker), questions.fileno(), answers.fileno()).serve_beside()
    load(name).work(worker)


def _worker(shape: str, index: str, told: str) -> Worker:
    return Worker(int(index), Model(Shape.parse(shape), zeros=True), json.loads(told))


def _questions(worker: Worker) -> dict[str, Callable[[], Answer]]:
    asked = Questions(worker)
    return {
        "ready": asked.ready,
        "digest": asked.digest,
        "memory": asked.memory,
        "memcpy": asked.memcpy,
        "read": asked.read,
        "pauses": asked.pauses,
        "shut": asked.shut,
        "transports": asked.transports,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
