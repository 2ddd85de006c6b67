"""The older vintage of the API: senders and receivers as objects of their own, and transports.

It is a view. A `WeightSender` sends what its scheme sends; a `WeightReceiver` is its scheme's
receiving side; a transport is one worker of an engine.
"""

from collections.abc import Mapping
from typing import Any

from .engine import Engine
from .receiver import WeightReceiver
from .receiver_side import ReceiverSide
from .sender import WeightSender
from .sender_side import SenderSide
from .transport import Prepare, ReceiverTransport, TransportBackend, WorkerTransport


class Older(SenderSide, ReceiverSide):
    """What the older API adds to both sides of a scheme."""

    _made_sender: WeightSender | None
    _made_receiver: WeightReceiver | None

    # By these names programs of the older vintage look at what is made and what is not.

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

    def _engine_of(self, pipe_or_context: Any) -> Engine:
        """Return an engine with one worker, 0: the one that `pipe_or_context` leads to."""
        raise NotImplementedError

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Become a receiver and connect; versions are applied where `receive()` is called.

        Arguments are those of `init_on_receiver`; `pipe` is the worker's end of the sender's pipe.
        """
        if kwargs.get("pipe") is None:
            kwargs["pipe"] = getattr(context, "pipe", None)
        kwargs.setdefault("background", False)
        self.init_on_receiver(model_id=model_id, context=context, **kwargs)
        try:
            self._connect_receiver(self._session.worker_idx, self.timeout)
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
        """Return the transport of one worker: of the one that `pipe_or_context` leads to.

        Without it, `worker_idx` names a worker of the initialised sender; on a receiver, the
        transport is the one that its weights come by.
        """
        if self.initialized_on_receiver:
            return ReceiverTransport(self, named=pipe_or_context is not None)
        if pipe_or_context is None and self.initialized_on_sender:
            return self._transport_to(kwargs.get("worker_idx", 0))
        return WorkerTransport(*self.way_to(pipe_or_context))

    def way_to(self, peer: Any) -> tuple[Engine, int, Prepare, float]:
        """Return what a transport to one worker is made of."""
        return self._engine_of(peer), 0, self._weights_of, self.timeout

    def _transport_to(self, worker: int) -> WorkerTransport:
        sending = self._session.sending
        if sending is None or worker not in sending.engine.workers():
            raise ValueError(f"Worker {worker} not registered")
        return WorkerTransport(sending.engine, worker, self._weights_of, self.timeout)

    def _start_anew(self, model_id: str | None = None) -> None:
        super()._start_anew(model_id)
        self._made_sender = self._made_receiver = None

    def __getstate__(self) -> dict[str, Any]:
        own = {"_made_sender", "_made_receiver"}
        return {k: v for k, v in super().__getstate__().items() if k not in own}

    @property
    def sender_transports(self) -> Mapping[int, TransportBackend]:
        """The transport of each worker, on the sender; empty before it is initialised."""
        engine = self._here().engine
        return {} if engine is None else {w: self._transport_to(w) for w in engine.workers()}

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """The transport that weights come by, on a receiver; None elsewhere."""
        return ReceiverTransport(self) if self.initialized_on_receiver else None
