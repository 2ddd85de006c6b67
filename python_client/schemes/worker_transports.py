"""Provides transports to single workers, as in TorchRL's API.

A `WorkerTransport` sends the weights of a scheme to one worker. A `ReceiverTransport` receives them
on that worker.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from ...bus.receipt import Receipt
from .sender import Preparer, Sending
from .transport import Transport, Weights


class TransportBackend(Protocol):
    """The transport of one worker's weights."""

    def send_weights(self, *weights: Any) -> None:
        """Send weights, given as `(weights)` or, in the older API, `(model_id, weights)`."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> Any | None:
        """Receive and apply weights, and return them; None if no weights arrived in time.

        Args:
            timeout: Seconds; None: the transport's own timeout.
            weights, model, strategy: Arguments of TorchRL's transports; not needed here.
        """


class InitialSyncTransport(Protocol):
    """A transport of TorchRL that connects and sends the first weights itself.

    Here, a scheme's `connect` does both.
    """

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect, and send the first weights."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Connect, and return the first weights.

        Args:
            worker_idx: The id of this worker.
            weights, model, strategy: As in `TransportBackend.receive_weights`.
        """


class WorkerTransport:
    """Sends weights, which a scheme prepares, to one worker of a transport."""

    def __init__(self, scheme: Preparer, transport: Transport, worker: int = 0) -> None:
        self.worker = worker
        self._scheme, self._sending = scheme, Sending(transport)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to worker {self.worker}>"

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last send; None before the first send."""
        return self._sending.receipt

    def send_weights(self, *weights: Any) -> None:
        """Send `(weights)` or `(model_id, weights)`; raise PublishError unless they are applied."""
        *model_id, given = weights
        self._sending.send(self._scheme, given, self.worker, None, *model_id)

    def send_weights_async(self, *weights: Any) -> None:
        """Start to send `weights`; return as soon as the trainer may change them.

        If an earlier send is pending, wait for it first.

        Raises:
            PublishError: The weights of the earlier send were not applied; nothing was sent.
        """
        *model_id, given = weights
        self._sending.send_async(self._scheme, given, self.worker, None, *model_id, after=True)

    def wait_ack(self, timeout: float | None = None) -> None:
        """Wait until the weights of the last send are applied.

        Raises:
            RuntimeError: No send is pending.
            PublishError: The weights were not applied; the message says why.
        """
        if not self._sending.pending:
            raise RuntimeError("No pending future. Did you call send_weights_async?")
        self._sending.finish(timeout)

    def post(self, weights: Weights, timeout: float) -> "Future[Receipt]":
        """Send prepared weights. Called by the sender with which this transport is registered."""
        return self._sending.transport.send(weights, [self.worker], timeout=timeout)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """Return None: a sender receives no weights."""
        del timeout
        return None

    def check_connection(self) -> bool:
        """Return whether the worker exists."""
        return self.worker in self._sending.transport.workers()

    def setup_connection_and_weights_on_sender(self) -> None:
        """Do nothing: the scheme's `connect()` connects and sends the first weights."""


class ReceiverTransport:
    """Receives weights by calling a receiver's `receive` with a timeout."""

    def __init__(self, receive: Callable[[float | None], Any | None]) -> None:
        self._receive = receive

    def send_weights(self, *weights: Any) -> None:
        """Raise RuntimeError: a receiver does not send."""
        del weights
        raise RuntimeError("send_weights() called on a receiver side.")

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """Return the newest weights applied since the last call; None after `timeout` seconds."""
        return self._receive(timeout)

    def send_ack(self, message: str = "updated") -> None:
        """Do nothing: the receiver acknowledges a version when it applies it."""
        del message

    def check_connection(self) -> bool:
        """Return True: the receiver exists."""
        return True
