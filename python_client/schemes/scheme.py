"""The base class of all schemes. A scheme sends one model's weights from a sender to its workers.

A scheme becomes a sender or a receiver, and then connects:

    new ── init_on_sender() ───> sender ──── connect() ──> connected: send(), send_async()
     └──── init_on_receiver() ─> receiver ── connect() ──> connected: receive(), reading()

A scheme delegates to its role (role.py), which has this process's side (sender.py or receiver.py)
and the model with its context (model.py). This module implements the newer of TorchRL's two APIs;
legacy_api.py implements the older API with it.

To send weights over another transport, derive from `WeightSyncScheme` and override:

    _make_transport(**kwargs)              the sender's side (transport.Transport)
    _make_receiver(destination, **kwargs)  the receiver's side (transport.Receiver)
    transport_to(pipe_or_context)          a transport to one worker (id 0), for `create_transport`
    _waits_for_first                       False if a receiver's connect() must not wait for weights

`kwargs` are the keywords of `init_on_sender` and `init_on_receiver` that the base does not use,
plus `num_workers` on the sender, and `worker_idx` and `background` on the receiver. Ignore unknown
keywords: collectors pass more keywords than any scheme needs.

`_role` holds everything that belongs to one process. Pickling a scheme copies only its
configuration. So in a worker that gets a scheme by pickling or by forking, the scheme is
uninitialised and can become a receiver. Subclasses therefore store only plain values in a scheme,
and keep sockets in the transport or the receiver.
"""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ...bus.receipt import Receipt
from .. import checks
from .model import POLICY, is_torchrl, log, model_in
from .receiver import Destination, ReceiverSide
from .role import Role
from .sender import NothingToSendError, Sending, Sources, is_per_worker
from .strategy import Format, WeightStrategy, check_weights, has_names, strategy_named
from .transport import TIMEOUT, Prepared, Receiver, Transport, Weights, WorkerIds
from .worker_transports import ReceiverTransport, TransportBackend, WorkerTransport


class Scheme:
    """A scheme with the newer API. Its arguments are those of `WeightSyncScheme`."""

    sync = True  # whether `send` waits until the workers have applied the weights
    _waits_for_first = True

    def __init__(
        self,
        strategy: Format = "tensordict",
        *,
        timeout: float = TIMEOUT,
        strict: bool = True,
        cast: bool = True,
        background: bool = True,
    ) -> None:
        timeout = checks.seconds(timeout, "timeout", positive=True)
        self.strategy_str: Format = strategy
        self._strategy = strategy_named(strategy)
        self.timeout, self.strict, self.cast, self.background = timeout, strict, cast, background
        self._pickled_in: int | None = None
        self._role = Role()
        _accept(type(self))

    def __repr__(self) -> str:
        side, now = self._role.side, "not initialised"
        if side is not None:
            now = "sender" if isinstance(side, Sending) else "receiver"
            now += ", connected" if side.connected else ""
        return f"<{type(self).__name__} of {self.model_id!r}: {now}>"

    def _make_transport(self, **kwargs: Any) -> Transport:
        """Return the transport that sends weights to the workers. Called by `init_on_sender`."""
        raise NotImplementedError

    def _make_receiver(self, destination: Destination, **kwargs: Any) -> Receiver:
        """Return the receiver that writes to `destination`. Called by `init_on_receiver`."""
        raise NotImplementedError

    # The sender.

    def init_on_sender(
        self, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        """Become the sender.

        Args:
            model_id: The model's id. If there is a context, also the path of the model in it.
            context: An object that has the model, such as a collector.
            **kwargs: Instead of a context: `model` or `weights`, which `send()` sends if it is
                called without weights; and `num_workers`, `devices` or `params_map`, which give the
                number of workers. Also the arguments of the transport.

        Raises:
            TypeError: `weights` contains no weights.
        """
        sources = Sources.taken(kwargs, context)
        given = sources.weights
        for weights in given.values() if is_per_worker(given) else [given]:
            if weights is not None:
                check_weights(weights, model_id or self.model_id or POLICY)
        self._begin(model_id, context, sources.model)
        self._role.reference.weights = sources.weights
        try:
            made = self._make_transport(context=context, num_workers=sources.count, **kwargs)
        except BaseException:
            self.shutdown()
            raise
        self._role.take(Sending(made))

    def send(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Send weights, and return when the workers have applied them.

        Args:
            weights: An `nn.Module`, a TensorDict, a dict of tensors, the path of a model in the
                context, or `{worker id: weights}`; None: this scheme's model.
            worker_ids: The workers; None: all.
            timeout: Seconds for the whole call; None: the scheme's timeout.

        Afterwards `receipt` has the result of each worker, even if this raises. While another
        thread sends, this call waits, within its timeout.

        Raises:
            PublishError: Some workers do not have the weights; the error names these workers.
            RuntimeError: This scheme is not a connected sender, or a `send_async` is still pending.
            ValueError: No worker has that id.
            TypeError: The argument contains no weights; nothing was sent.
            StateError: The weights cannot be sent; nothing was sent.
        """
        sending = self._role.connected_sender()
        try:
            if self.sync:
                sending.send(self, weights, worker_ids, timeout)
            else:
                sending.send_async(self, weights, worker_ids, timeout, after=True)
        except NothingToSendError as error:
            # As in TorchRL's schemes, a collector without a policy in this process is not an error.
            if weights is not None or not is_torchrl(self.context):
                raise
            log.warning("no weights were sent: %s", error)

    def send_async(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, timeout: float | None = None
    ) -> None:
        """Start to send weights; return as soon as the caller may change them.

        Arguments are those of `send`.
        """
        self._role.connected_sender().send_async(self, weights, worker_ids, timeout)

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait until workers have applied the weights of `send_async`; raise the errors of `send`.

        Raises:
            RuntimeError: No send is pending.
            TimeoutError: The send is still pending after `timeout` seconds. Call this again.
        """
        self._role.connected_sender().wait(timeout)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last send, with every worker's result; None before the first send."""
        side = self._role.sender
        return None if side is None else side.receipt

    def versions(self) -> Mapping[int, int]:
        """Return the number of the version that each worker runs, by worker id."""
        side = self._role.sender
        return {} if side is None else dict(side.transport.versions())

    @property
    def sender_transports(self) -> Mapping[int, TransportBackend]:
        """The sender's transport to each worker, by worker id; empty unless this is a sender."""
        if (side := self._role.sender) is None:
            return {}
        made = self._role.transports  # returned again at each call, since a send may be pending
        workers = [*side.transport.workers()]
        for worker in workers:
            if worker not in made:
                made[worker] = WorkerTransport(self, side.transport, worker)
        return {worker: made[worker] for worker in workers}

    # Preparing weights.

    def prepared(self, weights: Any, model_id: str | None = None) -> Prepared:
        """Return the weights to send: for all workers, or by worker id.

        Every send calls this method.

        Args:
            weights: As in `send`.
            model_id: The id of the model that has the weights; None: the scheme's model.

        Raises:
            NothingToSendError: No weights were given, and the scheme has none.
        """
        given = self._role.reference.weights if weights is None else weights
        if is_per_worker(given):
            return {worker: self._weights_of(own, model_id) for worker, own in given.items()}
        return self._weights_of(weights, model_id)

    def _weights_of(self, weights: Any, model_id: str | None) -> Weights:
        name, context = model_id or self.model_id or POLICY, self.context
        if type(self).prepare_weights is Scheme.prepare_weights:
            source = self._source(weights, name, context)
        else:  # a subclass, which a user wrote, overrides `prepare_weights`
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
        """Return the weights to send. A subclass may override this.

        Args:
            weights: As in `send`.
            model_id: The model's id. If `weights` is None, the model is looked up in the context.
            strategy: Extracts the weights from the model.
            context: The context of the scheme.

        Returns:
            A TensorDict or a dict of tensors; None if there is nothing to send.

        Raises:
            ValueError: A path was given, but no context.
        """
        source = self._source(weights, model_id, context)
        if source is None or has_names(source):
            return strategy.in_form(source)
        return strategy.extract_weights(source)

    def _source(self, weights: Any, model_id: str, context: Any) -> Any:
        """Return the object whose weights a send extracts; None if there is none."""
        if weights is None:
            return self._role.reference.source(model_id, context)
        if not isinstance(weights, str):
            # A collector's own random policy has no weights, which is not an error.
            if weights is not getattr(context, model_id, self._role.reference.given):
                check_weights(weights, model_id)
            return weights
        if context is None:
            raise ValueError(f"Cannot resolve string reference '{weights}' without context")
        return model_in(context, weights)

    # The receiver.

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Become a receiver. In a forked process, first discard the state of the parent's side.

        Args:
            model_id: The model's id. If there is a context, also the path of the model in it.
            context: An object that has the model, such as the worker's collector.
            **kwargs: `model` (instead of a context), `worker_idx` (this worker's id), `background`
                (instead of the scheme's setting), and the arguments of the transport.
        """
        if context is None and self._role.side is None:
            context = self.context  # inference servers set `context` before this call
        self._begin(model_id, context, kwargs.pop("model", None))
        self._role.reference.worker_idx = kwargs.setdefault("worker_idx", None)
        if kwargs.get("background") is None:
            kwargs["background"] = self.background
        destination = Destination(
            self._role.reference, self._strategy, strict=self.strict, cast=self.cast
        )
        try:
            parent = multiprocessing.parent_process()
            if context is not None and parent is not None and parent.pid == self._pickled_in:
                destination.unshare()
            receiver = self._make_receiver(destination, context=context, **kwargs)
        except BaseException:
            self.shutdown()
            raise
        self._role.take(ReceiverSide(destination, receiver))

    def receive(self, timeout: float | None = None) -> Any | None:
        """Return the newest weights applied since the last call; None if none were applied.

        By default versions are applied in the background, and this method only waits until one is
        applied. With `background=False`, versions are applied in this call.

        Args:
            timeout: Seconds to wait for a version; 0: do not wait; None: the scheme's timeout.

        Returns:
            The model's weights; None if no new version was applied.

        Raises:
            RuntimeError: This scheme is not a connected receiver.
            ApplyError: With `background=False`: a version does not fit; the weights are unchanged.
                If there is a context, the error is only logged, so that a polling server goes on.
        """
        side = self._role.connected_receiver()
        return side.receive(self.timeout if timeout is None else checks.seconds(timeout, "timeout"))

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the receiver's model, completely or not at all.

        Args:
            weights: A TensorDict, a dict of tensors, or a module.
            inplace: Whether to write into the model's tensors; otherwise the model gets new ones.

        Raises:
            RuntimeError: This scheme is not a receiver.
            ValueError: There is no model.
            DestinationError: The weights do not fit, and the model is unchanged. The message says
                why.
        """
        side = self._role.receiver
        if side is None:
            if self.initialized_on_sender:
                raise RuntimeError("apply_weights() called on a sender side.")
            raise RuntimeError("apply_weights() called before init_on_receiver has been called.")
        side.apply(weights, inplace, strict=self.strict, timeout=self.timeout)

    def reading(self, timeout: float | None = None) -> AbstractContextManager[object]:
        """Return a context manager during which the weights do not change, for a forward pass.

        Raises:
            TimeoutError: An apply took longer than `timeout` seconds.
            RuntimeError: This scheme is not a connected receiver.
        """
        side = self._role.receiver
        if side is None or not side.connected:
            raise RuntimeError("reading() needs a receiver: init_on_receiver() and connect() first")
        timeout = self.timeout if timeout is None else checks.seconds(timeout, "timeout")
        return side.receiver.reading(timeout)

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """The transport on which a receiver gets weights; None unless this is a receiver."""
        return ReceiverTransport(self.receive) if self.initialized_on_receiver else None

    # Both sides.

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, timeout: float | None = None
    ) -> None:
        """Connect this side, without waiting for the other side.

        On the sender, `weights` (None: the model's) become the first version. Every worker that has
        joined or joins later gets that version. On a receiver, `worker_idx` is the worker's id. A
        receiver whose model is on the meta device waits for weights, at most `timeout` seconds; no
        other receiver waits.

        Raises:
            RuntimeError: The scheme is not initialised, is already connected, or got an argument
                that only the other side accepts.
            TimeoutError: No weights arrived for a model on the meta device.
        """
        limit = self.timeout if timeout is None else timeout
        side = self._role.side
        if side is None:
            raise RuntimeError("Neither init_on_sender nor init_on_receiver have been called.")
        if side.connected:
            raise RuntimeError("Cannot synchronize weights on sender twice.")
        if isinstance(side, Sending):
            if worker_idx is not None:
                raise RuntimeError(
                    "Cannot specify worker_idx on sender side during synchronization."
                )
            try:
                first = self.prepared(weights)
            except NothingToSendError:
                first = None  # workers get their first weights from the first send
            side.connect(first, limit)
            return
        if weights is not None:
            raise RuntimeError("Cannot specify weights on receiver side during synchronization.")
        if worker_idx is not None:
            self._role.reference.worker_idx = worker_idx
        side.connect(limit, fill=self._waits_for_first)

    def shutdown(self) -> None:
        """End the session and release all resources. Calling it twice is fine."""
        self._role.end()

    @property
    def shared_transport(self) -> TransportBackend | None:
        """Always None: each worker has its own transport, see `sender_transports`."""
        return None

    @shared_transport.setter
    def shared_transport(self, shared_transport: TransportBackend | None) -> None:
        if shared_transport is not None:
            side = "Receiver transport" if self.initialized_on_receiver else "Sender transports"
            raise RuntimeError(f"{side} and shared transport cannot be used together")

    # Whether the scheme is a sender or a receiver, and whether it is connected.

    @property
    def initialized_on_sender(self) -> bool:
        """Whether `init_on_sender()` was called."""
        return self._role.sender is not None

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether `init_on_receiver()` was called."""
        return self._role.receiver is not None

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether `connect()` was called on the sender."""
        side = self._role.sender
        return side is not None and side.connected

    @synchronized_on_sender.setter
    def synchronized_on_sender(self, value: bool) -> None:
        if (side := self._role.sender) is not None:
            side.connected = value

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether `connect()` was called on the receiver."""
        side = self._role.receiver
        return side is not None and side.connected

    @synchronized_on_receiver.setter
    def synchronized_on_receiver(self, value: bool) -> None:
        if (side := self._role.receiver) is not None:
            side.connected = value

    # The model, its context and its weights.

    @property
    def strategy(self) -> WeightStrategy:
        """The strategy, which extracts weights from models and applies weights to them."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: WeightStrategy | Format) -> None:
        self._strategy = value if isinstance(value, WeightStrategy) else strategy_named(value)
        self.strategy_str = self._strategy.extract_as
        if (side := self._role.receiver) is not None:
            side.destination.strategy = self._strategy

    @property
    def context(self) -> Any | None:
        """The context, such as a collector; None if none was given or it was garbage-collected."""
        return self._role.reference.context

    @context.setter
    def context(self, context: Any | None) -> None:
        self._role.reference.context = context
        self._update_hooks()

    @property
    def model_id(self) -> str | None:
        """The id of the model; None before it is known."""
        return self._role.reference.model_id

    @model_id.setter
    def model_id(self, model_id: str) -> None:
        self._role.reference.model_id = model_id

    @property
    def model(self) -> Any | None:
        """The model; None if neither a model nor a context was given."""
        return self._role.reference.model()

    @model.setter
    def model(self, model: Any | None) -> None:
        self._role.reference.given = model
        self._update_hooks()

    def _update_hooks(self) -> None:
        if (side := self._role.receiver) is not None:
            side.destination.update_hooks()

    @property
    def weights(self) -> Any | None:
        """The weights that the user passed, else those of the model; None if there is no model."""
        if self._role.reference.weights is not None:
            return self._role.reference.weights
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @weights.setter
    def weights(self, value: Any) -> None:
        self._role.reference.weights = value

    @property
    def worker_idx(self) -> int | None:
        """The id of this worker; None on the sender, and before it is known."""
        return self._role.reference.worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if self.initialized_on_sender and worker_idx is not None:
            raise RuntimeError("Worker index cannot be set after initialization on sender")
        self._role.reference.worker_idx = worker_idx

    # The beginning of a role, and pickles.

    def _begin(self, model_id: str | None, context: Any, model: Any) -> None:
        _accept(type(self))
        self.shutdown()
        self._role.reference.model_id = model_id or self.model_id or POLICY
        self._role.reference.context, self._role.reference.given = context, model

    def __getstate__(self) -> dict[str, Any]:
        own = {"_role": None, "model_id": self.model_id, "_pickled_in": os.getpid()}
        return vars(self) | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        model_id = state.pop("model_id")
        vars(self).update(state, _role=Role(model_id))
        _accept(type(self))


def _accept(scheme: type) -> None:
    """Register a scheme class with TorchRL's base class, if TorchRL is imported.

    TorchRL's collectors check `isinstance(scheme, torchrl.weight_update.WeightSyncScheme)`. The
    schemes here work without TorchRL, so they cannot derive from that class.
    """
    module: Any = sys.modules.get("torchrl.weight_update.weight_sync_schemes")
    base = getattr(module, "WeightSyncScheme", None)  # None while that module is being imported
    if base is not None and not issubclass(scheme, base):
        base.register(scheme)
