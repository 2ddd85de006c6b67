"""The roles of a scheme: its side, its model and its transports, as properties; and its pickling.

Everything that belongs to one process is in `_session` and `_subject`, and stays there. What is
pickled is the configuration, so that a scheme that is sent to a worker, or forked into one, starts
anew there and can become a receiver.
"""

import multiprocessing
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from ...bus.receipt import Receipt
from .. import checks
from . import torchrl
from .engine import TIMEOUT
from .session import Session, Side
from .strategy import Format, WeightStrategy, strategy_named
from .subject import POLICY, Subject
from .transport import TransportBackend


class Roles:
    """What a scheme is, and what it is about.

    Args:
        strategy: By which names weights travel: "tensordict" or "state_dict".
        timeout: Seconds that a call waits unless it is told otherwise.
        strict: Whether both sides must have the same names.
        cast: Whether values may be converted to the receiving model's dtypes.
        background: Receivers apply what arrives in the background; else where `receive()` is
            called.

    Raises:
        ValueError: There is no such strategy, or the timeout is not above zero.
    """

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
        self._start_anew()

    def __repr__(self) -> str:
        side = self._session.side or "not initialised"
        connected = ", connected" if self._session.connected else ""
        return f"<{type(self).__name__} of {self.model_id!r}: {side}{connected}>"

    # Which side, and how far.

    @property
    def initialized_on_sender(self) -> bool:
        """Whether `init_on_sender()` was called."""
        return self._here().side == "sender"

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether `init_on_receiver()` was called."""
        return self._here().side == "receiver"

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether `connect()` was called on the sender."""
        return self.initialized_on_sender and self._session.connected

    @synchronized_on_sender.setter
    def synchronized_on_sender(self, value: bool) -> None:
        if self.initialized_on_sender:
            self._session.connected = value

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether `connect()` was called on the receiver."""
        return self.initialized_on_receiver and self._session.connected

    @synchronized_on_receiver.setter
    def synchronized_on_receiver(self, value: bool) -> None:
        if self.initialized_on_receiver:
            self._session.connected = value

    # What it is about.

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are taken out of models and put into them."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: WeightStrategy | Format) -> None:
        self._strategy = value if isinstance(value, WeightStrategy) else strategy_named(value)
        self.strategy_str = self._strategy.extract_as
        if self._session.destination is not None:
            self._session.destination.strategy = self._strategy

    @property
    def context(self) -> Any | None:
        """The context object (a collector, for example); None if there is none any more."""
        return self._subject.context

    @context.setter
    def context(self, context: Any | None) -> None:
        self._subject.context = context

    @property
    def model_id(self) -> str | None:
        """The id of the model; None before it is known."""
        return self._subject.model_id

    @model_id.setter
    def model_id(self, model_id: str) -> None:
        self._subject.model_id = model_id

    @property
    def model(self) -> Any | None:
        """The model; None if neither it nor a context was given."""
        return self._subject.model()

    @model.setter
    def model(self, model: Any | None) -> None:
        self._subject.given = model

    @property
    def weights(self) -> Any | None:
        """The present weights: those that were given, else the model's; None without a model."""
        if self._session.weights is not None:
            return self._session.weights
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @weights.setter
    def weights(self, value: Any) -> None:
        self._session.weights = value

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None on the sender, and before it is known."""
        return self._session.worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if self.initialized_on_sender and worker_idx is not None:
            raise RuntimeError("Worker index cannot be set after initialization on sender")
        self._session.worker_idx = worker_idx

    # What became of it.

    @property
    def receipt(self) -> Receipt | None:
        """What every worker did with the last send; None before the first."""
        sending = self._here().sending
        return sending.receipt if sending is not None else None

    def versions(self) -> Mapping[int, int]:
        """Return the version that each worker is known to run, as it was acknowledged."""
        engine = self._here().engine
        return dict(engine.versions()) if engine is not None else {}

    def reading(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Return a context in which the receiver's weights do not change, for a forward pass.

        Raises:
            TimeoutError: An apply took longer than `timeout` seconds.
            RuntimeError: This is no connected receiver.
        """
        reception = self._here().reception
        if reception is None or not self._session.connected:
            raise RuntimeError("reading() needs a receiver: init_on_receiver() and connect() first")
        timeout = self.timeout if timeout is None else checks.seconds(timeout, "timeout")
        return reception.reading(timeout)

    @property
    def shared_transport(self) -> TransportBackend | None:
        """None: each worker has a transport of its own, in `sender_transports`."""
        return None

    @shared_transport.setter
    def shared_transport(self, shared_transport: TransportBackend | None) -> None:
        if shared_transport is not None:
            side = "Receiver transport" if self.initialized_on_receiver else "Sender transports"
            raise RuntimeError(f"{side} and shared transport cannot be used together")

    # One process's part, and how it ends.

    def _start_anew(self, model_id: str | None = None) -> None:
        self._pid = os.getpid()
        self._subject = Subject()
        self._subject.model_id = model_id
        self._renew(Session())
        torchrl.accept(type(self))

    def _renew(self, session: Session) -> Session:
        """Take up a session, which is closed with the scheme or at the interpreter's exit."""
        self._session = session
        self._close = weakref.finalize(self, session.close)
        return session

    def _here(self) -> Session:
        """Return the session of this process: a forked copy of a scheme starts anew."""
        if self._pid != os.getpid():
            self._close.detach()
            self._start_anew(self.model_id)
        return self._session

    def _begin(self, side: Side, model_id: str | None, context: Any, model: Any) -> Session:
        torchrl.accept(type(self))
        self.shutdown()
        self._subject.model_id = model_id or self.model_id or POLICY
        self._subject.context, self._subject.given = context, model
        return self._renew(Session(side))

    def shutdown(self) -> None:
        """End the session and release everything. Calling it twice is fine."""
        self._here()
        self._close()
        self._renew(Session())

    @property
    def _is_child_of_sender(self) -> bool:
        """Whether the process that this was pickled in has started this one."""
        parent = multiprocessing.parent_process()
        return parent is not None and parent.pid == self._pickled_in

    def __getstate__(self) -> dict[str, Any]:
        own = {"_session", "_subject", "_pid", "_close"}
        kept = {k: v for k, v in vars(self).items() if k not in own}
        return kept | {"model_id": self.model_id, "_pickled_in": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model_id = state.pop("model_id")
        vars(self).update(state)
        self._start_anew(model_id)
