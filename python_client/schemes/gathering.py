"""Gathering: what several workers answer to one version, made into a receipt by a deadline.

Whoever sends starts one call per worker and hands their futures over. The receipt is there when
all have answered, or when the time is over: a worker that has not answered by then is `behind`,
whether it is stopped, cut off or busy. Nothing here waits: answers come in by callback, and the
deadline by a timer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ...bus.receipt import Receipt, State, WorkerReceipt

Answer: TypeAlias = tuple[State, str]  # what a worker did with a version, and words about it


@dataclass(frozen=True, slots=True)
class Shipment:
    """One version on its way to some workers.

    Attributes:
        model, epoch, version, nbytes: As in `Receipt`.
        started: When the send began, on the monotonic clock.
        timeout: Seconds from then on that the workers have.
    """

    model: str
    epoch: int
    version: int
    nbytes: int
    started: float
    timeout: float

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.started + self.timeout - time.monotonic()


def gather(
    shipment: Shipment,
    calls: Mapping[str, "Future[Answer]"],
    explain: Callable[[str, BaseException], Answer],
) -> "Future[Receipt]":
    """Return a future of what the workers answer, by name; it resolves by the deadline.

    Args:
        shipment: What was sent.
        calls: By worker name, its answer to come.
        explain: Says what it means that the call of a worker raised: that it is lost, say.

    The future never raises: what became of each worker stands in the receipt.
    """
    return _Gathering(shipment, calls, explain).receipt


class _Gathering:
    def __init__(
        self,
        shipment: Shipment,
        calls: Mapping[str, "Future[Answer]"],
        explain: Callable[[str, BaseException], Answer],
    ) -> None:
        self.receipt: Future[Receipt] = Future()
        self.receipt.set_running_or_notify_cancel()  # so that nobody can cancel it
        self._shipment, self._explain = shipment, explain
        self._lock = threading.Lock()
        self._resolved = False
        self._rows: dict[str, WorkerReceipt | None] = dict.fromkeys(calls)
        self._timer = threading.Timer(max(0.0, shipment.left), self._resolve)
        self._timer.daemon = True
        self._timer.start()
        for name, call in calls.items():
            call.add_done_callback(partial(self._answered, name))
        if not calls:
            self._resolve()

    def _answered(self, name: str, call: "Future[Answer]") -> None:
        error = call.exception()
        state, detail = call.result() if error is None else self._explain(name, error)
        with self._lock:
            seconds = None if state == "behind" else time.monotonic() - self._shipment.started
            self._rows[name] = WorkerReceipt(name, state, seconds, detail)
            complete = None not in self._rows.values()
        if complete:
            self._resolve()

    def _resolve(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._resolved:
                return
            self._resolved = True
            receipt = self._written()
        self.receipt.set_result(receipt)

    def _written(self) -> Receipt:
        shipment = self._shipment
        silent = f"no answer within {shipment.timeout:g} s; it is stopped, busy or cut off"
        return Receipt(
            model=shipment.model,
            epoch=shipment.epoch,
            version=shipment.version,
            nbytes=shipment.nbytes,
            seconds=time.monotonic() - shipment.started,
            digest="",
            workers={
                name: row or WorkerReceipt(name, "behind", None, silent)
                for name, row in self._rows.items()
            },
        )
