"""A trainer's process, or a relay's, as a round sees it: orders down, events up."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

from weightbus.tests.chaos.passing import Passed
from weightbus.tests.chaos.story import Story
from weightbus.tests.chaos.trainer import Told
from weightbus.tests.conformance.driver import Fault

Event = dict[str, Any]
T = TypeVar("T")
FOLDER = Path(__file__).parent
WAIT_SECONDS = 40.0
END_SECONDS = 15.0
LOOK_SECONDS = 0.2  # between two looks at whether it has ended
WORDS = 1500  # characters of what it said last


def _script(told: Told | Passed) -> str:
    if isinstance(told, Passed):
        return "passing.py"
    return "ranked.py" if told.sources else "trainer.py"


class Child:
    """A trainer, or a relay. A trainer's other ranks write to the same pipe.

    Args:
        told: What it is told.
        story: Gets each event.
        log: Takes its standard error.
        environment: Variables beside those of this process.
        limits: Of prlimit, as it takes them: `--fsize=...`; none: as they are.
    """

    def __init__(
        self,
        told: Told | Passed,
        story: Story,
        log: IO[str],
        environment: Mapping[str, str],
        limits: tuple[str, ...] = (),
    ) -> None:
        self.name = f"publisher {told.life}" if isinstance(told, Told) else told.name
        self.events = list[Event]()
        self._pid = 0  # of a publisher in a process of its own
        self._story, self._log = story, log
        self._changed = threading.Condition()
        script = FOLDER / _script(told)
        command = [sys.executable, str(script), json.dumps(asdict(told))]
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            ["prlimit", *limits, *command] if limits else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process that publishes: the trainer's, or one that ends the trainer with it."""
        return self._pid or self._process.pid

    @property
    def ranks(self) -> list[int]:
        """The processes of a trainer's other ranks."""
        return [event["pid"] for event in self.those("rank")]

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed, or killed in the middle of a line
            for line in self._process.stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    self._story.tell(f"{self.name} wrote what is no event: {line!r}")
                    raise
                if event["event"] != "serial":
                    self._story.tell(f"{self.name}: {line.strip()[:400]}")
                with self._changed:
                    self._pid = event["pid"] if event["event"] == "ready" else self._pid
                    self.events.append(event)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def those(self, kind: str) -> list[Event]:
        """Return the events of a kind so far."""
        with self._changed:
            return [event for event in self.events if event["event"] == kind]

    def wait(self, kind: str, count: int = 1, seconds: float = WAIT_SECONDS) -> Event:
        """Wait for the first, second ... event of a kind.

        Raises:
            Fault: There is none.
        """
        found = self._wait(lambda: self.those(kind)[count - 1 : count], seconds)
        if not found:
            raise Fault(
                f"{self.name}: no {kind} in {seconds:.0f} s; status {self.status()}: {self.story()}"
            )
        return found[0]

    def _wait(self, look: Callable[[], T], seconds: float) -> T:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not look() and self._reader.is_alive() and time.monotonic() < deadline:
                self._changed.wait(LOOK_SECONDS)
            return look()

    def status(self) -> int | None:
        """Return its exit status once it has ended."""
        return self._process.poll()

    def story(self) -> str:
        """Return its last words."""
        self._log.seek(0)
        return self._log.read()[-WORDS:]

    def order(self, text: str) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by force."""
        self.send(signal.SIGKILL)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._join()

    def _join(self) -> None:
        """Wait for the end of all that write, as do the other ranks of a trainer.

        Raises:
            Fault: They do not end.
        """
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._reader.join(END_SECONDS)
        if self._reader.is_alive():
            for pid in self.ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise Fault(f"a rank of {self.name} does not end: {self.story()}")

    def end(self) -> None:
        """Close its standard input, and see that it ends as it should.

        Raises:
            Fault: It does not.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise Fault(f"{self.name} does not end: {self.story()}") from None
        self._join()
        if status:
            raise Fault(f"{self.name} ended with status {status}: {self.story()}")

    def close(self) -> None:
        """Leave nothing behind."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
