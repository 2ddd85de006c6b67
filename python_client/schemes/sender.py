"""The sender's side of a scheme: one send at a time, its deadline, its receipt, its errors.

idle ── start() ──> on its way ── finish() ──> idle
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from ...bus.errors import ClosedError, PublishError
from ...bus.receipt import Receipt
from ...codecs.errors import WeightBusError
from .. import checks
from .carrier import Carrier, Prepared, Weights, merged

ANSWER_SECONDS = 5.0  # beyond its deadline, what a carrier's thread is allowed to answer

SendCall = Literal["send", "send_async"]


class NothingToSendError(WeightBusError, LookupError):
    """Nobody said what to send."""

    def __str__(self) -> str:
        return str(self.args[0])


class Sending:
    """What is on its way over a carrier, and what became of the last send."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.receipt: Receipt | None = None
        self._future: Future[Receipt] | None = None
        self._deadline = 0.0

    @property
    def pending(self) -> bool:
        """Whether a send is on its way that nobody has waited for."""
        return self._future is not None

    def wait(self, timeout: float | None = None) -> Receipt:
        """Wait for what `send_async` has started; errors are those of `finish`.

        Raises:
            RuntimeError: Nothing is on its way.
        """
        if not self.pending:
            raise RuntimeError("No async send is pending. Call send_async() first.")
        return self.finish(timeout)

    def check_idle(self, call: SendCall) -> None:
        """Raise RuntimeError if a send is on its way that nobody has waited for."""
        if not self.pending:
            return
        if call == "send":
            raise RuntimeError(
                "Cannot call send() while an async send is pending. Call wait_async() first."
            )
        raise RuntimeError(
            "Cannot call send_async() again while a previous send is pending. "
            "Call wait_async() first."
        )

    def start(
        self, weights: Prepared, worker_ids: int | Sequence[int] | None, timeout: float
    ) -> None:
        """Send; return as soon as the trainer may change its weights.

        Raises:
            ValueError: A worker does not exist; nothing was sent.
            StateError: The weights cannot travel; nothing was sent.
        """
        workers = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        workers = None if workers is None else list(dict.fromkeys(workers))
        timeout = checks.seconds(timeout, "timeout", positive=True)
        self._deadline = time.monotonic() + timeout
        self._check_known(workers)
        if isinstance(weights, Weights):
            self._future = self.carrier.send(weights, workers, timeout=timeout)
            return
        chosen = [*weights] if workers is None else workers
        self._check_known(chosen)
        if missing := [str(i) for i in chosen if i not in weights]:
            raise ValueError(f"no weights given for worker {', '.join(missing)}")
        self._future = _send_each(self.carrier, {w: weights[w] for w in chosen}, timeout)

    def finish(self, timeout: float | None = None) -> Receipt:
        """Wait until the send is over.

        Raises:
            PublishError: Not every worker has the weights; it names them and carries the receipt.
            TimeoutError: It is still on its way after `timeout` seconds. Wait again.
        """
        limit = self._deadline + ANSWER_SECONDS
        given = math.inf if timeout is None else checks.seconds(timeout, "timeout")
        until = min(limit, time.monotonic() + given)
        future = self._future
        if future is None:
            raise RuntimeError("nothing is being sent; start() first")
        try:
            receipt = _receipt_of(future, max(0.0, until - time.monotonic()))
        except FutureTimeout:
            if not future.done() and until < limit:
                raise TimeoutError(f"the send is still on its way after {timeout} s") from None
            self._future = None
            raise ClosedError("the engine has not answered long after the deadline") from None
        except BaseException:
            self._future = None
            raise
        self._future, self.receipt = None, receipt
        check(receipt)
        return receipt

    def _check_known(self, workers: Sequence[int] | None) -> None:
        known = self.carrier.workers()
        if workers is None and not known:
            raise RuntimeError("No transports available.")
        for worker in workers or ():
            if worker not in known:
                raise ValueError(f"Worker {worker} not registered")


def check(receipt: Receipt) -> None:
    """Raise PublishError unless every worker that stayed has the version, or a newer one."""
    done, left = receipt.in_state("applied", "skipped"), receipt.in_state("left")
    total = len(receipt.workers) - len(left)
    if len(done) < total:
        rest = "; ".join(
            f"worker {w}" for n, w in sorted(receipt.workers.items()) if n not in (*done, *left)
        )
        raise PublishError(
            f"{receipt.model} version {receipt.version}: {len(done)} of {total} workers have it. "
            f"{rest}. The others can still be sent to.",
            receipt,
        )


def _send_each(
    carrier: Carrier, weights: Mapping[int, Weights], timeout: float
) -> "Future[Receipt]":
    """Copy weights of each worker's own, start to send them, and return a future of one receipt.

    One worker after the other, each with its share of time, since a carrier holds few versions of a
    model at a time, and gives up the older ones for the newer.

    Raises:
        StateError: Some of them cannot travel; nothing was sent.
    """
    deadline = time.monotonic() + timeout
    copies = {worker: own.copied() for worker, own in weights.items()}
    whole: Future[Receipt] = Future()

    def send_all() -> None:
        receipts: list[Receipt] = []
        try:
            for done, (worker, own) in enumerate(copies.items()):
                share = max(0.001, deadline - time.monotonic()) / (len(copies) - done)
                future = carrier.send(own, [worker], timeout=share)
                receipts.append(_receipt_of(future, share + ANSWER_SECONDS))
            whole.set_result(merged(receipts))
        except BaseException as error:
            whole.set_exception(error)

    threading.Thread(target=send_all, name="weightbus-each", daemon=True).start()
    return whole


def _receipt_of(future: "Future[Receipt]", timeout: float) -> Receipt:
    """Wait for a receipt; a carrier may also raise what it has to report."""
    try:
        return future.result(timeout)
    except PublishError as error:
        return error.receipt


@dataclass(eq=False)
class SenderSide:
    """A scheme between `init_on_sender` and its shutdown.

    Attributes:
        sending: What is being sent, and by what it is carried.
        connected: Whether `connect()` was called.
    """

    sending: Sending
    connected: bool = False

    def connect(self, first: Prepared | None, timeout: float) -> None:
        """Have the first weights reach every worker that has joined or joins later."""
        self.connected = True
        try:
            self.sending.carrier.greet(first, timeout=timeout)
        except PublishError:
            raise  # some worker was not reached; the others can be sent to
        except BaseException:
            self.connected = False
            raise

    def close(self) -> None:
        """Let go of everything."""
        with suppress(Exception):
            self.sending.carrier.close()


# What a sender is given at its initialisation.


@dataclass(frozen=True, slots=True)
class Sources:
    """What `init_on_sender` takes itself; the rest is for what carries the weights.

    Attributes:
        model: The model, given as it is.
        weights: What to send if a send does not say, where no model was given.
        count: How many workers there are, as far as anybody said.
    """

    model: Any
    weights: Any
    count: int | None

    @classmethod
    def taken(cls, kwargs: dict[str, Any], context: Any) -> "Sources":
        """Take them out of keywords."""
        model, source_model = kwargs.pop("model", None), kwargs.pop("source_model", None)
        names = ("params_map", "weights", "cached_weights", "devices", "device_map_fn")
        given = {name: kwargs.pop(name, None) for name in names}
        count = kwargs.pop("num_workers", None)
        if count is None:
            lists = (given["params_map"], given["devices"], kwargs.get("pipes"))
            counts = (len(one) for one in lists if isinstance(one, Sized))
            of_context = getattr(context, "num_workers", None)
            count = next(counts, of_context if isinstance(of_context, int) else None)
        weights = next((w for name in names[:3] if (w := given[name]) is not None), None)
        if (mapped := given["device_map_fn"]) is not None and weights is not None:
            weights = {worker: mapped(worker, weights) for worker in range(count or 0)}
        return cls(model if source_model is None else source_model, weights, count)


def is_per_worker(weights: Any) -> TypeGuard[Mapping[int, Any]]:
    """Tell `{worker id: weights}` from the weights of one model."""
    if not isinstance(weights, Mapping):
        return False
    # By `keys()`, since a TensorDict is a mapping that iterates over its batch.
    keys = [*cast("Mapping[object, Any]", weights).keys()]
    return bool(keys) and all(type(key) is int for key in keys)


def check_sources(
    model_id: str | None, context: Any, kwargs: Mapping[str, Any], count: int | None
) -> None:
    """Check what may be given together, as callers of TorchRL's schemes of one host know it."""
    given = {name for name, value in kwargs.items() if value is not None}
    given |= {"model_id"} if model_id is not None else set()
    if "params_map" in given:
        if not isinstance(kwargs["params_map"], dict):
            raise ValueError("params_map must be a dict[int, TensorDictBase]")
        if given & {"weights", "model"}:
            raise ValueError(
                "model_id, weights, and model cannot be provided if params_map is provided"
            )
        other, excluded = "params_map", ["devices", "device_map_fn", "num_workers"]
        if context is not None:
            raise ValueError("context cannot be provided if params_map is provided")
    elif context is not None:
        if model_id is None:
            raise ValueError("model_id must be provided if context is provided")
        other = "context"
        excluded = ["devices", "model", "weights", "device_map_fn", "num_workers"]
    else:
        if not given & {"model", "weights", "devices", "num_workers", "pipes"} and count is None:
            raise ValueError(
                "Either params_map, model_id + context or model/weights + devices must be provided."
                " (In the older vintage: pipes must be provided via context or kwargs)"
            )
        return
    for name in excluded:
        if name in given:
            raise ValueError(f"{name} cannot be provided if {other} is provided")
