"""Implements the older of TorchRL's two APIs with the newer one (scheme.py).

Older programs use senders, receivers and transports of a scheme; newer programs use the scheme
itself. Each of these objects is a view of the scheme:

    init_on_worker()      init_on_receiver() and connect(); versions are applied in `receive()`
    get_sender()          a `WeightSender`: sends as the scheme does, also before `connect()`
    get_receiver()        a `WeightReceiver`: receives as the scheme does
    create_transport(x)   a `WorkerTransport` (worker_transports.py): sends to the worker at x

Both APIs have transports; in the older API, a transport's methods also take and return a model id.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn, cast

from ...bus.receipt import Receipt
from .scheme import Scheme
from .sender import Sending
from .transport import Transport, Weights, WorkerIds, merged, scheme_class
from .worker_transports import ReceiverTransport, TransportBackend, WorkerTransport


class WeightSyncScheme(Scheme):
    """One model on a sender and its workers.

    Construct a subclass. `from_backend` constructs the subclass for a transport, given its name.

    Args:
        strategy: The naming of the weights: "tensordict" or "state_dict".
        timeout: Default seconds that a call waits.
        strict: Whether both sides must have the same names.
        cast: Whether values may be converted to the receiving model's dtypes.
        background: Whether receivers apply versions in the background; otherwise in `receive()`.

    Raises:
        ValueError: There is no such strategy, or the timeout is not above zero.
    """

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> "WeightSyncScheme":
        """Return a scheme of a `backend` (none, shared, process, rpc, zmq ...), made with `kwargs`.

        Raises:
            ValueError: There is no such backend; the text lists all backends.
        """
        return cast("type[WeightSyncScheme]", scheme_class(backend))(**kwargs)

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Become a receiver and connect; by default, versions are applied in `receive()`.

        Arguments are those of `init_on_receiver`. `pipe` is the worker's end of the sender's pipe.
        """
        if kwargs.get("pipe") is None:
            kwargs["pipe"] = getattr(context, "pipe", None)
        kwargs.setdefault("background", False)
        self.init_on_receiver(model_id=model_id, context=context, **kwargs)
        try:
            if (side := self._role.receiver) is not None:
                side.connect(self.timeout, fill=False)
        except BaseException:
            self.shutdown()
            raise

    def get_sender(self) -> "WeightSender":
        """Return the scheme's only sender; raise RuntimeError before `init_on_sender`."""
        self._check(self.initialized_on_sender, "init_on_sender() before get_sender()")
        views = self._role.views
        if "sender" not in views:
            views["sender"] = self.create_sender()
        return cast("WeightSender", views["sender"])

    def get_receiver(self) -> "WeightReceiver":
        """Return the scheme's only receiver; raise RuntimeError before `init_on_worker`."""
        self._check(self.initialized_on_receiver, "init_on_worker() before get_receiver()")
        views = self._role.views
        if "receiver" not in views:
            views["receiver"] = self.create_receiver()
        return cast("WeightReceiver", views["receiver"])

    def _check(self, initialized: bool, order: str) -> None:
        if not initialized:
            raise RuntimeError(f"Must call {order} on {type(self).__name__}")

    def create_sender(self) -> "WeightSender":
        """Return a new sender of this scheme."""
        return WeightSender(self)

    def create_receiver(self) -> "WeightReceiver":
        """Return a new receiver of this scheme."""
        return WeightReceiver(self)

    def own_sending(self) -> Sending:
        """Return the scheme's sending side, and mark the scheme as connected."""
        if (side := self._role.sender) is not None:
            side.connected = True  # unlike `connect`, do not publish first weights
        return self._role.connected_sender()

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return the transport of one worker.

        On a receiver, this is the receiver's own transport. On a sender, `pipe_or_context` is the
        end of a pipe to the worker; over RPC `(collector_info, collector_rref, collector_class)`,
        as a tuple or as keywords; over Ray an actor, also as the keyword `remote_actor`. If it is
        None, the keyword `worker_idx` in `kwargs` selects a worker of the initialised sender.
        """
        if self.initialized_on_receiver:
            named = pipe_or_context is not None
            return ReceiverTransport(self._receive_named if named else self.receive)
        peer = _peer_in(kwargs) if pipe_or_context is None else pipe_or_context
        if peer is not None or not self.initialized_on_sender:
            return self._transport_of(peer)
        worker, transports = kwargs.get("worker_idx", 0), self.sender_transports
        if worker not in transports:
            raise ValueError(f"Worker {worker} not registered")
        return transports[worker]

    def transport_to(self, pipe_or_context: Any) -> Transport:
        """Return a transport to the single worker at `pipe_or_context`, whose worker id is 0."""
        raise NotImplementedError

    def _transport_of(self, peer: Any) -> TransportBackend:
        return WorkerTransport(self, self.transport_to(peer))

    def _receive_named(self, timeout: float | None) -> Any | None:
        received = self.receive(timeout)
        return None if received is None else (self.model_id, received)

    # Private names that older programs read.

    @property
    def _sender(self) -> "WeightSender | None":
        return self.get_sender() if self.initialized_on_sender else None

    @property
    def _receiver(self) -> "WeightReceiver | None":
        return self.get_receiver() if self.initialized_on_receiver else None

    @property
    def _initialized_on_sender(self) -> bool:
        return self.initialized_on_sender

    @property
    def _initialized_on_worker(self) -> bool:
        return self.initialized_on_receiver


def _peer_in(kwargs: Mapping[str, Any]) -> Any:
    """Return the worker that keywords of `create_transport` name; None if they name none."""
    if (info := kwargs.get("collector_info")) is not None:
        return info, kwargs.get("collector_rref")
    return kwargs.get("remote_actor")


class WeightSender:
    """Sends weights of one model to workers. Made by `scheme.get_sender()` or `create_sender()`.

    It sends to the workers that were registered with it; without any, to all workers of its scheme.
    """

    def __init__(self, scheme: "WeightSyncScheme") -> None:
        self._scheme = scheme
        self._transports: dict[int, WorkerTransport] = {}
        self._registered = Sending(_Registered(self._transports))

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last send, with every worker's result; None before the first send."""
        return self._sending().receipt

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Add worker `worker_idx`; `pipe_or_context` is the argument of `create_transport`."""
        transport = self._scheme.create_transport(pipe_or_context)
        self._transports[worker_idx] = cast("WorkerTransport", transport)

    def send(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Send weights and wait until the workers have applied them.

        Arguments are those of `WeightSyncScheme.send`.

        Raises:
            RuntimeError: A `send_async` is still pending.
        """
        self._sending().send(self._scheme, weights, worker_ids, timeout)

    def send_async(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Start a `send`, and return once the caller may change the weights.

        Arguments are those of `send`. Call `wait_async` before the next send.
        """
        self._sending().send_async(self._scheme, weights, worker_ids, timeout)

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait until the workers have applied the weights of `send_async`.

        Raises:
            RuntimeError: No send is pending.
            PublishError: Some workers do not have the weights; the error names them.
            TimeoutError: The send is still pending after `timeout` seconds. Call this again.
        """
        self._sending().wait(timeout)

    def update_weights(self, weights: Any = None) -> None:
        """Send weights to all workers. (This is TorchRL's oldest name of `send`.)"""
        self.send(weights)

    def _sending(self) -> Sending:
        return self._registered if self._transports else self._scheme.own_sending()


class _Registered(Transport):
    """Sends over several transports, which `scheme.create_transport` made."""

    def __init__(self, transports: Mapping[int, WorkerTransport]) -> None:
        self._transports = transports

    def workers(self) -> Sequence[int]:
        return sorted(self._transports)

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        chosen = self.workers() if workers is None else workers
        futures = [self._transports[worker].post(weights, timeout) for worker in chosen]
        whole: Future[Receipt] = Future()
        remaining = iter(reversed(range(len(futures))))

        def one_is_done(_done: "Future[Receipt]") -> None:
            if next(remaining) == 0:
                try:
                    own = zip(futures, chosen, strict=True)
                    whole.set_result(merged([self._renamed(f.result(), w) for f, w in own]))
                except Exception as error:
                    whole.set_exception(error)

        for future in futures:
            future.add_done_callback(one_is_done)
        return whole

    def _renamed(self, receipt: Receipt, worker: int) -> Receipt:
        """Return a transport's receipt in which its only worker has the registered id `worker`."""
        row = receipt.workers[str(self._transports[worker].worker)]
        return replace(receipt, workers={str(worker): replace(row, name=str(worker))})


class WeightReceiver:
    """Receives the weights of a `scheme`. Made by its `get_receiver()` or `create_receiver()`."""

    def __init__(self, scheme: "WeightSyncScheme") -> None:
        self._scheme = scheme

    def receive(self, timeout: float = 0.001) -> bool:
        """Apply the newest weights that arrive within `timeout` seconds; return whether any did.

        Raises:
            ApplyError: The weights do not fit. The model is unchanged, and the sender gets the
                error.
        """
        scheme = self._scheme
        return scheme.initialized_on_receiver and scheme.receive(timeout) is not None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights from another transport.

        Arguments (`weights`, `inplace`) and errors are those of `WeightSyncScheme.apply_weights`.
        """
        if not self._scheme.initialized_on_receiver:
            raise ValueError("No model registered")
        self._scheme.apply_weights(weights, inplace)


# Base of names from TorchRL that have no counterpart here.
class _NoScheme:
    _instead = ""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError; the text says what to use instead."""
        raise TypeError(f"{cls.__name__} cannot be constructed here: {cls._instead}")


class SharedMemTransport(_NoScheme):
    """A name from TorchRL that raises TypeError: no transport here uses only shared memory."""

    _instead = (
        "workers read a publisher's memory. Make a SharedMemWeightSyncScheme(), and after "
        "init_on_sender() use its sender_transports; register_shared_weights(model_id, weights) "
        "sets what to send"
    )


class DistributedTransport(_NoScheme):
    """A name from TorchRL that raises TypeError: no transport here needs a store and a rank."""

    _instead = (
        "there is no store and no process group. Make a DistributedWeightSyncScheme(), and after "
        "init_on_sender(num_workers=...) use its sender_transports"
    )
