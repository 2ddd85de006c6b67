"""The contract between a scheme and what carries its weights: the bus, calls, or nothing.

A scheme (scheme.py) prepares weights, addresses workers, keeps deadlines and judges receipts; it
does all of that once. One over another means overrides two of its methods, and knows nothing else:

    _make_carrier(...) -> Transport        on the sender, at init_on_sender()
    _make_receiver(...) -> Receiver      on the receiver, at init_on_receiver()

A carrier brings `Weights` to workers and reports. What arrives at a receiver is given to its
`Destination` (receiver.py), which validates, applies and announces it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from ...bus.receipt import Receipt
from ...codecs.apply import as_arrays, as_tensors
from ...codecs.leaves import Leaf
from ...codecs.state import State, state_of, write_into
from ..applying import Update
from ..reading import READING_SECONDS

TIMEOUT = 60.0  # seconds that a call waits unless it is told otherwise


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one model, by dotted name, ready to be sent.

    They share the trainer's memory until the carrier has taken its snapshot.
    """

    model_id: str
    tensors: Mapping[str, Leaf]

    def state(self) -> State:
        """Return them as a state, tied ones once, for a carrier that writes them itself.

        Raises:
            StateError: Something in it cannot travel.
        """
        return state_of(self.tensors)

    def copied(self) -> "Weights":
        """Return a copy in memory of its own, tied ones tied."""
        state = self.state()
        layout = state.layout()
        data = np.empty(layout.nbytes, np.uint8)
        write_into(state, layout, data)
        on_numpy = all(isinstance(leaf, np.ndarray) for leaf in self.tensors.values())
        tensors: Mapping[str, Any] = (as_arrays if on_numpy else as_tensors)(layout, data)
        return Weights(self.model_id, tensors)


WorkerIds: TypeAlias = int | list[int] | None  # None: all of them
Prepared: TypeAlias = Weights | Mapping[int, Weights]  # the same for all, or each worker its own


class Transport:
    """What carries weights to the workers: the sender's side."""

    anybody = False  # whether it takes any number for a worker's

    def workers(self) -> Sequence[int]:
        """Return the ids that exist now; where their number is known, 0 to n-1, joined or not."""
        raise NotImplementedError

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
        raise NotImplementedError

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """At `connect()`, have the first weights reach who asks for them; wait for nobody."""

    def versions(self) -> Mapping[int, int]:
        """Return the version that each worker is known to run; workers without one are left out."""
        return {}

    def close(self) -> None:
        """Let go of everything. Never raises; calling it twice is fine."""


class Receiver:
    """What takes weights in: the receiver's side."""

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        """Take up work as this worker, at `connect()`. It must not wait for the sender."""

    def receive(self, timeout: float) -> Update | None:
        """Return the newest update that was not returned before; None if none comes in time.

        What polls applies it here and now; everything else has done so before.
        """

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[object]:
        """Return a context in which no version is applied."""
        del timeout
        return nullcontext()

    def close(self) -> None:
        """Let go of everything. Never raises; calling it twice is fine."""


def merged(receipts: Sequence[Receipt]) -> Receipt:
    """Return one receipt for several that were sent in one call; its version is the last one."""
    last = receipts[-1]
    if len(receipts) == 1:
        return last
    return replace(
        last,
        nbytes=sum(r.nbytes for r in receipts),
        seconds=max(r.seconds for r in receipts),
        digest="",
        workers={name: w for r in receipts for name, w in r.workers.items()},
    )


# Schemes by the name of what carries their weights, for `from_backend`.

# fmt: off
WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray",
    "zmq",
]
# fmt: on

# Where the scheme of each name lives. Each is loaded when it is first asked for.
_HOMES = {
    "none": "none:NoWeightSyncScheme",
    "shared": "bus:SharedMemWeightSyncScheme",
    "process": "bus:MultiProcessWeightSyncScheme",
    "zmq": "bus:ZMQWeightSyncScheme",
    "distributed": "bus:DistributedWeightSyncScheme",
    "rpc": "torch_rpc:RPCWeightSyncScheme",
    "ray": "ray:RayWeightSyncScheme",
}
_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}
_registered: dict[str, type] = {}

Scheme = TypeVar("Scheme", bound=type)


def register_weight_sync_backend(backend: str) -> Callable[[Scheme], Scheme]:
    """Return a decorator that makes a class of schemes known to `from_backend`, as `backend`."""

    def register(scheme: Scheme) -> Scheme:
        _registered[backend] = scheme
        return scheme

    return register


def scheme_class(backend: str) -> type:
    """Return the class of schemes of a name; ValueError: there is none."""
    canonical = backend if backend in _registered else _ALIASES.get(backend, backend)
    if canonical in _registered:
        return _registered[canonical]
    home = _HOMES.get(canonical)
    if home is None:
        choices = sorted({*_HOMES, *_ALIASES, *_registered})
        raise ValueError(f"Unsupported weight-sync backend {backend!r}. Expected one of {choices}.")
    module, name = home.split(":")
    found: type = getattr(import_module(f".{module}", __package__), name)
    return found
