"""The scheme that synchronises nothing, and says so."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...bus.receipt import Receipt
from ..reading import READING_SECONDS
from .destination import Destination
from .engine import Engine, Prepared, Reception, Weights
from .scheme import WeightSyncScheme
from .sender import WeightSender
from .strategy import Format
from .subject import log
from .transport import TransportBackend


class NoTransport:
    """A transport by which nothing goes."""

    def send_weights(self, *weights: Any) -> None:
        """Send nothing."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> None:
        """Receive nothing."""

    def check_connection(self) -> bool:
        """Nothing that could be lost: True."""
        return True


class NoSender(WeightSender):
    """A sender that sends nothing (older vintage)."""

    def __init__(self, scheme: "NoWeightSyncScheme") -> None:
        super().__init__(scheme)
        self._pending = False

    def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send nothing."""
        self.send_async(weights, worker_ids, timeout=timeout)
        self.wait_async()

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send nothing; `wait_async` must follow, as with every sender."""
        if self._pending:
            raise RuntimeError(
                "Cannot call send_async() again while a previous send is pending. "
                "Call wait_async() first."
            )
        self._scheme.send(weights, worker_ids, timeout=timeout)
        self._pending = True

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait for nothing."""
        del timeout
        if not self._pending:
            raise RuntimeError("No async send is pending. Call send_async() first.")
        self._pending = False


class NoEngine:
    """An engine without workers."""

    def workers(self) -> Sequence[int]:
        """Return none."""
        return ()

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        """Send nothing to nobody."""
        del workers, timeout
        done: Future[Receipt] = Future()
        done.set_result(Receipt(weights.model_id, 0, 0, 0, 0.0, "", {}))
        return done

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Do nothing."""

    def versions(self) -> Mapping[int, int]:
        """Return none."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class NoReception:
    """A reception where nothing arrives."""

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        """Do nothing."""

    def receive(self, timeout: float) -> None:
        """Receive nothing, at once."""

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[None]:
        """Return a context that keeps nothing out, since nothing ever comes."""
        del timeout
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""


class NoWeightSyncScheme(WeightSyncScheme):
    """Synchronises nothing: workers keep the weights that they were built with.

    Args:
        strategy: By which names weights would travel.
        **settings: Those of every scheme; they change nothing.
    """

    def __init__(self, strategy: Format = "tensordict", **settings: Any) -> None:
        super().__init__(strategy, **settings)

    def _make_engine(self, **kwargs: Any) -> Engine:
        del kwargs
        return NoEngine()

    def _make_reception(self, destination: Destination, **kwargs: Any) -> Reception:
        del destination, kwargs
        return NoReception()

    def connect(self, *, worker_idx: int | None = None, **nothing: Any) -> None:
        """Connect nothing. It may be called again.

        Raises:
            RuntimeError: The worker's model is on the meta device, so that it has no weights, and
                will never get any from this scheme.
        """
        if "weights" in nothing:
            raise TypeError("connect() of a scheme that sends nothing takes no weights")
        session = self._here()
        if session.destination is not None and session.destination.unfilled():
            raise RuntimeError(
                f"worker {worker_idx if worker_idx is not None else self.worker_idx}: the model "
                f"{self.model_id!r} is on the meta device, without weights, and NoWeightSyncScheme "
                "never sends any. Collectors hand a policy to their workers in that state: give "
                "the collector a policy_factory that builds the policy in each worker, or use "
                "another scheme"
            )
        session.connected = session.side is not None

    def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send nothing."""
        del weights, worker_ids, timeout
        log.debug("%r: NoWeightSyncScheme sends nothing", self.model_id)

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send nothing."""
        self.send(weights, worker_ids, timeout=timeout)

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait for nothing."""

    def receive(self, timeout: float | None = None) -> None:
        """Receive nothing: None, at once."""

    def create_sender(self) -> WeightSender:
        """Return a sender that sends nothing."""
        return NoSender(self)

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return a transport by which nothing goes."""
        del pipe_or_context, kwargs
        return NoTransport()
