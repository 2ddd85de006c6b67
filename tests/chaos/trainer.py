"""A publisher in a process of its own: `trainer.py '{"life": 1, ...}'`, see `Told`.

It writes a JSON object to a line: what it publishes, before it does, and each receipt. A line of
standard input is an order: `go` (publish again and again), `pause`, or `calm N` (publish once more,
to N workers, and say who runs what). It ends with its standard input.

Where it publishes patches it tells which workers were offered one in moments of calm, who took one,
and why others did not. The publisher may be another process, in another language: that one is
killed, stopped and starved, and this one ends when it does.
"""

import json
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weightbus import AddressError, Publisher, PublishError, Settings, WeightBusError
from weightbus.bus.limits import Timing
from weightbus.bus.messages import DELTA
from weightbus.python_client.settings import Encoding
from weightbus.tests.chaos.content import CHUNK_BYTES, LARGE, MODELS, Kind, weights
from weightbus.tests.conformance.driver import Fault
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.types import Receipt

PING, LOST_AFTER = 0.2, 1.5  # seconds
CALM_SECONDS = 30.0  # for every worker to be on the newest version, once nothing fails any more
PUBLISH_SECONDS = 4.0  # for what is published while things fail
TOGETHER = 3  # every third version is applied by all or nobody, where that is wanted
REKEY_SECONDS = 1.0
LIFE = 1000  # serials of one life
TAKES_ALL = re.compile(
    r"worker (\S+) takes all of version (\d+) of (\S+), for which there was a patch: (.*)"
)
IN_USE = "another process listens there"  # in words, where an error is not an exception of ours


@dataclass(frozen=True, slots=True)
class Told:
    """What a trainer is told.

    Attributes:
        life: How many there were before.
        kind, pace, together, shared, queue: See `schedule.Plan`.
        keys, state: Folders, or empty.
        advertise: What workers are told to connect to.
        watched: Serve a page and metrics.
        publisher: The driver that publishes, in another process; empty: Python's, in this one.
        folder: Where what is published goes on its way to another process.
        at: An address at which somebody is; it must turn out to be in use.
        sources: The addresses at which workers reach the other ranks that publish with this one.
    """

    life: int
    kind: Kind
    pace: float
    together: bool
    shared: bool
    queue: int
    keys: str
    state: str
    advertise: str
    watched: bool
    publisher: Sequence[str]
    folder: str
    at: str = ""
    sources: Sequence[str] = ()

    @property
    def settings(self) -> Settings:
        """The settings of Python's publisher."""
        return Settings(
            ping=PING,
            lost_after=LOST_AFTER,
            chunk_bytes=CHUNK_BYTES,
            queue=self.queue,
            shared_memory=self.shared,
            rekey=REKEY_SECONDS,
        )


class Unpatched(logging.Handler):
    """Tells which worker takes all of a version for which there was a patch, and why."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it."""
        if told := TAKES_ALL.match(record.getMessage()):
            worker, version, model, why = told.groups()
            self._tell("unpatched", worker=worker, model=model, version=int(version), why=why)


class Trainer:
    """Publishes, as it is ordered to."""

    def __init__(self, told: Told) -> None:
        self._told, self._serial = told, LIFE * told.life
        self._lock = threading.Lock()
        self._encoding: Encoding = "delta" if told.kind == "trained" else "raw"
        if told.at:
            self._find_taken(told.at)
        logging.getLogger("weightbus.publisher").addHandler(Unpatched(self._tell))
        self._publisher = self._open("tcp://127.0.0.1:0")

    def _open(self, address: str) -> Publisher | ProcessPublisher:
        told, page = self._told, "127.0.0.1:0" if self._told.watched else None
        timing = Timing(ping=PING, lost_after=LOST_AFTER)
        if told.publisher:
            return ProcessPublisher(
                told.publisher,
                folder=Path(told.folder),
                address=address,
                advertise=told.advertise,
                chunk_bytes=CHUNK_BYTES,
                timing=timing,
                state=told.state,
                keys=Path(told.keys) if told.keys else None,
                rekey=REKEY_SECONDS if told.keys else None,
            )
        return Publisher(
            address,
            settings=replace(told.settings, advertise=told.advertise),
            state=told.state or None,
            keys=told.keys,
            dashboard=page,
            metrics=page,
        )

    def _find_taken(self, address: str) -> None:
        try:
            self._open(address).close()
        except (AddressError, Fault) as error:
            if isinstance(error, Fault) and IN_USE not in str(error):
                raise
            self._tell("in-use", text=str(error))

    def _tell(self, event: str, **facts: Any) -> None:
        with self._lock:
            print(json.dumps({"event": event, **facts}), flush=True)

    def run(self) -> None:
        """Follow orders until there are no more."""
        with closing(self._publisher) as publisher:
            facts: dict[str, Any] = {"pid": os.getpid(), "epoch": publisher.epoch}
            ends = [0]  # of orders, or of a publisher's process
            if isinstance(publisher, ProcessPublisher):
                facts["pid"] = publisher.pid
                ends.append(os.pidfd_open(publisher.pid))
            else:
                shown = publisher.shown
                facts |= {"dashboard": shown.dashboard, "metrics": shown.metrics}
            self._tell("ready", address=publisher.address, data=publisher.data_address, **facts)
            going, orders = False, b""
            while True:
                ready = select.select(ends, [], [], self._told.pace if going else None)[0]
                if ready:
                    more = os.read(0, 2**16) if ready == [0] else b""
                    if not more:
                        return
                    *lines, orders = (orders + more).split(b"\n")
                    for line in lines:
                        going = self._obey(line.decode())
                elif going:
                    self._publish()

    def _obey(self, order: str) -> bool:
        """Do as it is told; return whether to go on publishing."""
        match order.split():
            case ["go"]:
                return True
            case ["calm", workers]:
                for model in (*MODELS, LARGE):  # the second time nobody has missed a version
                    self._settle(model, int(workers))
                self._say_who_runs_what()
            case _:
                pass
        return False

    def _next(self, model: str) -> int:
        self._serial += 1
        self._tell("serial", model=model, serial=self._serial)
        return self._serial

    def _publish(self) -> None:
        model = MODELS[self._serial % len(MODELS)]
        together = self._told.together and self._serial % TOGETHER == 0
        serial = self._next(model)
        try:
            future = self._begin(
                model,
                serial,
                settings=Settings(encoding=self._encoding),
                timeout=PUBLISH_SECONDS,
                commit="together" if together else "auto",
                require="all" if together else 0,
            )
        except (WeightBusError, MemoryError) as error:  # no copy is left, say
            self._tell("trouble", serial=serial, text=repr(error))
            return
        future.add_done_callback(partial(self._done, serial, together))

    def _begin(self, model: str, serial: int, **options: Any) -> "Future[Receipt]":
        content = weights(model, serial, self._told.kind)
        return self._publisher.publish_async(model, content, **options)

    def _done(self, serial: int, together: bool, future: "Future[Receipt]") -> None:
        error = future.exception()
        if isinstance(error, Fault):
            return  # its process has ended: nobody knows
        if error is not None and not isinstance(error, PublishError):
            self._tell("trouble", serial=serial, text=repr(error))
            return
        receipt = future.result() if error is None else error.receipt
        self._receipt(receipt, serial, achieved=error is None, together=together)

    def _receipt(self, receipt: Receipt, serial: int, **facts: Any) -> None:
        states = {w.name: w.state for w in receipt.workers.values()}
        ways = {w.name: w.encoding for w in receipt.workers.values()}
        key = {"model": receipt.model, "epoch": receipt.epoch, "version": receipt.version}
        facts |= {"digest": receipt.digest, "states": states, "ways": ways}
        self._tell("receipt", serial=serial, **key, **facts)

    def _settle(self, model: str, workers: int) -> None:
        serial, achieved = self._next(model), True
        ran = {w.name: w.running.get(model) for w in self._publisher.workers().values()}
        try:
            receipt = self._begin(
                model,
                serial,
                settings=Settings(encoding=self._encoding, grace=CALM_SECONDS),
                timeout=CALM_SECONDS,
                expect=workers,
            ).result()
        except PublishError as error:
            self._tell("trouble", serial=serial, text=str(error))
            receipt, achieved = error.receipt, False
        offered = self._offered(receipt, ran)
        self._receipt(receipt, serial, achieved=achieved, together=False, offered=offered)

    def _offered(self, receipt: Receipt, ran: Mapping[str, tuple[int, int] | None]) -> list[str]:
        """Return the workers that were offered a patch on what they ran."""
        if isinstance(self._publisher, ProcessPublisher):
            return []  # it does not say
        machine = self._publisher._loop._machine  # noqa: SLF001 # pyright: ignore
        versions = machine.state.store.get(receipt.model)
        version = versions.find(receipt.version) if versions is not None else None
        bases = {(p.base.epoch, p.base.version) for p in version.patches} if version else set()
        able = {p.name for p in [*machine.state.roster] if DELTA in p.hello.features}
        return sorted(name for name, key in ran.items() if key in bases and name in able)

    def _say_who_runs_what(self) -> None:
        known = self._publisher.workers().values()
        self._tell(
            "calm",
            running={w.name: w.running for w in known},
            states={w.name: w.state for w in known},
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    Trainer(Told(**json.loads(sys.argv[1]))).run()
