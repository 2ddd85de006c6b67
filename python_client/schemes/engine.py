"""The contract between a scheme and whatever carries its weights: the bus, calls, or nothing.

A scheme (scheme.py) prepares weights, addresses workers, keeps deadlines and judges receipts; it
does all of that once. An adapter overrides two methods of it, and knows nothing else:

    _make_engine(...) -> Engine          on the sender, at init_on_sender()
    _make_reception(...) -> Reception    on the receiver, at init_on_receiver()

An engine carries `Weights` to workers and reports. What arrives at a receiver is given to its
`Destination` (destination.py), which validates, applies and announces it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...bus.receipt import Receipt
from ...codecs.outline import Leaf
from ...codecs.state import State, state_of
from ..applying import Update
from ..reading import READING_SECONDS

TIMEOUT = 60.0  # seconds that a call waits unless it is told otherwise
ANSWER_SECONDS = 5.0  # beyond its deadline, what an engine's thread is allowed to answer


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one model, ready to be sent.

    Attributes:
        model_id: The model.
        tensors: Its tensors by dotted name. They share the trainer's memory until the engine has
            taken its snapshot.
    """

    model_id: str
    tensors: Mapping[str, Leaf]

    def state(self) -> State:
        """Return them as a state, tied ones once, for an engine that writes them itself.

        Raises:
            StateError: Something in it cannot travel.
        """
        return state_of(self.tensors)


Prepared: TypeAlias = Weights | Mapping[int, Weights]  # the same for all, or each worker its own


class Engine(Protocol):
    """What carries weights to the workers: the sender's side."""

    def workers(self) -> Sequence[int]:
        """Return the ids that exist now; where their number is known, 0 to n-1, joined or not."""
        ...

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        """Snapshot the weights, start to send them, and return: the trainer may then change them.

        Args:
            weights: What to send.
            workers: Some of `workers()`; None: all of them.
            timeout: Seconds until the future must be done, whatever the workers do.

        Returns:
            A future of the receipt. In it every worker that was asked for stands under `str(id)`,
            with what became of it; a worker that failed is no exception.

        Raises:
            StateError: The weights cannot travel; nothing was sent.
        """
        ...

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Take up work, at `connect()`: have these weights reach every worker that asks for them.

        It must not wait for workers that are still being built.
        """
        ...

    def versions(self) -> Mapping[int, int]:
        """Return the version that each worker is known to run; workers without one are left out."""
        ...

    def close(self) -> None:
        """Let go of everything. Never raises; calling it twice is fine."""
        ...


class Reception(Protocol):
    """What takes weights in: the receiver's side."""

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        """Take up work as this worker, at `connect()`. It must not wait for the sender."""
        ...

    def receive(self, timeout: float) -> Update | None:
        """Return the newest update that was not returned before; None if none comes in time.

        One that applies in the background, or when it is called, has applied it before
        (`destination.arrivals.take(timeout)`); one that polls applies it here and now.
        """
        ...

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[None]:
        """Return a context in which no version is applied."""
        ...

    def close(self) -> None:
        """Let go of everything. Never raises; calling it twice is fine."""
        ...
