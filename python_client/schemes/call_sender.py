"""Sends weights by calling a function in each worker's process, over torch RPC or Ray.

A version is sent with one call per worker, and the call's return value is the acknowledgement.
Subclasses of `Peers` (torch_rpc.py, ray.py) make the calls and interpret their errors.

`Answers` collects the results. The receipt is complete when all workers have answered, or at the
deadline. A worker that has not answered by then is `behind`, whether it is stopped, cut off or
busy. No thread waits: callbacks record the answers, and a timer ends the wait at the deadline.
"""

import itertools
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ...bus.errors import PublishError
from ...bus.receipt import Receipt, WorkerReceipt
from ...codecs.layout import Layout
from ...codecs.state import State
from .call_receiver import MARGIN, Call, CallReceiver
from .model import CallResult
from .receiver import Destination
from .transport import Prepared, Transport, Weights, merged


class Answers:
    """Collects the workers' answers to one version, and completes a receipt by the deadline.

    Args:
        empty: The receipt to complete; its `workers` are still empty.
        calls: The future of each worker's call, by the worker's name.
        started: The time on the monotonic clock at which the send began, in seconds.
        timeout: Seconds from `started` to the deadline.
        explain: Returns the result of a worker (name) whose call raised an error.
        ended: Called when the last call has ended, even after the deadline. The argument is True if
            no call raised an exception.

    Attributes:
        receipt: A future of the complete receipt. The future never raises.
    """

    def __init__(
        self,
        empty: Receipt,
        calls: "Mapping[str, Future[CallResult]]",
        *,
        started: float,
        timeout: float,
        explain: Callable[[str, BaseException], CallResult],
        ended: Callable[[bool], None] | None = None,
    ) -> None:
        silent = f"no answer within {timeout:.3g} s; it is stopped, busy or cut off"
        self._rows = {name: WorkerReceipt(name, "behind", None, silent) for name in calls}
        self._pending, self._clean, self._completed = set(calls), True, False
        self._empty, self._started, self._explain, self._ended = empty, started, explain, ended
        self._lock = threading.Lock()
        self.receipt: Future[Receipt] = Future()
        self.receipt.set_running_or_notify_cancel()  # so that the future cannot be cancelled
        left = max(0.0, started + timeout - time.monotonic())
        self._timer = threading.Timer(left, self._complete)
        self._timer.daemon = True
        self._timer.start()
        for name, call in calls.items():
            call.add_done_callback(partial(self._record, name))
        if not calls:
            self._complete()

    def _record(self, name: str, call: "Future[CallResult]") -> None:
        # Record one worker's answer, or the error of its call, in the receipt.
        error, seconds = call.exception(), time.monotonic() - self._started
        answer = call.result() if error is None else self._explain(name, error)
        behind = answer.state == "behind"
        with self._lock:
            row = WorkerReceipt(name, answer.state, None if behind else seconds, answer.detail)
            self._rows[name] = row
            self._pending.discard(name)
            self._clean = self._clean and error is None
            is_last = not self._pending
        if is_last and self._ended is not None:
            self._ended(self._clean)
        if is_last:
            self._complete()

    def _complete(self) -> None:
        """Complete the receipt, after the last answer or at the deadline if that is earlier."""
        with self._lock:
            if self._completed:
                return
            self._completed, rows = True, dict(self._rows)
        self._timer.cancel()
        seconds = time.monotonic() - self._started
        self.receipt.set_result(replace(self._empty, seconds=seconds, workers=rows))


class Payload(Protocol):
    """A copy of a version in a form that calls can transmit."""

    @property
    def layout(self) -> Layout: ...

    def done(self, clean: bool, /) -> None:
        """Release the copy, after the last call. If not `clean`, a call may still read the copy."""


class Peers(ABC):
    """Makes calls to the worker processes; `workers` are their actors or RPC workers."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = workers

    @abstractmethod
    def pack(self, state: State) -> Payload:
        """Return a copy of a state that `call` accepts as `payload`."""

    @abstractmethod
    def call(self, worker: int, payload: Any, what: Call, timeout: float) -> "Future[CallResult]":
        """Call `deliver` in worker number `worker`; return a future of the result."""

    @abstractmethod
    def explain(self, worker: int, error: BaseException) -> CallResult:
        """Return the result of a worker whose call raised `error`."""


class Channel:
    """The key that a scheme shares with its copies, and the numbers of the versions it sends."""

    def __init__(self) -> None:
        # All copies of a scheme have its key, also those made before the scheme became a sender.
        self.key = secrets.token_hex(8)
        self._copied = False
        self._epoch = 0
        self._count = itertools.count(1)

    def begin(self) -> None:
        """Set the sender's epoch at the first call; all transports of a scheme share the epoch."""
        self._epoch = self._epoch or time.time_ns() // 1_000_000

    def receiver(
        self, destination: Destination, *, worker_idx: int | None, background: bool, **_: Any
    ) -> CallReceiver:
        """Return a receiver of this scheme's versions (of a copy: those of the original scheme)."""
        own = destination, self.key, self._copied
        return CallReceiver(*own, worker=worker_idx, background=background)

    def number(self) -> tuple[int, int]:
        """Return the epoch, and the next version number."""
        return self._epoch, next(self._count)

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.key, "_copied": True, "_epoch": 0, "_count": itertools.count(1)}


class CallSender(Transport):
    """Sends versions by calls."""

    def __init__(self, channel: Channel, peers: Peers, strategy: str) -> None:
        channel.begin()
        self._channel, self._peers, self._strategy = channel, peers, strategy
        # By worker: the newest version that was written, at least partly, and whether the worker
        # runs that version.
        self._newest: dict[int, tuple[tuple[int, int], bool]] = {}
        self._lock = threading.Lock()

    def workers(self) -> Sequence[int]:
        return range(len(self._peers.workers))

    def versions(self) -> Mapping[int, int]:
        """Return the version that each worker runs; answers after the deadline count too."""
        with self._lock:
            newest = sorted(self._newest.items())
        return {worker: version for worker, ((_, version), runs) in newest if runs}

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        """Copy the weights, and call each of `workers` with the copy; see `Transport.send`."""
        return self._send(weights, workers, timeout, greeting=False)

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Send the first weights to every worker, and wait for the answers.

        A worker without a receiver keeps the weights until it has one, and counts as reached.

        Raises:
            PublishError: Some workers were not reached; the error names them.
        """
        if weights is None:
            return
        if isinstance(weights, Weights):
            sent = [self._send(weights, None, timeout, greeting=True)]
        else:
            sent = [self._send(own, [w], timeout, greeting=True) for w, own in weights.items()]
        receipt = merged([future.result() for future in sent])
        if missed := receipt.in_state("failed", "lost", "behind"):
            rows = "; ".join(f"worker {receipt.workers[name]}" for name in missed)
            raise PublishError(
                f"{receipt.model}: not every worker got its first weights. {rows}", receipt
            )

    def _send(
        self, weights: Weights, workers: Sequence[int] | None, timeout: float, *, greeting: bool
    ) -> "Future[Receipt]":
        # Call each of `workers` with a copy of the weights; return a future of the receipt.
        started, number = time.monotonic(), self._channel.number()
        payload = self._peers.pack(weights.state())
        calls: dict[str, Future[CallResult]] = {}
        for worker in dict.fromkeys(self.workers() if workers is None else workers):
            left = max(0.001, started + timeout - time.monotonic())
            address = self._channel.key, weights.model_id, worker
            what = Call(*address, *number, left * MARGIN, greeting, self._strategy)
            calls[str(worker)] = call = self._call(worker, payload, what, left)
            call.add_done_callback(partial(self._record, worker, number))
        return Answers(
            Receipt(weights.model_id, *number, payload.layout.nbytes, 0.0, "", {}),
            calls,
            started=started,
            timeout=timeout,
            explain=lambda worker, error: self._peers.explain(int(worker), error),
            ended=payload.done,
        ).receipt

    def _call(self, worker: int, payload: Payload, what: Call, left: float) -> "Future[CallResult]":
        try:
            return self._peers.call(worker, payload, what, left)
        except Exception as error:  # must not prevent the calls to the other workers
            failed: Future[CallResult] = Future()
            failed.set_exception(error)
            return failed

    def _record(self, worker: int, number: tuple[int, int], call: "Future[CallResult]") -> None:
        # Record the version that a worker's call has written, at least partly.
        answer = CallResult("failed") if call.exception() else call.result()
        runs = answer.state == "applied"
        if runs or not answer.intact:
            with self._lock:
                before = self._newest.get(worker, ((0, 0), False))
                self._newest[worker] = max((number, runs), before)
