"""The engine over the bus: one publisher on the sender, one subscriber on each receiver.

A worker is called by its number. Where the number of workers is known, a send is for all of them:
those that have joined get it at once, the others as they join; one that has not at the deadline is
named. Where it is not known, a send is for those that have joined.

Some collectors number their workers from 0 on the sender and from 1 on the receivers. Where one
has joined under the number of workers itself, receivers are taken to count from 1.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from ...bus.errors import ClosedError, PublishError
from ...bus.receipt import Receipt, WorkerReceipt
from ...bus.status import WorkerStatus
from ..publisher import Publisher
from .bus_reception import bus_name
from .engine import Weights

LOOK_SECONDS = 0.02  # between two looks at who has joined meanwhile
MARGIN = 0.2  # of a send's time, kept for those that are there while others are waited for


class BusEngine:
    """Sends over a publisher of its own.

    Args:
        publisher: It; closed with the engine.
        num_workers: How many workers there will be; None: however many join.
    """

    def __init__(self, publisher: Publisher, num_workers: int | None = None) -> None:
        self._publisher, self._count = publisher, num_workers
        self._closed = threading.Event()
        self._model: str | None = None
        self._first = 0  # what receivers count from

    def workers(self) -> Sequence[int]:
        """Return the ids of all workers, or of those that have joined and are not lost."""
        if self._count is not None:
            return range(self._count)
        return sorted(
            int(s.name)
            for s in self._publisher.workers().values()
            if s.state != "lost" and s.name.isdigit()
        )

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        """Publish a version."""
        deadline = time.monotonic() + timeout
        self._model = model = bus_name(weights.model_id)
        ids = [*self.workers()] if workers is None else [*workers]
        present: list[str] | None = None
        if workers is not None:  # only who has joined can be addressed; the others are waited for
            present = self._await_joined(ids, deadline - timeout * MARGIN)
        published = self._publisher.publish_async(
            model, weights.tensors, workers=present, timeout=deadline - time.monotonic()
        )
        whole: Future[Receipt] = Future()
        call = _Call(weights.model_id, model, ids, deadline, whole)
        published.add_done_callback(lambda done: self._published(call, done))
        return whole

    def _await_joined(self, ids: Sequence[int], deadline: float) -> list[str]:
        """Wait for workers to join; return the names of those that have."""
        while True:
            joined = self._publisher.workers()
            names = self._names(ids, joined).values()
            present = [name for name in names if name in joined]
            over = time.monotonic() >= deadline or len(present) == len(ids)
            if over or self._closed.wait(LOOK_SECONDS):
                return present

    def _published(self, call: "_Call", done: "Future[Receipt]") -> None:
        """Answer, unless workers are missing that may still join. (In the publisher's thread.)"""
        try:
            receipt = _receipt(done)
        except BaseException as error:
            call.answer.set_exception(error)
            return
        names = self._names(call.ids, receipt.workers).values()
        if all(name in receipt.workers for name in names):
            call.answer.set_result(self._finished(call, receipt, {}))
            return
        threading.Thread(
            target=self._await_late, args=(call, receipt), name="weightbus-late", daemon=True
        ).start()

    def _await_late(self, call: "_Call", receipt: Receipt) -> None:
        """Wait for workers that have not joined: the bus gives them the version when they do."""
        try:
            status = self._publisher.workers()
            while time.monotonic() < call.deadline and self._open(call, receipt, status):
                if self._closed.wait(LOOK_SECONDS):
                    break
                status = self._publisher.workers()
            call.answer.set_result(self._finished(call, receipt, status))
        except BaseException as error:
            call.answer.set_exception(error)

    def _open(self, call: "_Call", receipt: Receipt, status: Mapping[str, WorkerStatus]) -> bool:
        """Tell whether any worker may still get the version."""
        late = self._late(call, receipt, status)
        return any(w.state == "behind" for w in late.values())

    def _late(
        self, call: "_Call", receipt: Receipt, status: Mapping[str, WorkerStatus]
    ) -> dict[int, WorkerReceipt]:
        """Say how things stand with the workers that the receipt does not know."""
        late: dict[int, WorkerReceipt] = {}
        for worker, name in self._names(call.ids, status).items():
            if name in receipt.workers:
                continue
            known = status.get(name)
            runs = known.running.get(call.bus_model, (0, 0)) if known is not None else (0, 0)
            seconds = time.monotonic() - call.started
            if runs >= (receipt.epoch, receipt.version):
                late[worker] = WorkerReceipt(str(worker), "applied", seconds)
            elif known is None:
                text = f"it has not joined at {self._publisher.address}"
                late[worker] = WorkerReceipt(str(worker), "behind", None, text)
            elif known.state == "lost":
                text = f"not heard for {known.silent_s:.1f} s"
                late[worker] = WorkerReceipt(str(worker), "lost", seconds, text)
            else:
                text = known.phase.get(call.bus_model, "it has joined")
                late[worker] = WorkerReceipt(str(worker), "behind", None, text)
        return late

    def _finished(
        self, call: "_Call", receipt: Receipt, status: Mapping[str, WorkerStatus]
    ) -> Receipt:
        """Return the receipt with every worker under its id, late ones included."""
        workers: dict[int, WorkerReceipt] = {}
        for worker, name in self._names(call.ids, status or receipt.workers).items():
            if name in receipt.workers:
                workers[worker] = replace(receipt.workers[name], name=str(worker))
        workers.update(self._late(call, receipt, status))
        return replace(
            receipt,
            model=call.model_id,
            seconds=time.monotonic() - call.started,
            workers={str(worker): w for worker, w in sorted(workers.items())},
        )

    def _names(self, ids: Iterable[int], joined: Iterable[str]) -> dict[int, str]:
        """Return what workers are called on the bus."""
        if self._count is not None and str(self._count) in joined:
            self._first = 1
        return {worker: str(worker + self._first) for worker in ids}

    def greet(self, weights: Weights | None, *, timeout: float) -> None:
        """Publish the first version, which every worker gets that has joined or joins later."""
        if weights is not None:
            self._model = bus_name(weights.model_id)
            self._publisher.publish_async(
                self._model, weights.tensors, require=0, wait="none", timeout=timeout
            )

    def versions(self) -> Mapping[int, int]:
        """Return what each worker says that it runs."""
        if self._model is None or self._closed.is_set():
            return {}
        status = self._publisher.workers()
        ids = self.workers() if self._count is not None else map(int, filter(str.isdigit, status))
        return {
            worker: status[name].running[self._model][1]
            for worker, name in sorted(self._names(ids, status).items())
            if name in status and self._model in status[name].running
        }

    def close(self) -> None:
        """Close the publisher."""
        self._closed.set()
        self._publisher.close()


class _Call:
    """One send that is on its way."""

    def __init__(
        self,
        model_id: str,
        bus_model: str,
        ids: Sequence[int],
        deadline: float,
        answer: "Future[Receipt]",
    ) -> None:
        self.model_id, self.bus_model, self.ids = model_id, bus_model, ids
        self.started, self.deadline, self.answer = time.monotonic(), deadline, answer


def _receipt(done: "Future[Receipt]") -> Receipt:
    with suppress(PublishError):
        return done.result()
    error = done.exception()
    if not isinstance(error, PublishError):
        raise ClosedError("the publisher was closed") from error
    return error.receipt
