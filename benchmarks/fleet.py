"""The worker processes of one contender: starting them, checking their bytes, ending them."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .model import Model, Shape
from .process import Answer, Conversation, Process, Spawned

START_SECONDS = 120.0  # a busy host takes its time to import frameworks, in many processes at once
ANSWER_SECONDS = 60.0


class WrongBytes(Exception):  # noqa: N818 - the bytes are wrong, and that is what happened
    """A worker does not hold what was published."""


@dataclass
class Worker:
    """A worker process, from inside.

    Attributes:
        index: Which of the workers it is, from 0.
        model: What versions are to be applied to.
        told: What the publisher's side wants it to know, such as an address.
        inherited: What only a process's birth can hand over, where a contender needs that.
        pauses: Seconds that each apply took, where the contender knows.
        approved: When the latest version was about to be applied, if that is to be noted.
        shut: Seconds that readers were then shut out, of each version.
        transports: The ways that versions came by, where there are several.
        resident_before, private_before: Bytes in memory before it had anything to do with the bus.
        latest_road: Says which way the latest came by, for those that cannot note each.
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
        """Leave the work to other threads; the process ends when the publisher's side does."""
        while True:
            threading.Event().wait()


def compare(digests: Sequence[int], model: Model) -> None:
    """Raise `WrongBytes` unless each worker's bytes hash to what the model's do."""
    expected = model.digest()
    for index, digest in enumerate(digests):
        if digest != expected:
            raise WrongBytes(
                f"worker {index} holds bytes of CRC-32C {digest:08x}; published were {expected:08x}"
            )


class Fleet:
    """The workers, from the publisher's side.

    Args:
        contender: The name of the contender's module.
        workers: How many.
        shape: Of the model that each of them holds.
        told: What they are told.
        environment: Variables that they get.
        inherit: What can only be handed over at birth, such as multiprocessing's queues: the
            workers are spawned by multiprocessing then.
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
        """Wait until every worker says that it can be published to."""
        self.ask("ready", START_SECONDS)

    def ask(self, question: str, timeout: float = ANSWER_SECONDS) -> list[Answer]:
        """Ask all workers the same and return their answers in order."""
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
        """End all of them."""
        for process in self.processes:
            process.stop()
