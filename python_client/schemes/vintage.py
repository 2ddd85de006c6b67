"""The older vintage of the API: senders, receivers and transports as objects of their own.

All of them are views: a `WeightSender` sends what its scheme sends, a `WeightReceiver` is its
scheme's receiving side, and a transport is one worker of a carrier. They hold nothing of their own.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from ...bus.receipt import Receipt
from .carrier import Carrier, Prepared, Weights, WorkerIds, merged
from .sender import Sending

if TYPE_CHECKING:
    from .scheme import WeightSyncScheme

Prepare = Callable[[Any, str | None], Weights]


class WeightSender:
    """Sends weights of one model to workers. `scheme.get_sender()` or `create_sender()` makes one.

    It sends to the workers of its `scheme`. If the scheme is not initialised, it sends to the
    workers whose transports were registered with it.
    """

    def __init__(self, scheme: "WeightSyncScheme") -> None:
        self._scheme = scheme
        self._transports: dict[int, WorkerTransport] = {}
        self._registered = Sending(_TransportsCarrier(self._transports))

    @property
    def receipt(self) -> Receipt | None:
        """What every worker did with the last send; None before the first."""
        return self._sending().receipt

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Add worker `worker_idx`, by the `pipe_or_context` that `create_transport` takes."""
        transport = self._scheme.create_transport(pipe_or_context)
        self._transports[worker_idx] = cast("WorkerTransport", transport)

    def send(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Send weights and wait until the workers have applied them.

        Arguments are those of `WeightSyncScheme.send`.

        Raises:
            RuntimeError: A `send_async` was not waited for.
        """
        self._scheme.send_over(self._sending(), weights, worker_ids, timeout)

    def send_async(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Send weights and return as soon as you may change them. `wait_async` must follow.

        Arguments are those of `WeightSyncScheme.send`.

        Raises:
            RuntimeError: A `send_async` was not waited for.
        """
        self._scheme.start_over(self._sending(), weights, worker_ids, timeout)

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

    def _sending(self) -> Sending:
        return self._registered if self._transports else self._scheme.own_sending()


class WeightReceiver:
    """Receives the weights of a `scheme`. Its `get_receiver()` or `create_receiver()` makes one."""

    def __init__(self, scheme: "WeightSyncScheme") -> None:
        self._scheme = scheme

    def receive(self, timeout: float = 0.001) -> bool:
        """Apply the newest weights that come within `timeout` seconds; return whether any came.

        Raises:
            ApplyError: They do not fit; the model is unchanged, and the sender is informed.
        """
        scheme = self._scheme
        return scheme.initialized_on_receiver and scheme.receive(timeout) is not None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights that came by another transport.

        Args:
            weights: A TensorDict, a dict of tensors, or a module.
            inplace: Write into the model's own tensors; otherwise give it new ones.

        Raises:
            ValueError: There is no model.
            DestinationError: They do not fit; the model is unchanged.
        """
        if not self._scheme.initialized_on_receiver:
            raise ValueError("No model registered")
        self._scheme.apply_weights(weights, inplace)


# Transports.


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
        """Receive and apply weights; None if none came in time.

        Args:
            timeout: Seconds; None: the transport's own timeout.
            weights, model, strategy: Arguments of TorchRL's transports; not needed here.
        """


class WorkerTransport:
    """The way to one worker of a carrier; `prepare` makes `Weights` of what a user gives."""

    def __init__(self, carrier: Carrier, worker: int, prepare: Prepare, timeout: float) -> None:
        self.worker = worker
        self._prepare, self._timeout = prepare, timeout
        self._sending = Sending(carrier)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to worker {self.worker}>"

    @property
    def receipt(self) -> Receipt | None:
        """What became of the last send."""
        return self._sending.receipt

    def send_weights(self, *weights: Any) -> None:
        """Send `(weights)` or `(model_id, weights)`; PublishError says why they are not applied."""
        model = weights[0] if len(weights) > 1 else "weights"
        prepare = partial(self._prepared, *weights)
        self._sending.send(str(model), prepare, [self.worker], self._timeout)

    def send_weights_async(self, *weights: Any) -> None:
        """Send, and return as soon as the trainer may change its weights."""
        self._sending.start(self._prepared(*weights), [self.worker], self._timeout)

    def _prepared(self, *weights: Any) -> Weights:
        *model_id, given = weights
        return self._prepare(given, model_id[0] if model_id else None)

    def wait_ack(self, timeout: float | None = None) -> None:
        """Wait until what was sent last is applied.

        Raises:
            RuntimeError: Nothing was sent.
            PublishError: It was not applied; it says why.
        """
        if not self._sending.pending:
            raise RuntimeError("No pending future. Did you call send_weights_async?")
        self._sending.finish(timeout)

    def post(self, weights: Weights, timeout: float) -> "Future[Receipt]":
        """Send what is prepared; for a carrier over transports."""
        return self._sending.carrier.send(weights, [self.worker], timeout=timeout)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """Nothing arrives at a sender: None."""
        del timeout
        return None

    def check_connection(self) -> bool:
        """Tell whether the worker exists."""
        return self.worker in self._sending.carrier.workers()

    def setup_connection_and_weights_on_sender(self) -> None:
        """Nothing is left to do: `connect()` of the scheme has done it."""

    def versions(self) -> Mapping[int, int]:
        """Return the version that the worker is known to run, under its id."""
        known = self._sending.carrier.versions()
        return {self.worker: known[self.worker]} if self.worker in known else {}


class InitialSyncTransport(Protocol):
    """A transport that connects and brings the first weights by itself; here the scheme does."""

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect, and send the first weights."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Connect, and return the first weights.

        Args:
            worker_idx: Which worker this is.
            weights, model, strategy: As of `TransportBackend.receive_weights`.
        """


class SharedMemTransport:
    """A name from TorchRL; no transport here uses only shared memory."""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Say what to write instead."""
        raise TypeError(
            "SharedMemTransport is nothing by itself here: workers read a publisher's memory. "
            "Write SharedMemWeightSyncScheme(), and after init_on_sender() take its "
            "sender_transports; register_shared_weights(model_id, weights) says what to send"
        )


class DistributedTransport:
    """A name from TorchRL; no transport here needs a store and a rank."""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Say what to write instead."""
        raise TypeError(
            "DistributedTransport is nothing by itself here: there is neither store nor process "
            "group. Write DistributedWeightSyncScheme(), and after init_on_sender(num_workers=...) "
            "take its sender_transports"
        )


class ReceiverTransport:
    """The way from the sender; if `named`, what is received is `(model_id, weights)`, as before."""

    def __init__(self, scheme: "WeightSyncScheme", *, named: bool = False) -> None:
        self._scheme, self._named = scheme, named

    def send_weights(self, *weights: Any) -> None:
        """Nothing can be sent from a receiver: RuntimeError."""
        del weights
        raise RuntimeError("send_weights() called on a receiver side.")

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """Return what was applied since the last call; None if nothing came in time."""
        received = self._scheme.receive(timeout)
        if not self._named or received is None:
            return received
        return self._scheme.model_id, received

    def send_ack(self, message: str = "updated") -> None:
        """Nothing is left to do: a version is acknowledged when it is applied."""
        del message

    def check_connection(self) -> bool:
        """Tell whether the receiver is there."""
        return True


class _TransportsCarrier:
    """A carrier over transports that were made one by one (`scheme.create_transport`)."""

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
        left = iter(reversed(range(len(futures))))

        def one_is_done(_done: "Future[Receipt]") -> None:
            if next(left) == 0:
                try:
                    own = zip(futures, chosen, strict=True)
                    whole.set_result(merged([self._renamed(f.result(), w) for f, w in own]))
                except Exception as error:
                    whole.set_exception(error)

        for future in futures:
            future.add_done_callback(one_is_done)
        return whole

    def _renamed(self, receipt: Receipt, worker: int) -> Receipt:
        """Return a transport's receipt, with its worker under the id that it has here."""
        row = receipt.workers[str(self._transports[worker].worker)]
        return replace(receipt, workers={str(worker): replace(row, name=str(worker))})

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Nothing is left to do: transports are connected when they are made."""

    def versions(self) -> Mapping[int, int]:
        known = {worker: each.versions().values() for worker, each in self._transports.items()}
        return {worker: version for worker, versions in known.items() for version in versions}

    def close(self) -> None:
        """Transports belong to whoever made them."""


# Pipes, by which workers learn where the sender is.


class Pipe(Protocol):
    """A worker's pipe, as `multiprocessing.Pipe()` makes them."""

    def send_bytes(self, buf: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def poll(self, timeout: float, /) -> bool: ...


def tell(pipes: Iterable[Pipe], address: str, keys: Mapping[str, str] | None) -> None:
    """Write where the sender is, which worker is meant, and its keys into each pipe."""
    for worker, pipe in enumerate(pipes):
        told = {"weightbus": address, "worker": worker, "keys": keys}
        pipe.send_bytes(json.dumps(told).encode())


def read(pipe: Pipe, timeout: float) -> dict[str, Any]:
    """Read where the sender is, which worker this is, and its keys, if it has any."""
    if not pipe.poll(timeout):
        raise TimeoutError(
            f"no address came down the pipe within {timeout} s; is init_on_sender() called with "
            "the other end of it?"
        )
    told: Any = json.loads(pipe.recv_bytes())
    if not isinstance(told, dict) or not {"weightbus", "worker"} <= told.keys():
        raise ValueError("something else than the sender's address came down the pipe first")
    return cast("dict[str, Any]", told)
