"""A child process that answers questions: one line of JSON down, one line of JSON back.

Every answer has a deadline. A child ends when its standard input ends, so that none outlives the
process that started it, however that one ended.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
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


class Process:
    """A module of ours, run as a process of its own.

    Args:
        name: What it is called in errors.
        module: The module to run, below `weightbus.benchmarks`.
        arguments: Its command line.
        environment: Variables that it gets beside ours.
    """

    def __init__(
        self, name: str, module: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self._popen = subprocess.Popen(  # noqa: S603 - our own module and arguments
            [sys.executable, "-m", f"weightbus.benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._down, self._up = self._popen.stdin.fileno(), self._popen.stdout.fileno()
        self._buffer = b""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

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
        try:
            status = self._popen.wait(GRACE)
        except subprocess.TimeoutExpired:
            return f"{self.name} has closed its pipes"
        return f"{self.name} has ended with status {status}; its last words are above"

    def stop(self) -> None:
        """End it: by closing its standard input, or else by force."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Answers:
    """The other end, in the child: answers questions until there are no more."""

    def __init__(self, questions: dict[str, Callable[[], Answer]]) -> None:
        self._questions = questions
        # Whatever a library prints goes to standard error; standard output carries answers only.
        self._up = os.dup(1)
        os.dup2(2, 1)

    def say(self, answer: Answer) -> None:
        """Write one answer."""
        os.write(self._up, json.dumps(answer).encode() + b"\n")

    def serve(self) -> None:
        """Answer in this thread; return when the parent closes its end."""
        for line in sys.stdin:
            try:
                self.say(self._questions[line.strip()]())
            except Exception as error:
                self.say({"error": f"{type(error).__name__}: {error}"})

    def serve_beside(self) -> None:
        """Answer in a thread of its own, and end the process when the parent closes its end."""

        def run() -> None:
            self.serve()
            os._exit(0)

        threading.Thread(target=run, name="answers", daemon=True).start()
