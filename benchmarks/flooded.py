"""The process of an attacked publisher, with honest workers: `... benchmarks.flooded SETUP`.

It publishes continuously while others attack it, and records how long each publish took until all
honest workers had applied the version. The publisher may be in another language and process: then
the times are from its receipts, since this process only passes it a file.
"""

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weightbus import Http, Publisher, PublishError, Settings
from weightbus.bus.limits import Timing
from weightbus.bus.net.callbacks import WorkerEvent
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT
from weightbus.python_client.keys import KEYS
from weightbus.tests.conformance.elsewhere import LOGGER, ProcessPublisher
from weightbus.tests.conformance.languages import chosen
from weightbus.tests.conformance.scenarios import IN_MEMORY

from .bus import MODEL, Bus
from .fleet import START_SECONDS
from .model import Model, Shape
from .process import Answer, Answers

PUBLISH_SECONDS = 10.0
PAGE_TOKEN = "nobody-guesses-this"  # noqa: S105 - of a page that nobody is to see
LINES_KEPT = 100_000  # lines of the log that are kept

Language = Literal["python", "rust"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The publisher that is attacked.

    Attributes:
        language: The language of the publisher.
        shape, chunk_bytes: The size of its model, and of a chunk.
        workers: The number of honest workers.
        address: The address that it listens on.
        pause: Seconds between two publishes.
        files: The number of additional open files of its process.
        page: Whether it serves the dashboard page.
    """

    language: Language = "python"
    shape: str = "2MiB/20"
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    workers: int = 2
    address: str = "tcp://127.0.0.1:0"
    pause: float = 0.005
    files: int = 0
    page: bool = False

    @property
    def text(self) -> str:
        """The setup as an argument of a process."""
        return json.dumps(asdict(self))


class Here(Bus):
    """A publisher in Python, in this process."""

    def __init__(self, setup: Setup) -> None:
        super().__init__("flooded", "weightbus_receive", "network", arrays=True)
        self._setup = setup
        self._undo = ExitStack()
        self._model = Model(Shape.parse(setup.shape), zeros=False)
        self._workers = setup.workers
        self.flooded: Any
        self.pid = os.getpid()
        self.page = ""

    def start_all(self) -> None:
        """Start the publisher, then its workers."""
        settings = Settings(shared_memory=False, chunk_bytes=self._setup.chunk_bytes)
        page = Http("127.0.0.1:0", token=PAGE_TOKEN) if self._setup.page else None
        self.flooded = self.publisher = Publisher(
            self._setup.address, settings=settings, dashboard=page
        )
        self.page = self.publisher.shown.dashboard or ""
        self.employ(self.publisher.address)
        self.publisher.prepare(MODEL, self._model.arrays)
        self.publisher.wait_for_workers(self._workers, START_SECONDS, MODEL)
        for _ in range(self._setup.files):  # last: `select` supports only the first 1024
            self._undo.callback(os.close, os.open(os.devnull, os.O_RDONLY))

    def publish_once(self) -> float:
        before = time.perf_counter()
        arrays = self._model.arrays
        self.publisher.publish(MODEL, arrays, require=self._workers, timeout=PUBLISH_SECONDS)
        return time.perf_counter() - before

    def next_version(self) -> float:
        """Publish a version with new values; return the seconds."""
        self._model.advance()
        return self.publish_once()

    def epoch(self) -> int:
        """Return the publisher's epoch, from a version that is published to no worker."""
        return self.publisher.epoch

    def stop(self) -> None:
        self._undo.close()
        super().stop()


class Elsewhere(Here):
    """A publisher in another language, in another process."""

    def start_all(self) -> None:
        folder = self._undo.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY))
        self.flooded = ProcessPublisher(
            chosen(self._setup.language)[0].command,
            folder=Path(folder),
            address=self._setup.address,
            chunk_bytes=self._setup.chunk_bytes,
            timing=Timing(),
            keys=Path(os.environ[KEYS]) if KEYS in os.environ else None,
        )
        self.pid = self.flooded.pid
        self.employ(self.flooded.address)

        def missing(known: Mapping[str, WorkerStatus]) -> str:
            pushed = [w for w in known.values() if w.road == "pushed"]
            here = len(pushed)
            return "" if here == self._workers else f"{here} of {self._workers} workers are there"

        self.flooded.wait_until(missing, START_SECONDS)

    def publish_once(self) -> float:
        options = {"require": self._workers, "timeout": PUBLISH_SECONDS}
        receipt = self.flooded.publish_async(MODEL, self._model.arrays, **options).result()
        self._epoch: int = receipt.epoch
        seconds: float = receipt.seconds
        return seconds

    def epoch(self) -> int:
        return self._epoch

    def stop(self) -> None:
        self.fleet.stop()
        self.flooded.close()
        self._undo.close()


class Log(logging.Handler):
    """The publisher's log, which has a limited number of lines."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.keep(record.getMessage())

    def keep(self, line: str) -> None:
        """Keep a line, if there is room."""
        if len(self._lines) < LINES_KEPT:
            self._lines.append(line)

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        self.acquire()
        try:
            lines, self._lines = self._lines, []
        finally:
            self.release()
        return lines


class Flooded:
    """Answers questions in the publisher's process."""

    def __init__(self, setup: Setup) -> None:
        self._pause, self._language = setup.pause, setup.language
        self._log = Log()
        LOGGER.addHandler(self._log)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False  # the last lines are for errors
        self._bus = Here(setup) if setup.language == "python" else Elsewhere(setup)
        self._bus.start_all()
        self._joined = set(self._bus.flooded.workers())
        self._bus.flooded.on_worker(self._note)
        self._bus.next_version()
        self._seconds: list[float] = []
        self._failed, self._ended = "", ""
        self._turn = threading.Lock()
        threading.Thread(target=self._publish_for_ever, daemon=True).start()

    def addresses(self) -> Answer:
        """Return the addresses to attack, and the processes to measure."""
        bus, publisher = self._bus, self._bus.flooded
        addresses = {"control": publisher.address, "data": publisher.data_address, "page": bus.page}
        return {**addresses, "pid": bus.pid}

    def seconds(self) -> Answer:
        """Return the results of publishes since the last call.

        Returns:
            The time of each; what the last publish lacked that did not reach all workers in time;
            and, if the publisher has ended, its error.
        """
        with self._turn:
            seconds, self._seconds = self._seconds, []
            failed, self._failed = self._failed, ""
            return {"seconds": seconds, "failed": failed, "ended": self._ended}

    def check(self) -> Answer:
        """Publish once more; raise an error unless all honest workers then have the model's bytes.

        Returns:
            The names of all workers that have ever joined, and the publisher's epoch.
        """
        with self._turn:
            if self._ended:
                raise RuntimeError(self._ended)
            self._bus.next_version()
            self._bus.check()
            return {"joined": sorted(self._joined), "epoch": self._bus.epoch()}

    def log(self) -> Answer:
        """Return the publisher's log lines since the last call."""
        return {"lines": self._log.take()}

    def stop(self) -> None:
        """End the workers."""
        self._turn.acquire()
        self._bus.stop()

    def _note(self, event: WorkerEvent) -> None:
        if event.kind == "joined":
            self._joined.add(event.worker)
        if self._language != "python":  # whose events are the log
            self._log.keep(event.text)

    def _publish_for_ever(self) -> None:
        while not self._ended:
            with self._turn:
                began = time.perf_counter()
                try:
                    self._seconds.append(self._bus.next_version())
                except PublishError as error:
                    self._failed = str(error)
                    self._seconds.append(time.perf_counter() - began)
                except Exception as error:
                    self._ended = f"{type(error).__name__}: {error}"
            time.sleep(self._pause)


def main(setup: str) -> None:
    """Serve until the parent closes our standard input."""
    flooded = Flooded(Setup(**json.loads(setup)))
    asked = {"seconds": flooded.seconds, "check": flooded.check, "log": flooded.log}
    answers = Answers(asked)
    answers.say(flooded.addresses())
    try:
        answers.serve()
    finally:
        flooded.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
