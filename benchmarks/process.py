"""A child process that answers questions: one line of JSON each way.

Every answer has a deadline. A child ends when its standard input ends, so that it never outlives
the process that started it.
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

ENVIRONMENT = {  # one computing thread in each process, so that processes do not compete for cores
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
GRACE = 10.0  # seconds for a process to end by itself

Answer = dict[str, Any]


class ProcessError(Exception):
    """A child process failed, did not answer in time, or has ended."""


class Conversation(ABC):
    """The parent's end: sends questions to a child, and receives the answers.

    Args:
        name: The child's name in errors.
        down, up: The descriptors to write and to read; the caller closes them.
    """

    def __init__(self, name: str, down: int, up: int) -> None:
        self.name = name
        self._down, self._up = down, up
        self._buffer = b""

    def ask(self, question: str, timeout: float) -> Answer:
        """Send a question and wait for the answer.

        Raises:
            ProcessError: The answer does not arrive in time, or is an error.
        """
        self.tell(question)
        return self.answer(timeout)

    def tell(self, question: str) -> None:
        """Send a question; `answer` returns its answer."""
        try:
            os.write(self._down, question.encode() + b"\n")
        except BrokenPipeError:
            raise ProcessError(self._gone()) from None

    def answer(self, timeout: float) -> Answer:
        """Wait for the next answer, and return it."""
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
        """Wait for its end for a limited time; return the status, or None if it still runs."""

    @abstractmethod
    def stop(self) -> None:
        """End it: close its input, and kill it if that does not help."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Process(Conversation):
    """A module of this package, run as a child process.

    Args:
        name: What it is called in errors.
        module: The module to run, below `weightbus.benchmarks`; or a script, by its path.
        arguments: Its command line.
        environment: Additional environment variables.
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
        """Close its standard input; return its last output."""
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
    """A function of this package in a process that multiprocessing spawns.

    For systems whose queues can be passed to a process only when it is created.

    Args:
        name: What it is called in errors.
        target: The function; after the arguments, it gets the connections for questions and for
            answers, whose descriptors it must use.
        arguments: The arguments, which multiprocessing can pass.
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
    """The child's end: answers questions until the parent closes its end.

    Args:
        questions: The functions that answer questions, by name.
        down, up: The descriptors to read and to write; by default standard input and output.
    """

    def __init__(
        self, questions: dict[str, Callable[[], Answer]], down: int = 0, up: int = 1
    ) -> None:
        self._questions = questions
        # The output of libraries goes to standard error: standard output has only answers.
        self._up = os.dup(up)
        os.dup2(2, 1)
        self._down = down

    def say(self, answer: Answer) -> None:
        """Write one answer."""
        os.write(self._up, json.dumps(answer).encode() + b"\n")

    def serve(self) -> None:
        """Answer in this thread until the parent closes its end."""
        with open(self._down, closefd=False) as questions:
            for line in questions:
                try:
                    self.say(self._questions[line.strip()]())
                except Exception as error:
                    self.say({"error": f"{type(error).__name__}: {error}"})

    def serve_beside(self) -> None:
        """Answer in a separate thread, which ends the process when the parent closes its end."""

        def run() -> None:
            try:
                self.serve()
            finally:  # even if the last answer could not be written
                os._exit(0)

        threading.Thread(target=run, name="answers", daemon=True).start()
