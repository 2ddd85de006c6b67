"""A driver as a process: its events as they come, and its end."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Event = dict[str, Any]
T = TypeVar("T")

WAIT_SECONDS = 40.0  # for anything that must come; a busy host takes its time
STOP_SECONDS = 2.0  # from SIGTERM to the end, as the contract has it
STOP_PATIENCE = 5.0  # so many times that, since the host may be busy
VECTORS_SECONDS = 120.0
LAST_WORDS = 1500  # characters of what a driver said last on standard error

FIELDS: dict[str, dict[str, type]] = {  # of each event, beside `event` itself
    "joined": {"epoch": int},
    "lost": {},
    "refused": {"code": str, "text": str},
    "applied": {"model": str, "epoch": int, "version": int, "digest": str},
    "runs": {"model": str, "epoch": int, "version": int},
    "failed": {"model": str, "epoch": int, "version": int, "code": str, "text": str},
    "torn": {"model": str},
}


class Fault(AssertionError):  # noqa: N818 - what a scenario finds
    """Something is not as it must be."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a worker is started, see the contract."""

    models: tuple[str, ...] = ("m",)
    in_place: dict[str, Any] | None = None
    tensors: bool = True
    bytes_max: int | None = None
    shared: bool = False
    seconds: int = 100
    loop_delay: bool = False
    turn_down: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    apply_seconds: str = ""
    apply_timeout: float | None = None
    partial: bool = False
    cast: bool = False
    keys: Path | None = None

    def words(self, folder: Path) -> list[str]:
        """Return the command line."""
        words = ["--models", ",".join(self.models), "--seconds", str(self.seconds)]
        if self.in_place is not None:
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as spec:
                json.dump(self.in_place, spec)
            words += ["--in-place", spec.name]
        if self.bytes_max is not None:
            words += ["--bytes-max", str(self.bytes_max)]
        if self.loop_delay:
            words.append("--loop-delay")
        if self.apply_timeout is not None:
            words += ["--apply-timeout", str(self.apply_timeout)]
        for option, versions in (("--turn-down", self.turn_down), ("--break", self.breaks)):
            words += [option, ",".join(map(str, versions))] if versions else []
        words += ["--apply-seconds", self.apply_seconds] if self.apply_seconds else []
        words += ["--keys", str(self.keys)] if self.keys is not None else []
        words += ["--partial"] * self.partial + ["--cast"] * self.cast
        return words + ["--no-tensors"] * (not self.tensors) + ["--network"] * (not self.shared)


class Driver:
    """A worker of some language.

    Args:
        command: The driver.
        address: Of the publisher.
        name: Of the worker.
        options: The rest of its command line.
        folder: Where its files go.
        patience: Seconds for anything that must come of it.
        changed: Notified of each event, and of its end.
    """

    def __init__(
        self,
        command: Sequence[str],
        address: str,
        name: str,
        options: Options,
        folder: Path,
        patience: float = WAIT_SECONDS,
        changed: threading.Condition | None = None,
    ) -> None:
        self._patience = patience
        self.name, self.options = name, options
        self.events: list[Event] = []
        self._noise = ""  # the first line that is no event
        self._changed = changed or threading.Condition()
        self._stderr = tempfile.TemporaryFile("w+", dir=folder)  # noqa: SIM115 - closed at its end
        self._process = subprocess.Popen(  # noqa: S603 - the driver under test
            [*command, "worker", address, "--name", name, *options.words(folder)],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},  # it may be killed: what it leaves goes, too
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self._process.stdout:
                event, noise = _event(line, tensors=self.options.tensors)
                with self._changed:
                    if event is not None:
                        self.events.append(event)
                    self._noise = self._noise or noise
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait(self, what: str, found: Callable[[list[Event]], T | None]) -> T:
        """Wait until something is found among the events; return it.

        Raises:
            Fault: It did not come in time, or the driver has ended, or said something strange.
        """
        deadline = time.monotonic() + self._patience
        with self._changed:
            while True:
                result = found(self.events)
                if result is not None:
                    return result
                left = deadline - time.monotonic()
                if self._noise or left <= 0 or not self._reader.is_alive():
                    break
                self._changed.wait(min(left, 0.5))
        if self._noise:
            raise Fault(f"{self.name} wrote what is no event: {self._noise[:300]!r}")
        how = (
            f"within {self._patience:.0f} s" if self.alive else f"before it ended ({self.status()})"
        )
        raise Fault(f"{self.name}: no {what} {how}; {self.story()}")

    def wait_event(self, event: str, **facts: object) -> Event:
        """Wait for an event with these facts."""

        def found(events: list[Event]) -> Event | None:
            return next((e for e in events if _fits(e, event, facts)), None)

        shown = ", ".join(f"{key} {value}" for key, value in facts.items())
        return self.wait(f"{event} event ({shown})", found)

    def wait_applied(self, model: str, epoch: int, version: int, digest: str = "") -> Event:
        """Wait until it has applied this version or a newer one of the epoch.

        With a `digest`: or the same bytes last, under the name that they had before.
        """

        def found(events: list[Event]) -> Event | None:
            applied = [e for e in events if _fits(e, "applied", {"model": model})]
            if digest and applied and applied[-1].get("digest") == digest:
                return applied[-1]
            those = (e for e in applied if e["epoch"] == epoch and e["version"] >= version)
            return next(those, None)

        return self.wait(f"version {version} of {model}, epoch {epoch}, applied", found)

    def those(self, event: str, **facts: object) -> list[Event]:
        """Return the events so far that have these facts."""
        with self._changed:
            return [e for e in self.events if _fits(e, event, facts)]

    def running(self, model: str) -> tuple[int, int] | None:
        """Return what it has said last that it runs."""
        with self._changed:
            told = [e for e in self.events if e["event"] in ("applied", "runs")]
        keys = [(e["epoch"], e["version"]) for e in told if e["model"] == model]
        return keys[-1] if keys else None

    def story(self) -> str:
        """Say what happened so far, for a fault."""
        with self._changed:
            told = [{k: v for k, v in e.items() if k != "tensors"} for e in self.events[-6:]]
        self._stderr.seek(0)
        words = self._stderr.read()[-LAST_WORDS:].strip()
        return f"its last events: {told}; its last words: {words!r}"

    def status(self) -> int | None:
        """Return its exit status once it has ended."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, by force; calling it twice is fine."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(STOP_SECONDS)

    def stop(self) -> None:
        """Ask it to end, and see that it does.

        Raises:
            Fault: It did not end in time, or not with status 0, or said something strange.
        """
        if not self.alive:
            raise Fault(f"{self.name} had ended with status {self.status()}; {self.story()}")
        self._process.terminate()
        try:
            status = self._process.wait(STOP_SECONDS * STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            raise Fault(f"{self.name} did not end on SIGTERM; {self.story()}") from None
        self._reader.join(STOP_SECONDS)
        if status != 0:
            raise Fault(f"{self.name} ended with status {status} on SIGTERM; {self.story()}")
        if self._noise:
            raise Fault(f"{self.name} wrote what is no event: {self._noise[:300]!r}")

    def close(self) -> None:
        """Leave nothing behind."""
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


def _fits(event: Event, kind: str, facts: dict[str, object]) -> bool:
    return event["event"] == kind and all(event[key] == value for key, value in facts.items())


def _event(line: str, *, tensors: bool) -> tuple[Event | None, str]:
    """Return the event of a line, or the line if it is none."""
    try:
        event: Any = json.loads(line)
        wanted = FIELDS[event["event"]]
        good = all(type(event[name]) is kind for name, kind in wanted.items())
        if good and event["event"] == "applied" and tensors:
            good = all(type(crc) is int for crc in event["tensors"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        good, event = False, None
    return (event, "") if good else (None, line)


def vectors(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Return what a driver makes of the vectors.

    Raises:
        Fault: It failed.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the driver under test
            [*command, "vectors", str(folder)],
            capture_output=True,
            text=True,
            timeout=VECTORS_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Fault(f"the driver needs more than {VECTORS_SECONDS:.0f} s for the vectors") from None
    if done.returncode:
        raise Fault(f"status {done.returncode}: {done.stderr[-LAST_WORDS:].strip()}")
    try:
        return [json.loads(line) for line in done.stdout.splitlines()]
    except ValueError as error:
        raise Fault(f"the driver writes what is not valid JSON: {error}") from None
