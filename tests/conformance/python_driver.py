"""The driver of the Python client; `README.md` says what a driver does.

python tests/conformance/python_driver.py vectors tests/vectors
python tests/conformance/python_driver.py worker tcp://127.0.0.1:5555 --name w0 --models m
"""

import argparse
import json
import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightbus import ApplyError, RefusedError, Settings, Subscriber
from weightbus.bus.limits import APPLY_SECONDS, STAGING_BYTES_MAX
from weightbus.codecs.dtypes import numpy_dtype
from weightbus.codecs.layout import PREFIX_BYTES, Layout
from weightbus.codecs.native import crc32c
from weightbus.tests.conformance.python_vectors import results
from weightbus.types import Offer, Update

Array = NDArray[Any]
Weights = dict[str, Array]

LOOK_SECONDS = 0.05  # between two looks at whether the session is another, or this is to end


def tell(event: str, **facts: object) -> None:
    """Print one event."""
    line = json.dumps({"event": event, **facts}) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()


class Lost(logging.Handler):
    """Turns the client's word that the publisher is silent into an event."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.__dict__.get("weightbus", {}).get("kind") == "lost":
            tell("lost")


class Driven(Subscriber):
    """A subscriber that also tells which session it is in."""

    @property
    def joined_epoch(self) -> int:
        """The epoch of the latest session; 0 before the first."""
        return self._ready_queue.joined_epoch


class Users:
    """The user's part of applying, which does what the command line wants of it."""

    def __init__(self, options: argparse.Namespace, stop: threading.Event) -> None:
        self._vetoed = options.turn_down if options.in_place else ()
        self._declined = () if options.in_place else options.turn_down
        self._broken: tuple[int, ...] = options.breaks
        self._seconds, _, some = options.apply_seconds.partition(":")
        self._slow = numbers(some)
        self._stop = stop

    def before(self, offer: Offer) -> None:
        """No byte has changed yet."""
        if offer.version in self._vetoed:
            raise ValueError(f"told to turn down version {offer.version}")

    def after(self, update: Update) -> None:
        """All bytes are in place."""
        if not self._slow or update.version in self._slow:
            self._stop.wait(float(self._seconds))
        if update.version in self._declined:
            raise ValueError(f"told to turn down version {update.version}")
        if update.version in self._broken:
            raise ValueError(f"told to break version {update.version}")


class Driver:
    """A worker that tells what happens to it.

    Args:
        options: The command line.
        folder: Where snapshots go.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        spec = json.loads(options.in_place.read_text()) if options.in_place else {}
        self._registered = {model: allocated(spec[model]) for model in spec}
        self._files = {
            model: folder / f"{model}.safetensors"
            for model in options.models.split(",")
            if model not in self._registered
        }
        self._tensors: bool = options.tensors
        self._reads = options.tensors and not options.cast
        self._ends_at = time.monotonic() + options.seconds
        self._stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        self._epoch, self._refused = 0, ("", "")
        self._told: dict[str, tuple[int, int]] = {}  # what was said to run, by model
        users = Users(options, self._stop)
        self._subscriber = Driven(
            options.address,
            {**self._registered, **self._files},
            name=options.name,
            strict=not options.partial,
            cast=options.cast,
            keys=options.keys,
            settings=Settings(
                before_apply=users.before,
                on_commit=users.after,
                apply_timeout=options.apply_timeout,
                bytes_max=options.bytes_max,
                shared_memory=not options.network,
            ),
        )

    def run(self) -> None:
        """Apply what comes until it is time to end."""
        if self._registered and self._reads:
            threading.Thread(target=self._read_for_ever, daemon=True).start()
        with self._subscriber:
            while not self._stop.is_set() and time.monotonic() < self._ends_at:
                self._turn()

    def _turn(self) -> None:
        try:
            update = self._subscriber.receive(LOOK_SECONDS)
            self._refused = ("", "")
            if update is not None:
                self._applied(update)
            else:
                self._look()
        except ApplyError as error:
            facts = {"model": error.model, "epoch": error.epoch, "version": error.version}
            tell("failed", **facts, code=error.code, text=str(error))
        except RefusedError as error:
            if self._refused != (error.code, str(error)):
                self._refused = (error.code, str(error))
                tell("refused", code=error.code, text=str(error))
            self._stop.wait(LOOK_SECONDS)
        self._note_session()

    def _note_session(self) -> None:
        epoch = self._subscriber.joined_epoch
        if epoch != self._epoch:
            self._epoch = epoch
            tell("joined", epoch=epoch)

    def _applied(self, update: Update) -> None:
        self._note_session()
        self._told[update.model] = update.epoch, update.version
        facts: dict[str, object] = {
            "model": update.model,
            "epoch": update.epoch,
            "version": update.version,
            "digest": update.digest,
            "metadata": update.metadata,
        }
        if self._tensors:
            facts["tensors"] = {n: crc32c(raw(a)) for n, a in self._held(update.model).items()}
        tell("applied", **facts)

    def _look(self) -> None:
        """Say what runs by another name than was said last."""
        for model in (*self._registered, *self._files):
            runs = self._subscriber.update(model)
            if runs is not None and self._told.get(model) != (runs.epoch, runs.version):
                self._told[model] = runs.epoch, runs.version
                facts = {"epoch": runs.epoch, "version": runs.version, "metadata": runs.metadata}
                tell("runs", model=model, **facts)

    def _held(self, model: str) -> Mapping[str, Array]:
        """Return what a user of the model reads, without aliases."""
        if model in self._registered:
            return self._registered[model]
        file = self._files[model].read_bytes()
        begin = PREFIX_BYTES + int.from_bytes(file[:PREFIX_BYTES], "little")
        layout = Layout.parse(file[:begin])
        data = np.frombuffer(file, np.uint8, offset=begin)
        return {s.name: data[s.begin : s.end] for s in layout.tensors}

    def _read_for_ever(self) -> None:
        """Look at all tensors, as a forward pass does: every byte must be that of one version."""
        while not self._stop.is_set():
            for model, weights in self._registered.items():
                found = set[int]()
                with suppress(ApplyError), self._subscriber.reading():
                    found = {value for array in weights.values() for value in ends(raw(array))}
                if len(found) > 1:
                    tell("torn", model=model, bytes=sorted(found))


def numbers(words: str) -> tuple[int, ...]:
    """Read the numbers of versions."""
    return tuple(map(int, words.split(","))) if words else ()


def allocated(spec: dict[str, dict[str, Any]]) -> Weights:
    """Return memory for the tensors of one model."""
    return {n: np.zeros(t["shape"], numpy_dtype(t["dtype"])) for n, t in spec.items()}


def raw(array: Array) -> NDArray[np.uint8]:
    """Return the bytes of a dense array."""
    return array.reshape(-1).view(np.uint8)


def ends(data: NDArray[np.uint8]) -> tuple[int, ...]:
    """Return the least and the greatest byte."""
    return (int(data.min()), int(data.max())) if data.size else ()


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    vectors = modes.add_parser("vectors")
    vectors.add_argument("folder", type=Path)
    worker = modes.add_parser("worker")
    worker.add_argument("address")
    worker.add_argument("--name", required=True)
    worker.add_argument("--models", required=True)
    worker.add_argument("--in-place", type=Path)
    worker.add_argument("--no-tensors", dest="tensors", action="store_false")
    worker.add_argument("--bytes-max", type=int, default=STAGING_BYTES_MAX)
    worker.add_argument("--network", action="store_true")
    worker.add_argument("--seconds", type=float, default=120.0)
    worker.add_argument("--turn-down", type=numbers, default=())
    worker.add_argument("--break", dest="breaks", type=numbers, default=())
    worker.add_argument("--apply-seconds", default="0")
    worker.add_argument("--apply-timeout", type=float, default=float(APPLY_SECONDS))
    worker.add_argument("--partial", action="store_true")
    worker.add_argument("--cast", action="store_true")
    worker.add_argument("--keys", type=Path)
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Be a driver."""
    options = parse(words)
    if options.mode == "vectors":
        for line in results(options.folder):
            print(json.dumps(line))
        return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    logging.getLogger("weightbus.worker").addHandler(Lost())
    with tempfile.TemporaryDirectory() as folder:
        Driver(options, Path(folder)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
