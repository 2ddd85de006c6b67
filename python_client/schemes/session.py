"""A session: what a scheme is at the moment, in this process. None of it is ever pickled."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from .destination import Destination
from .engine import Engine, Reception
from .sending import Sending

Side = Literal["sender", "receiver"]


@dataclass(eq=False)
class Session:
    """One scheme between its initialisation and its shutdown.

    Attributes:
        side: Which side it is on; None before it is initialised.
        connected: Whether `connect()` was called.
        sending: What is being sent, and by which engine (sender).
        destination, reception: Where versions go, and what takes them in (receiver).
        worker_idx: Which worker this is (receiver).
        weights: Weights to send, given apart from a model (sender).
        at_close: What else is to be closed with it.
    """

    side: Side | None = None
    connected: bool = False
    sending: Sending | None = None
    destination: Destination | None = None
    reception: Reception | None = None
    worker_idx: int | None = None
    weights: Any = None
    at_close: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    @property
    def engine(self) -> Engine | None:
        """What carries the weights (sender)."""
        return self.sending.engine if self.sending is not None else None

    def close(self) -> None:
        """Let go of everything; called at any time, also while the interpreter ends."""
        parts = [part.close for part in (self.engine, self.reception) if part is not None]
        for close in (*parts, *self.at_close):
            with suppress(Exception):
                close()
        if self.destination is not None:
            self.destination.arrivals.close()
