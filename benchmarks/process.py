"""A child process that answers questions: one line of JSON down, one line of JSON back.

Every answer has a deadline. A child ends when its standard input ends, so that none outlives the
process that started it, however that one ended.
"""

import json
import multiprocessing
import os
import select
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

ENVIRONMENT = {  # one thread for computing in each process, or they would fight over the cores
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
GRACE = 10.0  # seconds that a process gets to end on its own

Answer = dict[str, Any]


class ProcessError(Exception):
    """A child process failed, fell silent, or is gone."""


class Conversation(ABC):
    """Questions go down to a child, answers come up from it.

    Args:
        name: What the child is called in errors.
        down, up: The descriptors, which are the caller's to close.
    """

    def __init__(self, name: str, down: int, up: int) -> None:
        self.name = name
        self._down, self._up = down, up
        self._buffer = b""

    def ask(self, question: str, timeout: float) -> Answer:
        """Ask and wait for the answer.

        Raises:
            ProcessError: There is none in time, or it is an error.
        """
        self.tell(question)
        return self.answer(timeout)

    def tell(self, question: str) -> None:
        """Ask; `answer` gives the answer."""
        try:
            os.write(self._down, question.encode() + b"\n")
        except BrokenPipeError:
            raise ProcessError(self._gone()) from None

    def answer(self, timeout: float) -> Answer:
        """Return the next answer."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._up], [], [], max(0, deadline - time.monotonic()))
            if not readable:
                raise ProcessError(f"{self.name} has not answered within {timeout:.0f} s")
            more = os.read(self._up, 65536)
            if not more:
                raise ProcessError(self._gone())
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise ProcessError(f"{self.name} failed: {answer['error']}")
        return answer

    def _gone(self) -> str:
        status = self.wait()
        if status is None:
            return f"{self.name} has closed its pipes"
        return f"{self.name} has ended with status {status}; its last words are above"

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process id."""

    @abstractmethod
    def wait(self) -> int | None:
        """Wait for its end, but not for long; return the status, or None if it lives on."""

    @abstractmethod
    def stop(self) -> None:
        """End it: by closing its end of the questions, or else by force."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Process(Conversation):
    """A module of ours, run as a process of its own.

    Args:
        name: What it is called in errors.
        module: The module to run, below `weightbus.benchmarks`; or a script, by its path.
        arguments: Its command line.
        environment: Variables that it gets beside ours.
    """

    def __init__(
        self, name: str, module: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        script = module.endswith(".py")
        program = [module] if script else ["-m", f"weightbus.benchmarks.{module}"]
        self._popen = subprocess.Popen(  # noqa: S603 - our own module and arguments
            [sys.executable, *program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        super().__init__(name, self._popen.stdin.fileno(), self._popen.stdout.fileno())

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait(self) -> int | None:
        try:
            return self._popen.wait(GRACE)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout: float) -> Answer:
        """Close its standard input; return its last words."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        return self.answer(timeout)

    def stop(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        if self.wait() is None:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()


class Spawned(Conversation):
    """A function of ours in a process that multiprocessing spawns.

    For systems whose queues can be handed to a process at its birth alone.

    Args:
        name: What it is called in errors.
        target: The function; it gets the arguments, then where questions come from and where
            answers go (connections, to be used by their descriptors).
        arguments: What multiprocessing can hand over.
    """

    def __init__(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        questions, self._questions = context.Pipe(duplex=False)
        self._answers, answers = context.Pipe(duplex=False)
        self._process = context.Process(
            target=target, args=(*arguments, questions, answers), name=name, daemon=True
        )
        self._process.start()
        questions.close()
        answers.close()
        super().__init__(name, self._questions.fileno(), self._answers.fileno())

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> int | None:
        self._process.join(GRACE)
        return self._process.exitcode

    def stop(self) -> None:
        self._questions.close()
        if self.wait() is None:
            self._process.kill()
            self._process.join()
        self._answers.close()


class Answers:
    """The other end, in the child: answers questions until there are no more.

    Args:
        questions: What can be asked.
        down, up: The descriptors; those of standard input and output unless told.
    """

    def __init__(
        self, questions: dict[str, Callable[[], Answer]], down: int = 0, up: int = 1
    ) -> None:
        self._questions = questions
        # Whatever a library prints goes to standard error; standard output carries answers only.
        self._up = os.dup(up)
        os.dup2(2, 1)
        self._down = down

    def say(self, answer: Answer) -> None:
        """Write one answer."""
        os.write(self._up, json.dumps(answer).encode() + b"\n")

    def serve(self) -> None:
        """Answer in this thread; return when the parent closes its end."""
        with open(self._down, closefd=False) as questions:
            for line in questions:
                try:
                    self.say(self._questions[line.strip()]())
                except Exception as error:
                    self.say({"error": f"{type(error).__name__}: {error}"})

    def serve_beside(self) -> None:
        """Answer in a thread of its own, and end the process when the parent closes its end."""

        def run() -> None:
            try:
                self.serve()
            finally:  # even if nobody was there to take the last answer
                os._exit(0)

        threading.Thread(target=run, name="answers", daemon=True).start()
