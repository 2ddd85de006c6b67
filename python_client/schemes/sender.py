"""The sender's side of a scheme: one send at a time, its deadline, its receipt, its errors.

idle ── start() ──> on its way ── finish() ──> idle

Threads that send at the same time take turns: each waits for its own within its deadline.
"""

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from ...bus.errors import PublishError
from ...bus.receipt import Receipt, WorkerReceipt
from ...codecs.errors import WeightBusError
from .. import checks
from .carrier import Carrier, Prepared, Weights, merged

# What a carrier's thread may answer beyond its deadline: a part of the time, and seconds.
LATE_PART, LATE_SECONDS = 0.1, 0.25

SendCall = Literal["send", "send_async"]


class NothingToSendError(WeightBusError, LookupError):
    """Nobody said what to send."""


class Sending:
    """What is on its way over a carrier, and what became of the last send."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.receipt: Receipt | None = None
        self._future: Future[Receipt] | None = None
        self._deadline = self._timeout = 0.0
        self._asked: tuple[str, Sequence[int]] = "", ()  # of what model it is, and for whom
        self._turn = threading.RLock()
        self._awaited = False  # what is on its way is waited for by who has started it

    @property
    def pending(self) -> bool:
        """Whether a send is on its way that nobody waits for."""
        return self._future is not None and not self._awaited

    @contextmanager
    def turn(self, model: str, timeout: float) -> Generator[float]:
        """Keep other threads from sending; yield the seconds that are left of `timeout`.

        Raises:
            PublishError: Other threads were sending for as long as that; nothing was sent.
        """
        timeout = checks.seconds(timeout, "timeout", positive=True)
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=timeout):
            told = f"not sent to: another thread was sending for all of {timeout:.3g} s"
            check(_unanswered(model, self.carrier.workers(), timeout, told))
            raise TimeoutError(told)  # there are no workers
        try:
            yield max(0.001, deadline - time.monotonic())
        finally:
            self._turn.release()

    def send(
        self,
        model: str,
        prepare: Callable[[], Prepared],
        worker_ids: int | Sequence[int] | None,
        timeout: float,
    ) -> Receipt:
        """Send in turn with other threads, and wait until the send is over.

        Args:
            model: What the weights are of.
            prepare: Returns what is sent, as it is when the turn has come.
            worker_ids, timeout: As of `start`.

        Raises:
            RuntimeError: A `send_async` was not waited for.
            Exception: As `start` and `finish`.
        """
        with self.turn(model, timeout) as left:
            self.check_idle("send")
            prepared = prepare()
            self._awaited = True
            try:
                self.start(prepared, worker_ids, left)
                return self.finish()
            finally:
                self._awaited = False

    def wait(self, timeout: float | None = None) -> Receipt:
        """Wait for what `send_async` has started; RuntimeError if nothing is on its way."""
        if not self.pending:
            raise RuntimeError("No async send is pending. Call send_async() first.")
        return self.finish(timeout)

    def check_idle(self, call: SendCall) -> None:
        """Raise RuntimeError if a send is on its way that nobody has waited for."""
        if self.pending:
            again = {"send": "while an async send", "send_async": "again while a previous send"}
            raise RuntimeError(
                f"Cannot call {call}() {again[call]} is pending. Call wait_async() first."
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
        self._deadline, self._timeout = time.monotonic() + timeout, timeout
        self._check_known(workers)
        if isinstance(weights, Weights):
            self._asked = weights.model_id, workers or self.carrier.workers()
            self._future = self.carrier.send(weights, workers, timeout=timeout)
            return
        chosen = [*weights] if workers is None else workers
        self._check_known(chosen)
        if missing := [str(i) for i in chosen if i not in weights]:
            raise ValueError(f"no weights given for worker {', '.join(missing)}")
        self._asked = next(iter(weights.values())).model_id, chosen
        self._future = _send_each(self.carrier, {w: weights[w] for w in chosen}, timeout)

    def finish(self, timeout: float | None = None) -> Receipt:
        """Wait until the send is over.

        Raises:
            PublishError: Not every worker has the weights; it names them and carries the receipt.
            TimeoutError: It is still on its way after `timeout` seconds. Wait again.
        """
        future, limit = self._future, self._deadline + _late(self._timeout)
        if future is None:
            raise RuntimeError("nothing is being sent; start() first")
        given = math.inf if timeout is None else checks.seconds(timeout, "timeout")
        until = min(limit, time.monotonic() + given)
        try:
            receipt = _receipt_of(future, until - time.monotonic())
        except BaseException:
            self._over(future)
            raise
        if receipt is None and until < limit:
            raise TimeoutError(f"the send is still on its way after {timeout} s")
        self._over(future)
        self.receipt = receipt or _unanswered(*self._asked, self._timeout)
        check(self.receipt)
        return self.receipt

    def _over(self, future: "Future[Receipt]") -> None:
        if self._future is future:  # two may have waited for it, and one have started the next
            self._future = None

    def _check_known(self, workers: Sequence[int] | None) -> None:
        known = self.carrier.workers()
        if workers is None and not known:
            raise RuntimeError(
                "No transports available. No worker is there: a send is for those that have "
                "joined, and connect() has the first weights wait for whoever joins"
            )
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
                receipt = _receipt_of(future, share + _late(share))
                receipts.append(receipt or _unanswered(own.model_id, [worker], share))
            whole.set_result(merged(receipts))
        except BaseException as error:
            whole.set_exception(error)

    threading.Thread(target=send_all, name="weightbus-each", daemon=True).start()
    return whole


def _late(timeout: float) -> float:
    return timeout * LATE_PART + LATE_SECONDS


def _receipt_of(future: "Future[Receipt]", timeout: float) -> Receipt | None:
    """Wait for a receipt, which a carrier may also raise; return None if there is none in time."""
    try:
        return future.result(max(0.0, timeout))
    except PublishError as error:
        return error.receipt
    except TimeoutError:
        if future.done():
            raise
        return None


def _unanswered(
    model: str, workers: Sequence[int], timeout: float, detail: str | None = None
) -> Receipt:
    """Return the receipt of a send whose carrier has said nothing of it."""
    silent = f"no answer within {timeout:.3g} s; what carries the weights is busy, or stuck"
    detail = detail or silent
    rows = {str(worker): WorkerReceipt(str(worker), "behind", None, detail) for worker in workers}
    return Receipt(model, 0, 0, 0, timeout, "", rows)


@dataclass(eq=False)
class SenderSide:
    """A scheme between `init_on_sender` and its shutdown."""

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
    """What `init_on_sender` takes itself; the rest is for what carries the weights."""

    model: Any
    weights: Any  # what to send if a send does not say, where no model was given
    count: int | None  # how many workers there are, as far as anybody said

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
