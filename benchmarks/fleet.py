"""Start the worker processes of a contender, check their bytes, and end them."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .model import Model, Shape
from .process import Answer, Conversation, Process, Spawned

START_SECONDS = 120.0  # many processes that import frameworks at once are slow on a busy host
ANSWER_SECONDS = 60.0


class WrongBytes(Exception):  # noqa: N818 - the bytes are wrong, and that is what happened
    """A worker has other bytes than were published."""


@dataclass
class Worker:
    """The state of a worker process.

    Attributes:
        index: The index of the worker, from 0.
        model: The model to which versions are applied.
        told: Settings from the publisher's side, such as an address.
        inherited: Objects that can be passed only when a process is created, if needed.
        pauses: The seconds of each apply, if the contender measures them.
        approved: The time before the latest apply, if it is recorded.
        shut: For each version, the seconds for which its apply blocked readers.
        transports: The transports of all versions, if there are several.
        resident_before, private_before: Bytes in memory before it used the bus.
        latest_transport: Returns the latest version's transport, for workers that do not record
            all.
        ready: To be set when versions can be published to this worker.
    """

    index: int
    model: Model
    told: dict[str, Any]
    inherited: Any = None
    pauses: list[float] = field(default_factory=list[float])
    approved: float = 0.0
    shut: queue.SimpleQueue[float] = field(default_factory=queue.SimpleQueue[float])
    transports: set[str] = field(default_factory=set[str])
    latest_transport: Callable[[], set[str]] | None = None
    resident_before: int = 0
    private_before: int = 0
    ready: threading.Event = field(default_factory=threading.Event)

    def for_ever(self) -> NoReturn:
        """Sleep while other threads work; the process ends with the publisher's side."""
        while True:
            threading.Event().wait()


def compare(digests: Sequence[int], model: Model) -> None:
    """Raise `WrongBytes` unless the digest of each worker's bytes is the model's digest."""
    expected = model.digest()
    for index, digest in enumerate(digests):
        if digest != expected:
            raise WrongBytes(
                f"worker {index} has bytes of CRC-32C {digest:08x}, not {expected:08x} as published"
            )


class Fleet:
    """The worker processes, as the publisher's side uses them.

    Args:
        contender: The name of the contender's module.
        workers: The number of workers.
        shape: The shape of each worker's model.
        told: Settings for the workers.
        environment: Additional environment variables.
        inherit: Objects that can be passed only when a process is created, such as queues;
            then multiprocessing spawns the workers.
    """

    def __init__(
        self,
        contender: str,
        workers: int,
        shape: Shape,
        told: dict[str, Any],
        environment: dict[str, str] | None = None,
        inherit: object = None,
    ) -> None:
        def start(index: int) -> Conversation:
            name = f"worker {index} of {contender}"
            about = (contender, shape.text, str(index), json.dumps(told))
            if inherit is None:
                return Process(name, "worker", *about, environment=environment)
            from .worker import spawned  # which imports this module

            return Spawned(name, spawned, about, inherit)

        self.processes = [start(index) for index in range(workers)]

    def wait_ready(self) -> None:
        """Wait until every worker is ready for versions."""
        self.ask("ready", START_SECONDS)

    def ask(self, question: str, timeout: float = ANSWER_SECONDS) -> list[Answer]:
        """Send the same question to all workers, and return their answers in order."""
        for process in self.processes:
            process.tell(question)
        return list(self._answers(timeout))

    def _answers(self, timeout: float) -> Iterator[Answer]:
        deadline = time.monotonic() + timeout
        for process in self.processes:
            yield process.answer(max(0.0, deadline - time.monotonic()))

    def check(self, model: Model) -> None:
        """Raise `WrongBytes` unless every worker's bytes are the model's."""
        compare([answer["digest"] for answer in self.ask("digest")], model)

    def stop(self) -> None:
        """End all workers."""
        for process in self.processes:
            process.stop()
