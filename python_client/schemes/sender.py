"""The sender's side of a scheme: makes one send at a time, in a deadline, and returns a receipt.

idle ── start() ──> pending ── finish() ──> idle

Only one thread sends at a time; the other threads wait, each within its own deadline.
"""

import math
import threading
import time
from collections.abc import Generator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, cast

from ...bus.errors import PublishError
from ...bus.receipt import Receipt, WorkerReceipt
from ...codecs.errors import WeightBusError
from .. import checks
from .model import POLICY
from .transport import Prepared, Transport, Weights, WorkerIds, merged

# A transport may answer this much after the deadline: a fraction of the timeout, plus seconds.
LATE_PART, LATE_SECONDS = 0.1, 0.25


class NothingToSendError(WeightBusError, LookupError):
    """A send was called without weights, and the scheme has none."""


class Preparer(Protocol):
    """Prepares the weights of a send: a scheme.

    Attributes:
        timeout: Default seconds for a send.
    """

    timeout: float

    @property
    def model_id(self) -> str | None:
        """The id of the model, which receipts and errors name."""

    def prepared(self, weights: Any, model_id: str | None = None) -> Prepared:
        """Return the weights to send; see `Scheme.prepared`."""
        ...


class Sending:
    """The pending send of a transport, and the receipt of the last send.

    A scheme that is a sender has a `Sending` as its side, from `init_on_sender` to `shutdown`.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.connected = transport, False
        self.receipt: Receipt | None = None
        self._future: Future[Receipt] | None = None
        self._deadline = self._timeout = 0.0
        # model id and worker ids of the pending send
        self._pending_send: tuple[str, Sequence[int]] = "", ()
        self._turn = threading.RLock()
        self._awaited = False  # whether the thread that started the pending send waits for its end

    def connect(self, first: Prepared | None, timeout: float) -> None:
        """Offer the first weights to every worker that has joined or joins later."""
        self.connected = True
        try:
            self.transport.greet(first, timeout=timeout)
        except PublishError:
            raise  # stay connected: sends to the other workers work
        except BaseException:
            self.connected = False
            raise

    def close(self) -> None:
        """Close the transport."""
        with suppress(Exception):
            self.transport.close()

    @property
    def pending(self) -> bool:
        """Whether a `send_async` has not been waited for."""
        return self._future is not None and not self._awaited

    @contextmanager
    def turn(self, preparer: Preparer, timeout: float | None) -> Generator[float]:
        """Return a context manager that excludes other threads' sends; it yields the seconds left.

        Raises:
            PublishError: Other threads were sending during all of `timeout`; nothing was sent.
            TimeoutError: The same, if the transport has no workers.
        """
        timeout = preparer.timeout if timeout is None else timeout
        timeout = checks.seconds(timeout, "timeout", positive=True)
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=timeout):
            reason = f"not sent to: another thread was sending during all of {timeout:.3g} s"
            check(
                _unanswered(preparer.model_id or POLICY, self.transport.workers(), timeout, reason)
            )
            raise TimeoutError(reason)  # without workers, `check` accepts the receipt
        try:
            yield max(0.001, deadline - time.monotonic())
        finally:
            self._turn.release()

    def send(
        self,
        preparer: Preparer,
        weights: Any,
        worker_ids: WorkerIds,
        timeout: float | None = None,
        model_id: str | None = None,
    ) -> None:
        """Wait until no other thread sends, then send, and wait until the send has ended.

        Args:
            preparer: Prepares the weights, just before the send.
            weights, worker_ids, timeout: As in `Scheme.send`.
            model_id: The id of the model that has the weights; None: the scheme's model.

        Raises:
            RuntimeError: A `send_async` is still pending.
            Exception: The errors of `start` and `finish`.
        """
        with self.turn(preparer, timeout) as left:
            self._check_idle("send")
            prepared = preparer.prepared(weights, model_id)
            self._awaited = True
            try:
                self.start(prepared, worker_ids, left)
                self.finish()
            finally:
                self._awaited = False

    def send_async(
        self,
        preparer: Preparer,
        weights: Any,
        worker_ids: WorkerIds,
        timeout: float | None = None,
        model_id: str | None = None,
        *,
        after: bool = False,
    ) -> None:
        """Wait until no other thread sends, then start to send weights.

        If a send is pending: with `after`, finish that send first; otherwise raise RuntimeError.
        Arguments are those of `send`.
        """
        with self.turn(preparer, timeout) as left:
            if after and self.pending:
                self.finish()
            self._check_idle("send_async")
            self.start(preparer.prepared(weights, model_id), worker_ids, left)

    def wait(self, timeout: float | None = None) -> Receipt:
        """Return the receipt of the pending `send_async`; raise RuntimeError if none is pending."""
        if not self.pending:
            raise RuntimeError("No async send is pending. Call send_async() first.")
        return self.finish(timeout)

    def _check_idle(self, call: Literal["send", "send_async"]) -> None:
        """Raise RuntimeError if a `send_async` is pending. `call` is the new call's name."""
        if self.pending:
            again = {"send": "while an async send", "send_async": "again while a previous send"}
            raise RuntimeError(
                f"Cannot call {call}() {again[call]} is pending. Call wait_async() first."
            )

    def start(self, weights: Prepared, worker_ids: WorkerIds, timeout: float) -> None:
        """Start to send weights; return as soon as the trainer may change them.

        Raises:
            RuntimeError: `worker_ids` is None (all workers), but there are no workers.
            ValueError: A worker does not exist, or no weights were given for it; nothing was sent.
            StateError: The weights cannot be sent; nothing was sent.
        """
        workers = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        workers = None if workers is None else list(dict.fromkeys(workers))
        self._deadline, self._timeout = time.monotonic() + timeout, timeout
        self._check_known(workers)
        if isinstance(weights, Weights):
            self._pending_send = weights.model_id, workers or self.transport.workers()
            self._future = self.transport.send(weights, workers, timeout=timeout)
            return
        chosen = [*weights] if workers is None else workers
        self._check_known(chosen)
        if missing := [str(i) for i in chosen if i not in weights]:
            raise ValueError(f"no weights given for worker {', '.join(missing)}")
        self._pending_send = next(iter(weights.values())).model_id, chosen
        self._future = _send_each(self.transport, {w: weights[w] for w in chosen}, timeout)

    def finish(self, timeout: float | None = None) -> Receipt:
        """Wait until the pending send has ended; return its receipt.

        Raises:
            PublishError: Some workers lack the weights; the error names them and has the receipt.
            TimeoutError: The send is still pending after `timeout` seconds. Call this again.
        """
        future, limit = self._future, self._deadline + _late(self._timeout)
        if future is None:
            raise RuntimeError("nothing is being sent; start() first")
        given = math.inf if timeout is None else checks.seconds(timeout, "timeout")
        until = min(limit, time.monotonic() + given)
        try:
            receipt = _receipt_of(future, until - time.monotonic())
        except BaseException:
            self._forget(future)
            raise
        if receipt is None and until < limit:
            raise TimeoutError(f"the send is still pending after {timeout} s")
        self._forget(future)
        self.receipt = receipt or _unanswered(*self._pending_send, self._timeout)
        check(self.receipt)
        return self.receipt

    def _forget(self, future: "Future[Receipt]") -> None:
        # Forget the send of this future, unless it is not the pending one: another thread that
        # waited for the same send may have started the next one already.
        if self._future is future:
            self._future = None

    def _check_known(self, workers: Sequence[int] | None) -> None:
        if self.transport.any_worker:
            return
        known = self.transport.workers()
        if workers is None and not known:
            raise RuntimeError(
                "No transports available. No worker is connected: a send reaches only workers that "
                "have joined; workers that join later get the weights of connect()"
            )
        for worker in workers or ():
            if worker not in known:
                raise ValueError(f"Worker {worker} not registered")


def check(receipt: Receipt) -> None:
    """Raise PublishError unless every worker that has not left has the version or a newer one."""
    done, left = receipt.in_state("applied", "skipped"), receipt.in_state("left")
    total = len(receipt.workers) - len(left)
    if len(done) < total:
        rows = "; ".join(
            f"worker {w}" for n, w in sorted(receipt.workers.items()) if n not in (*done, *left)
        )
        raise PublishError(
            f"{receipt.model} version {receipt.version}: {len(done)} of {total} workers have it. "
            f"{rows}. Sends to the other workers still work.",
            receipt,
        )


def _send_each(
    transport: Transport, weights: Mapping[int, Weights], timeout: float
) -> "Future[Receipt]":
    """Send each worker its own weights, in a thread; return a future of one receipt for all.

    The thread sends to one worker after another, each within a share of the timeout: a transport
    has only a few versions of a model in memory, and if all were sent at once, newer ones would
    replace older ones.

    Raises:
        StateError: Some of the weights cannot be sent; nothing was sent.
    """
    deadline = time.monotonic() + timeout
    copies = {worker: own.copied() for worker, own in weights.items()}
    whole: Future[Receipt] = Future()

    def send_all() -> None:
        receipts: list[Receipt] = []
        try:
            for done, (worker, own) in enumerate(copies.items()):
                share = max(0.001, deadline - time.monotonic()) / (len(copies) - done)
                future = transport.send(own, [worker], timeout=share)
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
    """Return the receipt of a publish, also if it failed; None after `timeout` seconds."""
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
    """Return a receipt in which all workers are "behind", for a send that did not end in time."""
    silent = f"no answer within {timeout:.3g} s; the transport is busy, or stuck"
    detail = detail or silent
    rows = {str(worker): WorkerReceipt(str(worker), "behind", None, detail) for worker in workers}
    return Receipt(model, 0, 0, 0, timeout, "", rows)


# Arguments of `init_on_sender`.


@dataclass(frozen=True, slots=True)
class Sources:
    """The arguments that `init_on_sender` uses itself; the transport gets the others."""

    model: Any
    weights: Any  # sent by sends that are called without weights
    count: int | None  # the number of workers; None: not given

    @classmethod
    def taken(cls, kwargs: dict[str, Any], context: Any) -> "Sources":
        """Remove the arguments that `init_on_sender` uses from `kwargs`, and return them."""
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
    """Return whether `weights` is a mapping `{worker id: weights}`."""
    if not isinstance(weights, Mapping):
        return False
    # A TensorDict iterates over its batch, not over its keys.
    keys = [*cast("Mapping[object, Any]", weights).keys()]
    return bool(keys) and all(type(key) is int for key in keys)
