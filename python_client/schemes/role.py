"""Keeps the role of a scheme in one process: none, sender or receiver.

    none ── take(Sending) ──────> sender ── end() ───> none
     └───── take(ReceiverSide) ─> receiver ── end() ─> none

A forked process begins without a role, since the sockets and locks belong to its parent.
"""

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .model import ModelReference
from .receiver import ReceiverSide
from .sender import Sending


class Role:
    """The side of a scheme in this process, and its reference to the model.

    The side is closed by `end`, when the role is garbage-collected, or when the interpreter exits.

    Attributes:
        reference: The reference to the model.
        views: The sender and the receiver of the older API, once they are made.
        transports: The sender's transports to single workers, by worker id, once they are made.
    """

    def __init__(self, model_id: str | None = None) -> None:
        self._begin_process(model_id)

    def _begin_process(self, model_id: str | None) -> None:
        self._pid = os.getpid()
        self.reference = ModelReference(model_id)
        self.views: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._side: Sending | ReceiverSide | None = None
        self.transports: dict[int, Any] = {}
        self._callbacks = ExitStack()  # called when the role ends
        self._close = weakref.finalize(self, self._callbacks.close)

    def take(self, side: Sending | ReceiverSide) -> None:
        """Become the sender or the receiver."""
        self._side = side
        self.on_end(side.close)

    def on_end(self, close: Callable[[], object]) -> None:
        """Call `close` when the role ends."""
        self._callbacks.callback(close)

    def end(self) -> None:
        """Close the side, and drop the weights and the worker's id."""
        _ = self.side  # a forked process must not close its parent's side
        self._close()
        self.reference.weights = self.reference.worker_idx = None
        self._begin()

    @property
    def side(self) -> Sending | ReceiverSide | None:
        """The side of this process; None before one is chosen."""
        if self._pid != os.getpid():
            self._close.detach()
            self._begin_process(self.reference.model_id)
        return self._side

    @property
    def sender(self) -> Sending | None:
        """The side, if this process is the sender."""
        side = self.side
        return side if isinstance(side, Sending) else None

    @property
    def receiver(self) -> ReceiverSide | None:
        """The side, if this process is a receiver."""
        side = self.side
        return side if isinstance(side, ReceiverSide) else None

    def connected_sender(self) -> Sending:
        """Return the sender's side; raise RuntimeError unless it is connected."""
        side = self.sender
        if side is None:
            raise RuntimeError("Must be initialized on sender before sending weights")
        if not side.connected:
            raise RuntimeError("Must be synchronized on sender before sending weights")
        return side

    def connected_receiver(self) -> ReceiverSide:
        """Return the receiver's side; raise RuntimeError unless it is connected."""
        side = self.receiver
        if side is None:
            raise RuntimeError("Must be initialized on receiver before receiving weights")
        if not side.connected:
            raise RuntimeError("Must be synchronized on receiver before receiving weights")
        return side
