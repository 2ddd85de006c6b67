"""The worker processes of one contender: starting them, checking their bytes, ending them."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .model import Model, Shape
from .process import Answer, Process

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
        pauses: Seconds that each apply took, where the contender knows.
        roads: The ways that versions came by, where there are several.
        ready: To be set when versions can be published to this worker.
    """

    index: int
    model: Model
    told: dict[str, Any]
    pauses: list[float] = field(default_factory=list[float])
    roads: set[str] = field(default_factory=set[str])
    ready: threading.Event = field(default_factory=threading.Event)


class Fleet:
    """The workers, from the publisher's side.

    Args:
        contender: The name of the contender's module.
        workers: How many.
        shape: Of the model that each of them holds.
        told: What they are told.
        environment: Variables that they get.
    """

    def __init__(
        self,
        contender: str,
        workers: int,
        shape: Shape,
        told: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> None:
        self._processes = [
            Process(
                f"worker {index} of {contender}",
                "worker",
                contender,
                shape.text,
                str(index),
                json.dumps(told),
                environment=environment,
            )
            for index in range(workers)
        ]

    def wait_ready(self) -> None:
        """Wait until every worker says that it can be published to."""
        self.ask("ready", START_SECONDS)

    def ask(self, question: str, timeout: float = ANSWER_SECONDS) -> list[Answer]:
        """Ask all workers the same and return their answers in order."""
        for process in self._processes:
            process.tell(question)
        return list(self._answers(timeout))

    def _answers(self, timeout: float) -> Iterator[Answer]:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            yield process.answer(max(0.0, deadline - time.monotonic()))

    def check(self, model: Model) -> None:
        """Raise `WrongBytes` unless every worker's bytes are the model's."""
        expected = model.digest()
        for index, answer in enumerate(self.ask("digest")):
            if answer["digest"] != expected:
                raise WrongBytes(
                    f"worker {index} holds bytes of CRC-32C {answer['digest']:08x}; published were "
                    f"{expected:08x}"
                )

    def stop(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.stop()
