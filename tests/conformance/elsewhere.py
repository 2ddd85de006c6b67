"""A publisher in another language, in a process of its own, with what scenarios use of Python's."""

import contextlib
import itertools
import json
import logging
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, Protocol

from weightbus import PublishError, Settings, WeightBusError
from weightbus.bus.limits import Timing
from weightbus.bus.net.callbacks import EVENT_KINDS, WorkerEvent
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.bus.receipt import WorkerReceipt
from weightbus.codecs.state import state_of
from weightbus.tests.conformance.driver import LAST_WORDS, WAIT_SECONDS, Fault
from weightbus.tests.conformance.ledger import Weights
from weightbus.types import Receipt

LOGGER = logging.getLogger("weightbus.publisher")
LOOK_SECONDS = 0.05  # between two looks at a roster that nothing tells us of
CLOSE_SECONDS = 10.0


class Condition(Protocol):
    """Says what is wrong with who is there; nothing if all is right."""

    def __call__(self, known: Mapping[str, WorkerStatus], /) -> str: ...


class ProcessPublisher:
    """The publisher of a driver, with what scenarios use of the one in Python.

    Args:
        command: The driver.
        epoch: Its incarnation; None: what it takes itself.
        address: Where it listens.
        folder: Where what is published goes on its way.
        state: Its state folder, if it has one; and how many older versions are kept there.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        epoch: int | None = None,
        folder: Path,
        address: str = "tcp://127.0.0.1:0",
        chunk_bytes: int,
        timing: Timing,
        advertise: str | None = None,
        state: str = "",
        history: int = 0,
        keys: Path | None = None,
        rekey: float | None = None,
    ) -> None:
        words = ["publisher", address, "--chunk-bytes", str(chunk_bytes)]
        words += ["--ping", str(timing.ping), "--lost-after", str(timing.lost_after)]
        words += ["--epoch", str(epoch)] if epoch is not None else []
        words += ["--advertise", advertise] if advertise is not None else []
        words += ["--state", state] if state else []
        words += ["--history", str(history)] if history else []
        words += ["--keys", str(keys or "")]
        words += ["--rekey", str(rekey)] if rekey is not None else []
        self._folder, self._ids = folder, itertools.count(1)
        self._open: dict[int, Future[Any]] = {}
        # Files are written again once what they had is published: a driver that has one open needs
        # no other where nothing else is being published.
        self._files: list[IO[bytes]] = []
        self._passed: dict[int, IO[bytes]] = {}
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[WorkerEvent], object]] = []
        self._undo = contextlib.ExitStack()
        stderr = tempfile.TemporaryFile("w+", dir=folder)  # noqa: SIM115 - closed at its end
        self._stderr = self._undo.enter_context(stderr)
        self._process = subprocess.Popen(  # noqa: S603 - the driver under test
            [*command, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        bound = self._open[0] = Future[Any]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        try:
            self._reader.start()
            told = bound.result(WAIT_SECONDS)
            self.address, self.data_address, self.epoch = (
                told["address"],
                told["data_address"],
                told["epoch"],
            )
        except FutureTimeout:
            text = f"the publisher does not say where it listens: {self._words()}"
            self._end()
            raise Fault(text) from None
        except BaseException:  # nobody else knows of it
            self._end()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def publish_async(self, model: str, weights: Weights, **options: Any) -> "Future[Receipt]":
        """Publish, as `Publisher.publish_async` does."""
        layout = state_of(weights).layout()
        file = self._files.pop() if self._files else self._new_file()
        file.seek(0)
        file.write(layout.header)
        file.writelines(weights[tensor.name].tobytes() for tensor in layout.tensors)
        file.truncate()
        file.flush()
        options["workers"] = options.get("workers") and list(options["workers"])
        settings = options.pop("settings", None) or Settings()
        options |= {
            each.name: value
            for each in fields(Settings)
            if (value := getattr(settings, each.name)) != each.default
        }
        return self._ask("publish", passed=file, model=model, file=file.name, **options)

    def _new_file(self) -> IO[bytes]:
        return self._undo.enter_context(tempfile.NamedTemporaryFile(dir=self._folder))

    def workers(self) -> dict[str, WorkerStatus]:
        """Return who is there, as `Publisher.workers` does."""
        told = self._ask("workers").result(WAIT_SECONDS)["workers"]
        return {name: _status(name, its) for name, its in told.items()}

    def wait_until(self, wrong: Condition, patience: float) -> None:
        """Wait until nothing is wrong with what `workers()` says.

        Raises:
            Fault: What was still wrong in the end.
        """
        deadline = time.monotonic() + patience
        while text := wrong(self.workers()):
            if time.monotonic() >= deadline:
                raise Fault(f"after {patience:.0f} s: {text}")
            with self._changed:
                self._changed.wait(LOOK_SECONDS)

    def on_worker(self, callback: Callable[[WorkerEvent], object]) -> None:
        """Have a callback told what becomes of workers."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """End it; what is open is answered. Calling it twice is fine.

        Raises:
            Fault: It had to be killed, or did not end well.
        """
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            status = self._process.wait(CLOSE_SECONDS)
            if status and not self._stderr.closed:
                raise Fault(f"the publisher ended with status {status}: {self._words()}")
        except subprocess.TimeoutExpired:
            raise Fault("the publisher did not end") from None
        finally:
            self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._undo.close()

    def _ask(self, what: str, passed: IO[bytes] | None = None, **fields: Any) -> "Future[Any]":
        number = next(self._ids)
        if passed is not None:
            self._passed[number] = passed
        future = self._open[number] = Future[Any]()
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": what, "id": number, **fields}), file=self._process.stdin)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise Fault(f"the publisher has ended: {self._words()}") from None
        return future

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if (file := self._passed.pop(told.get("id", 0), None)) is not None:
                self._files.append(file)  # before anybody is told, who might want it
            match told["event"]:
                case "worker" if told["kind"] in EVENT_KINDS:
                    for callback in self._callbacks:
                        callback(WorkerEvent(told["kind"], told["worker"], told["text"], None))
                case "worker":  # a notice, which Python's publisher writes there
                    LOGGER.info(told["text"])
                case "bound":
                    self._open.pop(0).set_result(told)
                case "receipt":
                    _resolve(self._open.pop(told["id"]), told)
                case "error":
                    self._open.pop(told["id"]).set_exception(WeightBusError(told["text"]))
                case _:
                    self._open.pop(told["id"]).set_result(told)
            with self._changed:
                self._changed.notify_all()
        for future in self._open.values():
            future.set_exception(Fault(f"the publisher has ended: {self._words()}"))

    def _words(self) -> str:
        if self._stderr.closed:
            return "it was closed"
        self._stderr.seek(0)
        return self._stderr.read()[-LAST_WORDS:].strip()


def _resolve(future: "Future[Any]", told: dict[str, Any]) -> None:
    workers = {
        name: WorkerReceipt(
            name,
            its["state"],
            its["seconds"],
            its["detail"],
            its["encoding"],
            its["nbytes"],
            tuple(its["through"]),
        )
        for name, its in told["workers"].items()
    }
    fields = ("model", "epoch", "version", "nbytes", "seconds", "digest")
    receipt = Receipt(
        **{name: told[name] for name in fields},
        workers=workers,
        metadata=told.get("metadata", {}),
    )
    if told["achieved"]:
        future.set_result(receipt)
    else:
        future.set_exception(PublishError(told["text"], receipt))


def _status(name: str, its: dict[str, Any]) -> WorkerStatus:
    return WorkerStatus(
        name=name,
        state=its["state"],
        road=its["road"],
        models=tuple(its["models"]),
        running={model: tuple(key) for model, key in its["models"].items() if key},
        phase=its["phase"],
        progress={},
        silent_s=its["silent_s"],
        client=its["client"],
        host=its["host"],
        pid=its["pid"],
        relay=its["relay"],
        through=tuple(its["through"]),
    )
