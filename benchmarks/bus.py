"""The publisher and the workers of the weightbus contenders, over TCP or shared memory.

Workers on the publisher's host use shared memory unless one side declines it. Each contender names
its transport, and each version is checked: a version over the network was hashed, and one from
shared memory was not. So no result can have the name of the wrong transport.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from weightbus import Publisher, Settings, Subscriber
from weightbus.types import Update

from . import memory
from .contender import Kind
from .fleet import START_SECONDS, Fleet, Worker
from .model import Model
from .shelf import reach

MODEL = "policy"
FOREVER = 86_400.0
Transport = Literal["network", "shared"]
Resident = Literal["", "workers", "both"]
TRANSPORTS: tuple[Transport, ...] = ("network", "shared")


class WrongTransport(Exception):  # noqa: N818 - the transport is wrong, and that is what happened
    """A version used another transport than the measured one."""


def transport_of(text: str) -> Transport:
    """Return the transport with this name."""
    return next(transport for transport in TRANSPORTS if transport == text)


class Bus:
    """The publisher's side. A publish ends when every worker has applied the version in place.

    Args:
        title: Its name in tables.
        module: The module that has the workers' function `work`.
        transport: The transport to use.
        file: Shared memory for one worker's tensors, if another process watches them.
        resident: The sides that have resident models.
        arrays: Workers have numpy arrays and do not import torch, so that many fit a machine.
        timed: Workers record how long an apply blocks readers.
    """

    kind: Kind = "weightbus"

    def __init__(
        self,
        title: str,
        module: str,
        transport: Transport,
        file: str = "",
        resident: Resident = "",
        *,
        arrays: bool = False,
        timed: bool = False,
    ) -> None:
        self.title, self._module, self._transport = title, module, transport
        self._resident = resident
        self._told = {
            "transport": transport,
            "file": file,
            "resident": bool(resident),
            "arrays": arrays,
            "timed": timed,
        }

    def start(self, workers: int, model: Model) -> None:
        import torch

        torch.set_num_threads(1)
        self._model, self._workers = model, workers
        self._tensors = model.moved_in() if self._resident == "both" else model.tensors
        self.resident_before = memory.resident()
        self.publisher = Publisher(settings=Settings(shared_memory=self._transport == "shared"))
        self.employ(self.publisher.address)
        self.publisher.prepare(MODEL, self._tensors)
        self.publisher.wait_for_workers(workers, START_SECONDS, MODEL)

    def employ(self, address: str) -> None:
        """Start the workers of a publisher."""
        told = {"address": address, **self._told}
        self.fleet = Fleet(self._module, self._workers, self._model.shape, told)
        self.fleet.wait_ready()

    def publish_once(self) -> float:
        before = time.perf_counter()
        receipt = self.publisher.publish(MODEL, self._tensors)
        seconds = time.perf_counter() - before
        if len(receipt.in_state("applied")) != self._workers:
            raise RuntimeError(f"not applied by {self._workers} workers: {receipt}")
        return seconds

    def check(self) -> None:
        self.fleet.check(self._model)
        for index, answer in enumerate(self.fleet.ask("transports")):
            if answer["transports"] != [self._transport]:
                raise WrongTransport(
                    f"worker {index} had versions by {answer['transports']}, "
                    f"but {self._transport!r} is measured"
                )

    def stop(self) -> None:
        self.fleet.stop()
        self.publisher.close()


def subscriber(worker: Worker, *, hook: bool = True) -> Subscriber:
    """Return a subscriber that has joined; with `hook`, it records each applied version."""
    if not worker.told["arrays"]:
        import torch

        torch.set_num_threads(1)
    if file := worker.told["file"]:
        flat = reach(file, worker.model.shape.nbytes)
        flat[:] = 0  # touch the pages, as in a model in use
        worker.model.rest_on(flat)
    worker.resident_before, worker.private_before = memory.resident(), memory.private()
    made = Subscriber(
        worker.told["address"],
        {MODEL: _target(worker)},
        name=f"worker-{worker.index}",
        settings=Settings(
            shared_memory=worker.told["transport"] == "shared",
            resident=worker.told["resident"],
            before_apply=_timing(worker) if worker.told["timed"] else None,
            on_commit=_noting(worker) if hook else None,
        ),
    )
    if not made.wait_joined(START_SECONDS):
        raise TimeoutError("the publisher has not accepted this worker in time")
    return made


def _target(worker: Worker) -> Mapping[str, Any]:
    if worker.told["resident"]:
        return worker.model.moved_in()
    return worker.model.arrays if worker.told["arrays"] else worker.model.tensors


def _timing(worker: Worker) -> Callable[[object], None]:
    def begin(_offer: object) -> None:
        worker.approved = time.perf_counter()  # from here on, readers are blocked

    return begin


def _noting(worker: Worker) -> Callable[[Update], None]:
    def note(update: Update) -> None:
        worker.pauses.append(update.seconds)
        worker.transports.add(_transport(update))

    return note


def _transport(update: Update) -> Transport:
    return "network" if update.digest else "shared"


def apply_for_ever(worker: Worker) -> None:
    """Apply versions in the background, without a hook, which would need another thread."""
    with subscriber(worker, hook=False) as receiving:
        receiving.start()

        def latest() -> set[str]:
            update = receiving.update(MODEL)
            return {_transport(update)} if update is not None else set()

        worker.latest_transport = latest
        worker.ready.set()
        worker.for_ever()


def receive_for_ever(worker: Worker) -> None:
    """Apply versions in this thread."""
    with subscriber(worker) as receiving:
        worker.ready.set()
        while True:
            receiving.receive(FOREVER)
            if worker.approved:
                worker.shut.put(time.perf_counter() - worker.approved)
