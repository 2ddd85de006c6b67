"""The older of TorchRL's two APIs, implemented on the newer one (scheme.py).

Older programs use senders, receivers and transports of a scheme; newer programs use the scheme
itself. Each of these objects is a view of the scheme:

    init_on_worker()      init_on_receiver() and connect(); versions are applied in `receive()`
    get_sender()          a `WeightSender` (sender.py): sends as the scheme does, even unconnected
    get_receiver()        a `WeightReceiver` (receiver.py): receives as the scheme does
    create_transport(x)   a `WorkerTransport` (sender.py): sends to the worker behind x

Both APIs have transports; in the older API, a transport's methods also take and return a model id.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol, cast

from .receiver import ReceiverTransport, WeightReceiver
from .scheme import Scheme
from .sender import Sending, WeightSender, WorkerTransport
from .transport import scheme_class


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

    _made_sender: WeightSender | None
    _made_receiver: WeightReceiver | None

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> "WeightSyncScheme":
        """Return a scheme of a `backend` (none, shared, process, rpc, zmq ...), made with `kwargs`.

        Raises:
            ValueError: There is no such backend; the message lists all.
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
            if (side := self._as_receiver) is not None:
                side.connect(self.timeout, fill=False)
        except BaseException:
            self.shutdown()
            raise

    def get_sender(self) -> WeightSender:
        """Return the scheme's one sender; raise RuntimeError before `init_on_sender`."""
        self._check(self.initialized_on_sender, "init_on_sender() before get_sender()")
        self._made_sender = self._made_sender or self.create_sender()
        return self._made_sender

    def get_receiver(self) -> WeightReceiver:
        """Return the scheme's one receiver; raise RuntimeError before `init_on_worker`."""
        self._check(self.initialized_on_receiver, "init_on_worker() before get_receiver()")
        self._made_receiver = self._made_receiver or self.create_receiver()
        return self._made_receiver

    def _check(self, begun: bool, order: str) -> None:
        if not begun:
            raise RuntimeError(f"Must call {order} on {type(self).__name__}")

    def create_sender(self) -> WeightSender:
        """Return a new sender of this scheme."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """Return a new receiver of this scheme."""
        return WeightReceiver(self)

    def own_sending(self) -> Sending:
        """Return the scheme's sending side, and mark the scheme as connected."""
        if (side := self._as_sender) is not None:
            side.connected = True  # unlike `connect`, do not publish first weights
        return self._connected()

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> "TransportBackend":
        """Return the transport of one worker.

        On a receiver, this is the receiver's own transport. On a sender, `pipe_or_context` is the
        end of a pipe to the worker; over RPC `(collector_info, collector_rref, collector_class)`,
        as a tuple or as keywords; over Ray an actor, also as the keyword `remote_actor`. If it is
        None, the keyword `worker_idx` in `kwargs` selects a worker of the initialised sender.
        """
        if self.initialized_on_receiver:
            return ReceiverTransport(self, named=pipe_or_context is not None)
        peer = _peer_in(kwargs) if pipe_or_context is None else pipe_or_context
        if peer is not None or not self.initialized_on_sender:
            return self._transport_of(peer)
        worker, transports = kwargs.get("worker_idx", 0), self.sender_transports
        if worker not in transports:
            raise ValueError(f"Worker {worker} not registered")
        return transports[worker]

    def _transport_of(self, peer: Any) -> "TransportBackend":
        return WorkerTransport(self, self.transport_to(peer))

    # Private names that older programs read.

    @property
    def _sender(self) -> WeightSender | None:
        return self.get_sender() if self.initialized_on_sender else None

    @property
    def _receiver(self) -> WeightReceiver | None:
        return self.get_receiver() if self.initialized_on_receiver else None

    @property
    def _initialized_on_sender(self) -> bool:
        return self.initialized_on_sender

    @property
    def _initialized_on_worker(self) -> bool:
        return self.initialized_on_receiver

    def _start_anew(self, model_id: str | None = None) -> None:
        super()._start_anew(model_id)
        self._made_sender, self._made_receiver = None, None


def _peer_in(kwargs: Mapping[str, Any]) -> Any:
    """Return the worker that keywords of `create_transport` name; None if they name none."""
    if (info := kwargs.get("collector_info")) is not None:
        return info, kwargs.get("collector_rref")
    return kwargs.get("remote_actor")


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
        """Receive and apply weights, and return them; None if no weights came in time.

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


# Base of names from TorchRL that have no counterpart here.
class _NoScheme:
    _instead = ""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError; the message says what to use instead."""
        raise TypeError(f"{cls.__name__} is nothing by itself here: {cls._instead}")


class SharedMemTransport(_NoScheme):
    """A name from TorchRL that raises TypeError: no transport here uses only shared memory."""

    _instead = (
        "workers read a publisher's memory. Write SharedMemWeightSyncScheme(), and after "
        "init_on_sender() take its sender_transports; register_shared_weights(model_id, weights) "
        "says what to send"
    )


class DistributedTransport(_NoScheme):
    """A name from TorchRL that raises TypeError: no transport here needs a store and a rank."""

    _instead = (
        "there is neither store nor process group. Write DistributedWeightSyncScheme(), and after "
        "init_on_sender(num_workers=...) take its sender_transports"
    )


# Pipes that carry the sender's address to workers.


def tell(pipes: Iterable[Any], address: str, keys: Mapping[str, str] | None) -> None:
    """Send each worker the sender's address, the worker's id and the keys, through its pipe."""
    for worker, pipe in enumerate(pipes):
        told = {"weightbus": address, "worker": worker, "keys": keys}
        pipe.send_bytes(json.dumps(told).encode())


def read(pipe: Any, timeout: float) -> dict[str, Any]:
    """Return what `tell` sent through the pipe: address, this worker's id, and keys or None."""
    if not pipe.poll(timeout):
        raise TimeoutError(
            f"no address came down the pipe within {timeout} s; is init_on_sender() called with "
            "the other end of it?"
        )
    told: Any = json.loads(pipe.recv_bytes())
    if not isinstance(told, dict) or not {"weightbus", "worker"} <= told.keys():
        raise ValueError("something else than the sender's address came down the pipe first")
    return cast("dict[str, Any]", told)
