"""The sender of one model, in the older vintage of the API: a view of its scheme."""

from typing import TYPE_CHECKING, Any, cast

from ...bus.receipt import Receipt
from .sending import SendCall, Sending
from .transport import TransportsEngine, WorkerTransport

if TYPE_CHECKING:
    from .older import Older


class WeightSender:
    """Sends weights for one model to workers. Made by `scheme.get_sender()` or `create_sender()`.

    It sends to the workers of its scheme; one of a scheme that is not initialised, to the workers
    whose transports were registered with it.
    """

    def __init__(self, scheme: "Older") -> None:
        self._scheme = scheme
        self._transports: dict[int, WorkerTransport] = {}
        self._registered = Sending(TransportsEngine(self._transports))

    @property
    def receipt(self) -> Receipt | None:
        """What every worker did with the last send; None before the first."""
        return self._sending().receipt

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Add a worker, given by what `scheme.create_transport` takes."""
        transport = self._scheme.create_transport(pipe_or_context)
        self._transports[worker_idx] = cast("WorkerTransport", transport)

    def send(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send weights and wait until the workers have applied them; see `WeightSyncScheme.send`.

        Raises:
            RuntimeError: A `send_async` was not waited for.
        """
        self._start("send", weights, worker_ids, timeout).finish()

    def send_async(
        self,
        weights: Any = None,
        worker_ids: int | list[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send weights and return as soon as they may be changed here. `wait_async` must follow.

        Raises:
            RuntimeError: A `send_async` was not waited for.
        """
        self._start("send_async", weights, worker_ids, timeout)

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait until the workers have applied what `send_async` sent.

        Raises:
            RuntimeError: Nothing is on its way.
            PublishError: Some workers do not have the weights; it names them.
            TimeoutError: It is still on its way after `timeout` seconds; wait again.
        """
        self._sending().wait(timeout)

    def update_weights(self, weights: Any = None) -> None:
        """Send weights to all workers (the oldest name of `send`)."""
        self.send(weights)

    def _start(
        self, call: SendCall, weights: Any, worker_ids: Any, timeout: float | None
    ) -> Sending:
        sending = self._sending()
        self._scheme.start_sending(call, sending, weights, worker_ids, timeout)
        return sending

    def _sending(self) -> Sending:
        return self._registered if self._transports else self._scheme.own_sending()
