"""Sending: one send at a time over an engine, its deadline, its receipt, its errors.

idle ── start() ──> on its way ── finish() ──> idle
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Literal

from ...bus.errors import ClosedError, PublishError
from ...bus.receipt import Receipt
from .. import checks
from .each import receipt_of, send_each
from .engine import ANSWER_SECONDS, Engine, Prepared, Weights

SendCall = Literal["send", "send_async"]


class Sending:
    """What one sender has on its way, and what became of its last send."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
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

    def start(self, weights: Prepared, workers: Sequence[int] | None, timeout: float) -> None:
        """Send; return as soon as the trainer may change its weights.

        Raises:
            ValueError: A worker does not exist; nothing was sent.
            StateError: The weights cannot travel; nothing was sent.
        """
        timeout = checks.seconds(timeout, "timeout", positive=True)
        self._deadline = time.monotonic() + timeout
        self._check_known(workers)
        if isinstance(weights, Weights):
            self._future = self.engine.send(weights, workers, timeout=timeout)
            return
        chosen = [*weights] if workers is None else [*workers]
        self._check_known(chosen)
        if missing := [str(i) for i in chosen if i not in weights]:
            raise ValueError(f"no weights given for worker {', '.join(missing)}")
        self._future = send_each(self.engine, {w: weights[w] for w in chosen}, timeout)

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
            receipt = receipt_of(future, max(0.0, until - time.monotonic()))
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
        known = self.engine.workers()
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
