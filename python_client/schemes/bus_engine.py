"""The engine over the bus: one publisher on the sender.

A worker is called by its number. Where the number of workers is known, a send is for all of them:
it waits, for most of its time, until they have joined once, and then goes to those that are there;
the others are named. Where it is not known, a send is for those that have joined.

Some collectors number their workers from 0 on the sender and from 1 on the receivers. Where one
has joined under the number of workers itself, receivers are taken to count from 1.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from ...bus.errors import PublishError
from ...bus.receipt import Receipt, WorkerReceipt
from ...codecs.errors import WeightBusError
from ..publisher import Publisher
from .bus_reception import bus_name
from .each import copied
from .engine import Prepared, Weights

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
        self._seen: set[str] = set()  # names of workers that have ever joined
        self._first = 0  # what receivers count from
        self._firsts: dict[int, Weights] = {}  # what workers begin with that have not joined yet
        self._order = threading.Lock()  # so that what is published later is newer

    def workers(self) -> Sequence[int]:
        """Return the ids of all workers, or of those that have joined and are not lost."""
        if self._count is not None:
            return range(self._count)
        status = self._publisher.workers().values()
        return sorted(int(s.name) for s in status if s.state != "lost" and s.name.isdigit())

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        """Publish a version."""
        deadline = time.monotonic() + timeout
        self._model = model = bus_name(weights.model_id)
        ids = [*self.workers()] if workers is None else [*workers]
        there = self._await_joined(ids, deadline - timeout * MARGIN)
        names = self._names(ids)
        reached = None if workers is None else [n for n in names.values() if n in there]
        with self._order:
            for worker, name in names.items():
                if reached is None or name in reached:
                    self._firsts.pop(worker, None)  # what is sent now is newer
            published = self._publisher.publish_async(
                model, weights.tensors, workers=reached, timeout=deadline - time.monotonic()
            )
        answer: Future[Receipt] = Future()

        def is_published(done: "Future[Receipt]") -> None:
            try:
                answer.set_result(self._renamed(_receipt(done), weights.model_id, names))
            except BaseException as error:
                answer.set_exception(error)

        published.add_done_callback(is_published)
        return answer

    def _await_joined(self, ids: Sequence[int], deadline: float) -> frozenset[str]:
        """Wait until workers have joined once; return the names of all that are there."""
        while True:
            there = frozenset(self._publisher.workers())
            self._note(there)
            all_came = self._seen.issuperset(self._names(ids).values())
            if all_came or time.monotonic() >= deadline or self._closed.wait(LOOK_SECONDS):
                return there

    def _note(self, there: Iterable[str]) -> None:
        self._seen.update(there)
        if self._count is not None and str(self._count) in self._seen:
            self._first = 1

    def _names(self, ids: Iterable[int]) -> dict[int, str]:
        """Return what workers are called on the bus."""
        return {worker: str(worker + self._first) for worker in ids}

    def _renamed(self, receipt: Receipt, model_id: str, names: Mapping[int, str]) -> Receipt:
        """Return a receipt with every worker under its id, those that are missing included."""
        workers: dict[str, WorkerReceipt] = {}
        for worker, name in names.items():
            row = receipt.workers.get(name)
            if row is not None and not (row.state == "left" and self._count is not None):
                workers[str(worker)] = replace(row, name=str(worker))
            elif name in self._seen:
                workers[str(worker)] = WorkerReceipt(str(worker), "lost", 0.0, "it has left")
            else:
                text = f"it has not joined at {self._publisher.address}"
                workers[str(worker)] = WorkerReceipt(str(worker), "behind", None, text)
        return replace(receipt, model=model_id, workers=workers)

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Publish the first version, which every worker gets that has joined or joins later."""
        if isinstance(weights, Weights):
            self._model = bus_name(weights.model_id)
            self._publisher.publish_async(
                self._model, weights.tensors, require=0, wait="none", timeout=timeout
            )
        elif weights:
            self._firsts = {worker: copied(own) for worker, own in weights.items()}
            greet = threading.Thread(target=self._greet_each, args=(timeout / len(weights),))
            greet.name, greet.daemon = "weightbus-greet", True
            greet.start()

    def _greet_each(self, share: float) -> None:
        """Publish to each worker what it begins with when it joins, unless a send comes first.

        One after the other, since the bus gives up older versions of a model for newer ones.
        """
        while self._firsts and not self._closed.wait(LOOK_SECONDS):
            there = self._publisher.workers().keys()
            for worker, name in self._names([*self._firsts]).items():
                with self._order:
                    own = self._firsts.pop(worker, None) if name in there else None
                    if own is None:
                        continue
                    self._model = model = bus_name(own.model_id)
                    begun = self._publisher.publish_async(
                        model, own.tensors, workers=[name], timeout=share
                    )
                with suppress(WeightBusError):  # a worker that failed will say so to the next send
                    begun.result()

    def versions(self) -> Mapping[int, int]:
        """Return what each worker says that it runs."""
        if self._model is None or self._closed.is_set():
            return {}
        status = self._publisher.workers()
        self._note(status)
        numbers = sorted(int(name) for name in status if name.isdigit())
        return {
            number - self._first: status[str(number)].running[self._model][1]
            for number in numbers
            if self._model in status[str(number)].running
        }

    def close(self) -> None:
        """Close the publisher."""
        self._closed.set()
        self._publisher.close()


def _receipt(done: "Future[Receipt]") -> Receipt:
    """Return the receipt, whether or not it is one of success."""
    try:
        return done.result()
    except PublishError as error:
        return error.receipt
