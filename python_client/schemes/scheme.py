"""The scheme: one model, kept the same on a sender and its workers, whatever carries the weights.

A scheme has one side and takes two steps on it:

    new ── init_on_sender() ───> sender ──── connect() ──> connected: send(), send_async()
     └──── init_on_receiver() ─> receiver ── connect() ──> connected: receive(), reading()

Its side is an object (sender.py, receiver.py), and so is what it is about (model.py). The older
vintage of the API (`init_on_worker`, `get_sender`, `create_transport`, ...) is a view of the same
(vintage.py): its senders and receivers connect when they are made.

To carry weights by another means, derive from `WeightSyncScheme` and override:

    _make_carrier(**kwargs)                the sender's side (carrier.Carrier)
    _make_receiver(destination, **kwargs)  the receiver's side (carrier.Receiver)
    _carrier_to(pipe_or_context)           a carrier to one worker, 0, for `create_transport`
    _waits_for_first                       False: a receiver's connect() must not wait for weights

`kwargs` are those of `init_on_sender` and `init_on_receiver` that the base does not use itself,
with `num_workers` on the sender, and `worker_idx` and `background` on the receiver: take those you
know and ignore the others, since collectors pass more than any needs. Whatever is stored on the
scheme is pickled with it, so it must be plain; sockets belong into what carries.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from .. import checks
from . import carrier
from .carrier import Carrier, Prepared, Receiver, Weights, WorkerIds
from .model import POLICY, is_torchrl, log, model_in, own_weights
from .receiver import Destination, ReceiverSide
from .roles import Roles
from .sender import NothingToSendError, SenderSide, Sending, Sources, is_per_worker
from .strategy import WeightStrategy, check_weights, has_names
from .vintage import (
    Prepare,
    ReceiverTransport,
    TransportBackend,
    WeightReceiver,
    WeightSender,
    WorkerTransport,
)


class WeightSyncScheme(Roles):
    """One model on a sender and its workers.

    Construct a subclass; `from_backend` finds the one for a transport. Arguments are those of
    `Roles`.
    """

    _waits_for_first = True

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> "WeightSyncScheme":
        """Return a scheme, with these `kwargs`, of a `backend`: none, shared, process, rpc, zmq ...

        Raises:
            ValueError: There is no such backend; the text lists all.
        """
        return cast("type[WeightSyncScheme]", carrier.scheme_class(backend))(**kwargs)

    def _make_carrier(self, **kwargs: Any) -> Carrier:
        """Return what carries weights to the workers. Called by `init_on_sender`."""
        raise NotImplementedError

    def _make_receiver(self, destination: Destination, **kwargs: Any) -> Receiver:
        """Return what takes weights in. Called by `init_on_receiver`."""
        raise NotImplementedError

    def _carrier_to(self, pipe_or_context: Any) -> Carrier:
        """Return a carrier to one worker, 0: the one that `pipe_or_context` leads to."""
        raise NotImplementedError

    # The sender.

    def _check_sources(self, model_id: str | None, context: Any, kwargs: Mapping[str, Any]) -> None:
        """Check what `init_on_sender` is given; a scheme may be more particular."""

    def init_on_sender(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Become the sender.

        Args:
            model_id: The model's id; with a context, also the path to the model in it.
            context: An object that has the model, such as a collector.
            **kwargs: Instead of a context: `model` or `weights` (for a send without weights),
                `num_workers` or `devices` or `params_map` (how many workers there are), and what
                the transport needs.

        Raises:
            TypeError: The argument for weights has none.
        """
        self._check_sources(model_id, context, kwargs)
        sources = Sources.taken(kwargs, context)
        given = sources.weights
        for weights in given.values() if is_per_worker(given) else [given]:
            if weights is not None:
                check_weights(weights, model_id or self.model_id or POLICY)
        self._begin(model_id, context, sources.model)
        self._subject.weights = sources.weights
        try:
            made = self._make_carrier(context=context, num_workers=sources.count, **kwargs)
        except BaseException:
            self.shutdown()
            raise
        self._take(SenderSide(Sending(made)))

    def send(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Send weights, and return when the workers have applied them.

        Args:
            weights: An `nn.Module`, a TensorDict, a dict of tensors, the path of a model in the
                context, or `{worker id: weights}`; None: this scheme's model.
            worker_ids: The workers; None: all.
            timeout: Seconds for the whole call; None: the scheme's own.

        What each worker did is in `receipt`, also after an error. Threads that send at the same
        time take turns, each within its own deadline.

        Raises:
            PublishError: Some workers do not have the weights; it names them. The others do.
            RuntimeError: This is no connected sender, or a `send_async` was not waited for.
            ValueError: There is no worker of that id.
            TypeError: The argument has no weights; nothing was sent.
            StateError: The weights cannot travel; nothing was sent.
        """
        with self._nothing_is_fine(weights):
            self.send_over(self._connected(), weights, worker_ids, timeout)

    def send_async(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Start a `send`, and return once the weights may be changed. Arguments are the same."""
        self.start_over(self._connected(), weights, worker_ids, timeout)

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait until what `send_async` sent is applied; errors are those of `send`.

        Raises:
            RuntimeError: Nothing is on its way.
            TimeoutError: It still is after `timeout` seconds; wait again.
        """
        self._connected().wait(timeout)

    @contextmanager
    def _nothing_is_fine(self, weights: Any) -> Generator[None]:
        """Send nothing for a collector that has no policy here, as TorchRL's own schemes do."""
        try:
            yield
        except NothingToSendError as error:
            if weights is not None or not is_torchrl(self.context):
                raise
            log.warning("nothing was sent: %s", error)

    def send_over(
        self, sending: Sending, weights: Any, worker_ids: WorkerIds, timeout: float | None
    ) -> None:
        """Prepare weights, send them, and wait. Arguments are those of `send`."""
        limit = self.timeout if timeout is None else timeout
        model = self.model_id or POLICY
        sending.send(model, lambda: self._prepared(weights), worker_ids, limit)

    def start_over(
        self, sending: Sending, weights: Any, worker_ids: WorkerIds, timeout: float | None
    ) -> None:
        """Prepare weights and start to send them. Arguments are those of `send`."""
        limit = self.timeout if timeout is None else timeout
        with sending.turn(self.model_id or POLICY, limit) as left:
            sending.check_idle("send_async")
            sending.start(self._prepared(weights), worker_ids, left)

    def own_sending(self) -> Sending:
        """Return what this scheme sends; connect it first if necessary."""
        if (side := self._as_sender) is not None:
            side.connected = True  # senders of the older vintage send nothing by themselves
        return self._connected()

    def _connected(self) -> Sending:
        side = self._as_sender
        if side is None:
            raise RuntimeError("Must be initialized on sender before sending weights")
        if not side.connected:
            raise RuntimeError("Must be synchronized on sender before sending weights")
        return side.sending

    def _prepared(self, weights: Any) -> Prepared:
        """Prepare whatever a user gave for all workers, or for each."""
        given = self._subject.weights if weights is None else weights
        if is_per_worker(given):
            return {worker: self._weights_of(own) for worker, own in given.items()}
        return self._weights_of(weights)

    def _weights_of(self, weights: Any, model_id: str | None = None) -> Weights:
        """Prepare whatever a user gave; LookupError: there is nothing to send."""
        name, context = model_id or self.model_id or POLICY, self.context
        if type(self).prepare_weights is WeightSyncScheme.prepare_weights:
            source = self._source(weights, name, context)
        else:  # a user's own
            source = self.prepare_weights(weights, name, self._strategy, context)
        if source is None:
            raise NothingToSendError(
                f"there are no weights of {name!r} to send: give them to send(), or give "
                "init_on_sender() a model or a context that has one"
            )
        return Weights(name, self._strategy.tensors_of(source))

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None
    ) -> Any:
        """Return what a send will carry, for whatever weights a user gave; see `send`.

        It looks up models (`model_id`) in the context; the strategy extracts their weights.

        Returns:
            A TensorDict or a dict of tensors; None if there is nothing to send.

        Raises:
            ValueError: A path was given, but no context.
        """
        source = self._source(weights, model_id, context)
        if source is None or has_names(source):
            return strategy.formed(source)
        return strategy.extract_weights(source)

    def _source(self, weights: Any, model_id: str, context: Any) -> Any:
        """Return what weights are taken out of, which a send does once."""
        if weights is None:
            return self._own_weights(model_id, context)
        if not isinstance(weights, str):
            # A collector's own random policy has none, and is no mistake.
            if weights is not getattr(context, model_id, self._subject.given):
                check_weights(weights, model_id)
            return weights
        if context is None:
            raise ValueError(f"Cannot resolve string reference '{weights}' without context")
        return model_in(context, weights)

    def _own_weights(self, model_id: str, context: Any) -> Any:
        """Return the model that this scheme is about, or the weights that stand for it."""
        return own_weights(self._subject, model_id, context)

    # The receiver.

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Become a receiver. On a sender's copy in a forked process, this starts anew.

        Args:
            model_id: The model's id; with a context, also the path to the model in it.
            context: An object that has the model, such as the worker's collector.
            **kwargs: `model` (instead of a context), `worker_idx` (which worker this is),
                `background` (instead of the scheme's own), and whatever the means of transport
                needs.
        """
        if context is None and self._here() is None:
            context = self.context  # servers set it first
        self._begin(model_id, context, kwargs.pop("model", None))
        self._subject.worker_idx = kwargs.get("worker_idx")
        if kwargs.get("background") is None:
            kwargs["background"] = self.background
        kwargs.setdefault("worker_idx", None)
        destination = Destination(self._subject, self._strategy, strict=self.strict, cast=self.cast)
        try:
            if context is not None and self._is_child_of_sender:
                destination.part_from_sender()
            receiver = self._make_receiver(destination, context=context, **kwargs)
        except BaseException:
            self.shutdown()
            raise
        self._take(ReceiverSide(destination, receiver))

    def receive(self, timeout: float | None = None) -> Any | None:
        """Return the newest weights that were applied since the last call.

        By default versions are applied in the background, and this only waits for one. With
        `background=False` they are applied here, in the thread that calls.

        Args:
            timeout: Seconds to wait for one; 0: take what is there; None: the scheme's own.

        Returns:
            The model's weights; None if nothing new came.

        Raises:
            RuntimeError: This is no connected receiver.
            ApplyError: A version does not fit; the weights are unchanged (background=False). With a
                context this is logged instead, so a polling server goes on.
        """
        side = self._as_receiver
        if side is None:
            raise RuntimeError("Must be initialized on receiver before receiving weights")
        if not side.connected:
            raise RuntimeError("Must be synchronized on receiver before receiving weights")
        return side.receive(self.timeout if timeout is None else checks.seconds(timeout, "timeout"))

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the receiver's model: all of them, or none and an exception.

        Args:
            weights: A TensorDict, a dict of tensors, or a module.
            inplace: Write into the model's own tensors; otherwise give it new ones.

        Raises:
            RuntimeError: This is no receiver.
            ValueError: There is no model.
            DestinationError: The weights do not fit; the text says how.
        """
        side = self._as_receiver
        if side is None:
            if self.initialized_on_sender:
                raise RuntimeError("apply_weights() called on a sender side.")
            raise RuntimeError("apply_weights() called before init_on_receiver has been called.")
        side.apply(weights, inplace, strict=self.strict, timeout=self.timeout)

    # Both.

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, timeout: float | None = None
    ) -> None:
        """Start to work. Neither side waits for the other, except for a model on the meta device.

        On the sender, its weights (`weights`, or the model's) become the first version, for every
        worker that has joined or joins later. A receiver (with this `worker_idx`) whose model is on
        the meta device waits for them, at most `timeout` seconds.

        Raises:
            RuntimeError: It is not initialised, or already connected, or got an argument of the
                other side.
            TimeoutError: No weights came for a model on the meta device.
        """
        limit = self.timeout if timeout is None else timeout
        side = self._here()
        if side is None:
            raise RuntimeError("Neither init_on_sender nor init_on_receiver have been called.")
        if side.connected:
            raise RuntimeError("Cannot synchronize weights on sender twice.")
        if isinstance(side, SenderSide):
            if worker_idx is not None:
                raise RuntimeError(
                    "Cannot specify worker_idx on sender side during synchronization."
                )
            side.connect(self._first_weights(weights), limit)
            return
        if weights is not None:
            raise RuntimeError("Cannot specify weights on receiver side during synchronization.")
        if worker_idx is not None:
            self._subject.worker_idx = worker_idx
        side.connect(limit, fill=self._waits_for_first)

    def _first_weights(self, weights: Any) -> Prepared | None:
        try:
            return self._prepared(weights)
        except NothingToSendError:
            return None  # the first send brings them

    # The older vintage: senders and receivers as objects of their own, and transports. By these
    # names its programs look at what is made and what is not.

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

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Become a receiver and connect; versions are applied where `receive()` is called.

        Arguments are those of `init_on_receiver`; `pipe` is the worker's end of the sender's pipe.
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
        """Return the sender; the same one each time.

        Raises:
            RuntimeError: `init_on_sender` was not called.
        """
        if not self.initialized_on_sender:
            raise RuntimeError(
                f"Must call init_on_sender() before get_sender() on {type(self).__name__}"
            )
        if self._made_sender is None:
            self._made_sender = self.create_sender()
        return self._made_sender

    def get_receiver(self) -> WeightReceiver:
        """Return the receiver; the same one each time.

        Raises:
            RuntimeError: `init_on_worker` was not called.
        """
        if not self.initialized_on_receiver:
            raise RuntimeError(
                f"Must call init_on_worker() before get_receiver() on {type(self).__name__}"
            )
        if self._made_receiver is None:
            self._made_receiver = self.create_receiver()
        return self._made_receiver

    def create_sender(self) -> WeightSender:
        """Return a new sender of this scheme."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """Return a new receiver of this scheme."""
        return WeightReceiver(self)

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return the transport of one worker: the one at the end of `pipe_or_context`.

        This is a pipe; over RPC `(collector_info, collector_rref, collector_class)`, a tuple or
        `kwargs`; over Ray an actor, also as `remote_actor`. Without it, `worker_idx` names a worker
        of the initialised sender; on a receiver, it returns the receiver's own transport.
        """
        if self.initialized_on_receiver:
            return ReceiverTransport(self, named=pipe_or_context is not None)
        peer = self._peer_in(pipe_or_context, kwargs)
        if peer is None and self.initialized_on_sender:
            return self._transport_to(kwargs.get("worker_idx", 0))
        return self._transport_of(peer)

    def _peer_in(self, pipe_or_context: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what leads to a worker, of what `create_transport` is given."""
        del kwargs
        return pipe_or_context

    def _transport_of(self, peer: Any) -> TransportBackend:
        return WorkerTransport(*self.way_to(peer))

    def way_to(self, peer: Any) -> tuple[Carrier, int, Prepare, float]:
        """Return the parts of a transport to one worker, `peer`."""
        return self._carrier_to(peer), 0, self._weights_of, self.timeout

    def _transport_to(self, worker: int) -> WorkerTransport:
        side = self._as_sender
        if side is None or worker not in side.sending.carrier.workers():
            raise ValueError(f"Worker {worker} not registered")
        return WorkerTransport(side.sending.carrier, worker, self._weights_of, self.timeout)

    @property
    def sender_transports(self) -> Mapping[int, TransportBackend]:
        """The transport of each worker, on the sender; empty before it is initialised."""
        side = self._as_sender
        ids = () if side is None else side.sending.carrier.workers()
        return {worker: self._transport_to(worker) for worker in ids}

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """The transport that weights come by, on a receiver; None elsewhere."""
        return ReceiverTransport(self) if self.initialized_on_receiver else None
