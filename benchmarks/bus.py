"""Both sides of weightbus as a contender, over either of its transports.

Workers on the publisher's host use shared memory unless one side declines it. Each contender
names its transport, and every version proves which one it took: what came over the network was
hashed, what was read from shared memory was not. So no number can stand under the wrong name.
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
    """A version came another way than the one that is measured."""


def transport_of(text: str) -> Transport:
    """Return the transport of that name."""
    return next(transport for transport in TRANSPORTS if transport == text)


class Bus:
    """The publisher's side: applied whole and in place, and every worker answers.

    Args:
        title: What it is called in tables.
        module: The module whose `work` the workers run.
        transport: How the bytes are to travel.
        file: Shared memory in which one worker's tensors are to lie, if somebody watches them.
        resident: Whose models are resident.
        arrays: Workers hold numpy arrays, and import no torch: many fit into a machine.
        timed: Workers note how long readers are shut out.
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
    """Return a subscriber that has joined; with `hook`, it notes each version that it applies."""
    if not worker.told["arrays"]:
        import torch

        torch.set_num_threads(1)
    if file := worker.told["file"]:
        flat = reach(file, worker.model.shape.nbytes)
        flat[:] = 0  # touched, as the memory of a model in use is
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
        raise TimeoutError("the publisher has not let this worker in")
    return made


def _target(worker: Worker) -> Mapping[str, Any]:
    if worker.told["resident"]:
        return worker.model.moved_in()
    return worker.model.arrays if worker.told["arrays"] else worker.model.tensors


def _timing(worker: Worker) -> Callable[[object], None]:
    def begin(_offer: object) -> None:
        worker.approved = time.perf_counter()  # readers are shut out from here on, if any

    return begin


def _noting(worker: Worker) -> Callable[[Update], None]:
    def note(update: Update) -> None:
        worker.pauses.append(update.seconds)
        worker.transports.add(_transport(update))

    return note


def _transport(update: Update) -> Transport:
    return "network" if update.digest else "shared"


def apply_for_ever(worker: Worker) -> None:
    """Leave it to the background, without a hook, which has to run in a thread of its own."""
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
