"""Defines `NoWeightSyncScheme`, which sends no weights."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from ...bus.receipt import Receipt
from .legacy_api import WeightSyncScheme
from .model import POLICY, log
from .receiver import Destination
from .transport import Prepared, Receiver, Transport, Weights, WorkerIds
from .worker_transports import TransportBackend


class _Nothing(Transport, Receiver):
    """A sender's transport, a receiver and a worker's transport, all of which do nothing."""

    any_worker = True

    def workers(self) -> Sequence[int]:
        return ()

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        del workers, timeout
        done: Future[Receipt] = Future()
        done.set_result(Receipt(weights.model_id, 0, 0, 0, 0.0, "", {}))
        return done

    def send_weights(self, *weights: Any) -> None: ...

    def receive_weights(self, timeout: float | None = None, **_: Any) -> None: ...

    def check_connection(self) -> bool:
        return True  # as there is no connection that could be lost


class NoWeightSyncScheme(WeightSyncScheme):
    """Synchronises nothing: workers keep their initial weights.

    Args:
        strategy: Accepted, without effect.
        **settings: The settings of every scheme, without effect.
    """

    def _make_transport(self, **_: Any) -> Transport:
        return _Nothing()

    def _make_receiver(self, destination: Destination, **_: Any) -> Receiver:
        del destination
        return _Nothing()

    def connect(self, *, worker_idx: int | None = None, **nothing: Any) -> None:
        """Check that a receiver's model has weights. Arguments are those of `Scheme.connect`.

        This may be called more than once.

        Raises:
            RuntimeError: The worker's model is on the meta device, so it has no weights, and this
                scheme never sends any.
        """
        if "weights" in nothing:
            raise TypeError("connect() of a scheme that sends nothing takes no weights")
        receiver = self._role.receiver
        if receiver is not None and receiver.destination.unfilled():
            raise RuntimeError(
                f"worker {worker_idx if worker_idx is not None else self.worker_idx}: the model "
                f"{self.model_id!r} is on the meta device, without weights, and NoWeightSyncScheme "
                "never sends any. Collectors pass policies to their workers without weights: give "
                "the collector a policy_factory that builds the policy in each worker, or use "
                "another scheme"
            )
        if (side := self._role.side) is not None:
            side.connected = True

    def send(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Send nothing. Arguments are those of `Scheme.send`."""
        del worker_ids, timeout
        self.prepared(weights)

    send_async = send

    def wait_async(self, timeout: float | None = None) -> None:
        """Return at once. Arguments are those of `Scheme.wait_async`."""

    def receive(self, timeout: float | None = None) -> None:
        """Return None at once. Arguments are those of `Scheme.receive`."""

    def prepared(self, weights: Any, model_id: str | None = None) -> Prepared:
        """Return empty weights. Arguments are those of `Scheme.prepared`."""
        del weights, model_id
        log.debug("%r: NoWeightSyncScheme sends nothing", self.model_id)
        return Weights(self.model_id or POLICY, {})

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return a transport that sends no weights. Arguments are those of the base class."""
        del pipe_or_context, kwargs
        return _Nothing()
