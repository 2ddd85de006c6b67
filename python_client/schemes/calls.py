"""The engine for whoever calls a function in the worker's process: torch RPC, and Ray.

One call per worker carries a version there; what it returns is the acknowledgement. A road
(torch_rpc.py, ray_actors.py) knows how to make a call, and what it means that one raises.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from ...bus.errors import PublishError
from ...bus.receipt import Receipt
from ...codecs.state import State
from .call_reception import MARGIN, CallReception, Letter
from .destination import Destination
from .each import merged
from .engine import Prepared, Reception, Weights
from .gathering import Answer, Shipment, gather
from .scheme import WeightSyncScheme
from .subject import POLICY


class Parcel(Protocol):
    """A version, snapshotted in a form that calls can carry."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def done(self, *, clean: bool) -> None:
        """No call carries it any more; unless `clean`, one may still be reading its memory."""
        ...


class Road(Protocol):
    """How calls reach the workers of one engine."""

    def workers(self) -> int:
        """Return how many there are."""
        ...

    def pack(self, state: State) -> Parcel:
        """Snapshot a state."""
        ...

    def call(self, worker: int, parcel: Any, letter: Letter, timeout: float) -> "Future[Answer]":
        """Start `delivery.deliver` in a worker's process."""
        ...

    def explain(self, worker: int, error: BaseException) -> Answer:
        """Say what it means that a call raised."""
        ...


class Numbers:
    """The numbers of a sender's versions: an epoch, higher than its predecessors', and a count."""

    def __init__(self) -> None:
        self._epoch = time.time_ns() // 1_000_000
        self._count = itertools.count(1)

    def take(self) -> tuple[int, int]:
        """Return the next epoch and version."""
        return self._epoch, next(self._count)


class CallEngine:
    """Sends versions by calls (see `engine.Engine`)."""

    def __init__(self, road: Road, key: str, numbers: Numbers, strategy: str) -> None:
        self._road, self._key, self._numbers, self._strategy = road, key, numbers, strategy
        self._versions: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def workers(self) -> Sequence[int]:
        """Return all ids."""
        return range(self._road.workers())

    def versions(self) -> Mapping[int, int]:
        """Return what each worker has acknowledged last, even if that came after a deadline."""
        with self._lock:
            return {worker: version for worker, (_, version) in sorted(self._versions.items())}

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        """Call every worker, with a snapshot of the weights."""
        return self._send(weights, workers, timeout, greeting=False)

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Bring the first weights to every worker, and wait for their answers.

        A worker that has no receiver yet keeps them for it, and counts as reached.

        Raises:
            PublishError: It names the workers that were not reached.
        """
        if weights is not None:
            each = (
                [(weights, None)]
                if isinstance(weights, Weights)
                else [(own, [worker]) for worker, own in weights.items()]
            )
            sent = [self._send(own, to, timeout, greeting=True) for own, to in each]
            receipt = merged([future.result() for future in sent])
            missed = receipt.in_state("failed", "lost", "behind")
            if missed:
                rest = "; ".join(f"worker {receipt.workers[name]}" for name in missed)
                raise PublishError(
                    f"{receipt.model}: not every worker could be given its first weights. {rest}",
                    receipt,
                )

    def close(self) -> None:
        """There is nothing to let go of."""

    def _send(
        self, weights: Weights, workers: Sequence[int] | None, timeout: float, *, greeting: bool
    ) -> "Future[Receipt]":
        started = time.monotonic()
        parcel = self._road.pack(weights.state())
        epoch, version = self._numbers.take()
        shipment = Shipment(weights.model_id, epoch, version, parcel.nbytes, started, timeout)
        chosen = list(dict.fromkeys(self.workers() if workers is None else workers))
        calls: dict[int, Future[Answer]] = {}
        outstanding = _Outstanding(parcel, len(chosen))
        for worker in chosen:
            left = max(0.001, shipment.left)
            address = self._key, weights.model_id, worker
            letter = (*address, epoch, version, left * MARGIN, greeting, self._strategy)
            calls[worker] = call = self._call(worker, parcel, letter, left)
            call.add_done_callback(partial(self._note, worker, (epoch, version)))
            call.add_done_callback(outstanding.ended)
        return gather(
            shipment, {str(worker): call for worker, call in calls.items()}, self._explain
        )

    def _call(self, worker: int, parcel: Parcel, letter: Letter, left: float) -> "Future[Answer]":
        try:
            return self._road.call(worker, parcel, letter, left)
        except Exception as error:  # the others are to have theirs
            failed: Future[Answer] = Future()
            failed.set_exception(error)
            return failed

    def _explain(self, name: str, error: BaseException) -> Answer:
        return self._road.explain(int(name), error)

    def _note(self, worker: int, number: tuple[int, int], call: "Future[Answer]") -> None:
        if call.exception() is None and call.result()[0] == "applied":
            with self._lock:
                self._versions[worker] = max(number, self._versions.get(worker, (0, 0)))


class _Outstanding:
    """Counts down the calls that carry a parcel."""

    def __init__(self, parcel: Parcel, calls: int) -> None:
        self._parcel, self._calls, self._clean = parcel, calls, True
        self._lock = threading.Lock()

    def ended(self, call: "Future[Answer]") -> None:
        with self._lock:
            self._calls -= 1
            self._clean = self._clean and call.exception() is None
            last = not self._calls
        if last:
            self._parcel.done(clean=self._clean)


class CallScheme(WeightSyncScheme):
    """What the schemes over calls have in common. Arguments are those of `WeightSyncScheme`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By this a copy of the scheme, made before or after it became a sender, is recognised.
        self._key = secrets.token_hex(8)
        self._copied = False
        self._numbers: Numbers | None = None

    def _engine(self, road: Road) -> CallEngine:
        if self._numbers is None:  # one count for all engines of a scheme, its transports' too
            self._numbers = Numbers()
        return CallEngine(road, self._key, self._numbers, self.strategy_str)

    def _make_reception(self, destination: Destination, **kwargs: Any) -> Reception:
        return CallReception(
            destination,
            key=self._key,
            copied=self._copied,
            model_id=self.model_id or POLICY,
            worker=kwargs["worker_idx"],
            background=kwargs["background"],
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_numbers": None, "_copied": True}
