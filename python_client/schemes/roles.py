"""The roles of a scheme: its side, and what it is about, as properties; and its pickling.

Everything that belongs to one process is in `_side` and `_subject`, and stays there. What is
pickled is the configuration, so that a scheme that is sent to a worker, or forked into one, starts
anew there and can become a receiver.
"""

import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from ...bus.receipt import Receipt
from .. import checks
from .carrier import TIMEOUT
from .model import POLICY, Subject
from .receiver import ReceiverSide
from .sender import SenderSide
from .strategy import Format, WeightStrategy, strategy_named
from .vintage import TransportBackend, WeightReceiver, WeightSender

# Of one process, so that it is not pickled.
OWN = {"_side", "_subject", "_pid", "_closers", "_close", "_made_sender", "_made_receiver"}


class Roles:
    """What a scheme is, and what it is about.

    Args:
        strategy: The naming of the weights: "tensordict" or "state_dict".
        timeout: Default seconds that a call waits.
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
        side, now = self._side, "not initialised"
        if side is not None:
            now = "sender" if isinstance(side, SenderSide) else "receiver"
            now += ", connected" if side.connected else ""
        return f"<{type(self).__name__} of {self.model_id!r}: {now}>"

    # Which side, and how far.

    @property
    def _as_sender(self) -> SenderSide | None:
        side = self._here()
        return side if isinstance(side, SenderSide) else None

    @property
    def _as_receiver(self) -> ReceiverSide | None:
        side = self._here()
        return side if isinstance(side, ReceiverSide) else None

    @property
    def initialized_on_sender(self) -> bool:
        """Whether `init_on_sender()` was called."""
        return self._as_sender is not None

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether `init_on_receiver()` was called."""
        return self._as_receiver is not None

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether `connect()` was called on the sender."""
        side = self._as_sender
        return side is not None and side.connected

    @synchronized_on_sender.setter
    def synchronized_on_sender(self, value: bool) -> None:
        if (side := self._as_sender) is not None:
            side.connected = value

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether `connect()` was called on the receiver."""
        side = self._as_receiver
        return side is not None and side.connected

    @synchronized_on_receiver.setter
    def synchronized_on_receiver(self, value: bool) -> None:
        if (side := self._as_receiver) is not None:
            side.connected = value

    # What it is about.

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are taken out of models and put into them."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: WeightStrategy | Format) -> None:
        self._strategy = value if isinstance(value, WeightStrategy) else strategy_named(value)
        self.strategy_str = self._strategy.extract_as
        if (side := self._as_receiver) is not None:
            side.destination.strategy = self._strategy

    @property
    def context(self) -> Any | None:
        """The context object (a collector, for example); None if there is none any more."""
        return self._subject.context

    @context.setter
    def context(self, context: Any | None) -> None:
        self._subject.context = context
        self._look_again()

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
        self._look_again()

    def _look_again(self) -> None:
        if (side := self._as_receiver) is not None:
            side.destination.look_again()

    @property
    def weights(self) -> Any | None:
        """The present weights: those that were given, else the model's; None without a model."""
        if self._subject.weights is not None:
            return self._subject.weights
        model = self.model
        return None if model is None else self._strategy.extract_weights(model)

    @weights.setter
    def weights(self, value: Any) -> None:
        self._subject.weights = value

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None on the sender, and before it is known."""
        return self._subject.worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if self.initialized_on_sender and worker_idx is not None:
            raise RuntimeError("Worker index cannot be set after initialization on sender")
        self._subject.worker_idx = worker_idx

    # What became of it.

    @property
    def receipt(self) -> Receipt | None:
        """What every worker did with the last send; None before the first."""
        side = self._as_sender
        return None if side is None else side.sending.receipt

    def versions(self) -> Mapping[int, int]:
        """Return the version that each worker is known to run, as it was acknowledged."""
        side = self._as_sender
        return {} if side is None else dict(side.sending.carrier.versions())

    def reading(self, timeout: float | None = None) -> AbstractContextManager[object]:
        """Return a context in which the receiver's weights do not change, for a forward pass.

        Raises:
            TimeoutError: An apply took longer than `timeout` seconds.
            RuntimeError: This is no connected receiver.
        """
        side = self._as_receiver
        if side is None or not side.connected:
            raise RuntimeError("reading() needs a receiver: init_on_receiver() and connect() first")
        timeout = self.timeout if timeout is None else checks.seconds(timeout, "timeout")
        return side.receiver.reading(timeout)

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
        self._subject = Subject(model_id)
        self._made_sender: WeightSender | None = None
        self._made_receiver: WeightReceiver | None = None
        self._renew()
        _accept(type(self))

    def _renew(self) -> None:
        """Be on no side. What will be, is closed with the scheme or at the interpreter's exit."""
        self._side: SenderSide | ReceiverSide | None = None
        self._closers: list[Callable[[], None]] = []
        self._close = weakref.finalize(self, _close_all, self._closers)

    def _take(self, side: SenderSide | ReceiverSide) -> None:
        self._side = side
        self._closers.append(side.close)

    def _here(self) -> SenderSide | ReceiverSide | None:
        """Return the side in this process: a forked copy of a scheme starts anew."""
        if self._pid != os.getpid():
            self._close.detach()
            self._start_anew(self.model_id)
        return self._side

    def _begin(self, model_id: str | None, context: Any, model: Any) -> None:
        _accept(type(self))
        self.shutdown()
        self._subject.model_id = model_id or self.model_id or POLICY
        self._subject.context, self._subject.given = context, model

    def shutdown(self) -> None:
        """End the session and release everything. Calling it twice is fine."""
        self._here()
        self._close()
        self._subject.weights = self._subject.worker_idx = None
        self._renew()

    @property
    def _is_child_of_sender(self) -> bool:
        """Whether the process that this was pickled in has started this one."""
        parent = multiprocessing.parent_process()
        return parent is not None and parent.pid == self._pickled_in

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in vars(self).items() if k not in OWN}
        return kept | {"model_id": self.model_id, "_pickled_in": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model_id = state.pop("model_id")
        vars(self).update(state)
        self._start_anew(model_id)


def _close_all(closers: list[Callable[[], None]]) -> None:
    for close in closers:
        with suppress(Exception):
            close()


def _accept(scheme: type) -> None:
    """Have TorchRL, if it is imported, take a class of schemes for its own.

    Its collectors ask `isinstance(scheme, torchrl.weight_update.WeightSyncScheme)`. Ours do not
    derive from that class, since they must work without TorchRL; they are registered with it.
    """
    module: Any = sys.modules.get("torchrl.weight_update.weight_sync_schemes")
    base = getattr(module, "WeightSyncScheme", None)  # None while it is still being imported
    if base is not None and not issubclass(scheme, base):
        base.register(scheme)
