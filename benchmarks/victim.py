"""The parent's side of an attacked publisher (`flooded.py`): its process and its state."""

import contextlib
import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from weightbus.bus.trust.keys import generate
from weightbus.python_client.keys import KEYS

from .fleet import START_SECONDS
from .flooded import Setup
from .process import Answer, Process, ProcessError

ANSWER_SECONDS = 30.0


class EndedError(Exception):
    """The publisher or its process has ended."""


class Publishes(NamedTuple):
    """The results of publishes: the time of each, and what the last failed one lacked."""

    seconds: list[float]
    failed: str


@contextlib.contextmanager
def keys_for_all() -> Generator[None]:
    """Make processes that are started in this block use keys that allow workers of any name."""
    before = os.environ.get(KEYS)
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), {"*": "worker"})
        os.environ[KEYS] = folder
        try:
            yield
        finally:
            del os.environ[KEYS]
            if before is not None:
                os.environ[KEYS] = before


class Victim:
    """The publisher and its honest workers, which run until the block ends.

    Attributes:
        addresses: The addresses to attack: `control`, `data`, and `page` if it has one.
        pid: The publisher's process.
        epoch: The epoch of its first version.
        workers: The honest ones.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        with ExitStack() as undo:
            self._process = undo.enter_context(Process("publisher", "flooded", setup.text))
            told = self._process.answer(START_SECONDS)
            self.pid: int = told["pid"]
            self.addresses: Answer = told
            checked = self.check()
            self.epoch: int = checked["epoch"]
            self.workers: list[str] = checked["joined"]
            self._undo = undo.pop_all()

    def _ask(self, what: str) -> Answer:
        try:
            return self._process.ask(what, ANSWER_SECONDS)
        except ProcessError as error:
            raise EndedError(str(error)) from None

    def check(self) -> Answer:
        """Make it publish once more; return the workers that have joined so far, and its epoch.

        Raises:
            EndedError: It cannot publish, or an honest worker has other bytes.
        """
        return self._ask("check")

    def publishes(self) -> Publishes:
        """Return the results of publishes since the last call.

        Raises:
            EndedError: The publisher has ended.
        """
        told = self._ask("seconds")
        if told["ended"]:
            raise EndedError(told["ended"])
        return Publishes(told["seconds"], told["failed"])

    def log(self) -> list[str]:
        """Return its log lines since the last call."""
        lines: list[str] = self._ask("log")["lines"]
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
