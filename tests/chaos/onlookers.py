"""Whether all who tell who runs what agree: receipts, roster, `status`, page, metrics, workers."""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from weightbus.bus.errors import RefusedError
from weightbus.bus.trust.keys import WorkerKeys
from weightbus.python_client.observing.observer import Observer
from weightbus.tests.chaos.cast import OBSERVER, Cast
from weightbus.tests.chaos.child import Event
from weightbus.tests.chaos.content import MODELS
from weightbus.tests.conformance.driver import Driver, Fault

Runs = dict[tuple[str, str], tuple[int, int]]  # by worker and model, the epoch and version
LOOK_SECONDS = 10.0
EVERY_SECONDS = 0.2


def observer(cast: Cast) -> Observer:
    """Look on at the publisher of now."""
    address = cast.publisher.those("ready")[0]["address"]
    file = cast.key(OBSERVER, observes=True)
    return Observer(address, None if file is None else WorkerKeys.read(file))


def of_rows(rows: list[Mapping[str, Any]]) -> Runs:
    """Read what `status` and the page say."""
    return {(row["worker"], row["model"]): (row["epoch"], row["version"]) for row in rows}


def of_workers(cast: Cast, receipts: list[Event]) -> Runs:
    """Read what workers say of themselves.

    What was published, by the same publisher, under an epoch that it has raised since, a worker has
    applied by that name; its receipt has the new one.
    """
    named = {r["model"]: (r["digest"], (r["epoch"], r["version"])) for r in receipts}

    def runs(driver: Driver, model: str) -> tuple[int, int]:
        applied = driver.those("applied", model=model)
        if not applied:
            return 0, 0
        digest, key = named[model]
        last = applied[-1]
        return key if digest and last["digest"] == digest else (last["epoch"], last["version"])

    return {
        (name, model): runs(driver, model)
        for name, driver in cast.workers.items()
        for model in MODELS
    }


def of_calm(calm: Event) -> Runs:
    """Read what `Publisher.workers()` says."""
    return {
        (name, model): tuple(runs.get(model, (0, 0)))
        for name, runs in calm["running"].items()
        for model in MODELS
    }


def of_receipts(receipts: list[Event]) -> Runs:
    """Read receipts of which everybody has applied the version."""
    return {
        (name, r["model"]): (r["epoch"], r["version"])
        for r in receipts
        for name, state in r["states"].items()
        if state == "applied"
    }


def _roster(looking: Observer) -> Runs:
    if not looking.look(LOOK_SECONDS):
        raise Fault("an observer gets no answer")
    return {
        (s.worker, s.model): (s.epoch, s.version) for s in looking.view.standings(time.monotonic())
    }


def _status(cast: Cast) -> Runs:
    address = cast.publisher.those("ready")[0]["address"]
    words = [sys.executable, "-m", "weightbus", "status", address, "--json", "--expect"]
    words += [str(len(cast.workers)), "--within", "0"]
    if (file := cast.key(OBSERVER, observes=True)) is not None:
        words += ["--keys", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)  # noqa: S603
    if done.returncode:
        raise Fault(f"status ended with {done.returncode}: {done.stdout} {done.stderr}")
    return of_rows(json.loads(done.stdout.splitlines()[-1])["workers"])


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=LOOK_SECONDS) as answer:  # noqa: S310 - our own
        body: bytes = answer.read()
        return body


def _page(cast: Cast) -> Runs:
    address = cast.publisher.those("ready")[0]["dashboard"]
    return of_rows(json.loads(_get(f"{address}state"))["workers"])


def _metrics(cast: Cast) -> Runs:
    address, found = cast.publisher.those("ready")[0]["metrics"], Runs()
    text = _get(address).decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    epoch = int(families["weightbus_publisher_epoch"][0].value)
    for sample in families["weightbus_worker_version"]:
        found[sample.labels["worker"], sample.labels["model"]] = (epoch, int(sample.value))
    return found


def disagreements(
    cast: Cast, calm: Event, receipts: list[Event], looking: Observer
) -> Iterator[str]:
    """Yield each source that differs from the workers, at a moment of calm.

    A source is read only when those before it agree: `status` is a new observer each time, and a
    publisher remembers 16 for 10 s.
    """
    truth = of_workers(cast, receipts)
    sources: dict[str, Callable[[], Runs]] = {
        "receipts": lambda: of_receipts(receipts),
        "workers()": lambda: of_calm(calm),
        "an observer": lambda: _roster(looking),
    }
    if cast.plan.watched:
        sources["status"] = lambda: _status(cast)
    if cast.plan.serves:
        sources |= {"the page": lambda: _page(cast), "the metrics": lambda: _metrics(cast)}
    for source, read in sources.items():
        runs = {key: runs for key, runs in read().items() if key[0] in cast.workers}  # no relays
        wrong = {key: (runs.get(key), truth.get(key)) for key in runs.keys() | truth.keys()}
        wrong = {key: pair for key, pair in wrong.items() if pair[0] != pair[1]}
        if wrong:
            yield f"{source}, and the workers: {wrong}"


class Watcher:
    """Looks on all the time, in a thread of its own, at the publisher of now."""

    def __init__(self, cast: Cast) -> None:
        self._cast, self._over = cast, threading.Event()
        self.seen: set[tuple[str, str, int, int]] = set()  # worker, model, epoch, version
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def _look_on(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._error = error

    def _watch(self) -> None:
        while not self._over.is_set():
            child = self._cast.publisher
            with observer(self._cast) as found:
                while child is self._cast.publisher and not self._over.wait(EVERY_SECONDS):
                    try:
                        found.look(EVERY_SECONDS)
                    except RefusedError:  # while the publisher is being killed, say
                        break
                    for s in found.view.standings(time.monotonic()):
                        self.seen.add((s.worker, s.model, s.epoch, s.version))

    def end(self) -> None:
        """Look on no more.

        Raises:
            Exception: What ended it before: it has not seen all that was said.
            Fault: It does not end.
        """
        self._over.set()
        self._thread.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise Fault(f"whoever looks on does not end in {LOOK_SECONDS:.0f} s")
