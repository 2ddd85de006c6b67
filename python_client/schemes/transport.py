"""Defines the interface between a scheme and its transport: the bus, or calls of torch RPC or Ray.

For every transport, a scheme (scheme.py) prepares weights, addresses workers, keeps deadlines and
checks receipts. A scheme for another transport overrides two methods:

    _make_transport(...) -> Transport    on the sender, at init_on_sender()
    _make_receiver(...) -> Receiver      on the receiver, at init_on_receiver()

A transport sends `Weights` to workers and returns receipts. A receiver passes each version to its
`Destination` (receiver.py), which validates, applies and announces the version.
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
from ..applying.applier import Update
from ..applying.reading import READING_SECONDS

TIMEOUT = 60.0  # seconds that a call waits by default


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one model, by dotted name, ready to send.

    The tensors share the trainer's memory; a transport copies them before its `send` returns.
    """

    model_id: str
    tensors: Mapping[str, Leaf]

    def state(self) -> State:
        """Return the weights as a state, which contains tied tensors only once.

        Raises:
            StateError: Some of the weights cannot be sent.
        """
        return state_of(self.tensors)

    def copied(self) -> "Weights":
        """Return a copy of the weights in new memory; tied tensors stay tied."""
        state = self.state()
        layout = state.layout()
        data = np.empty(layout.nbytes, np.uint8)
        write_into(state, layout, data)
        on_numpy = all(isinstance(leaf, np.ndarray) for leaf in self.tensors.values())
        tensors: Mapping[str, Any] = (as_arrays if on_numpy else as_tensors)(layout, data)
        return Weights(self.model_id, tensors)


WorkerIds: TypeAlias = int | list[int] | None  # None: all workers
Prepared: TypeAlias = Weights | Mapping[int, Weights]  # for all workers, or by worker id


class Transport:
    """The sender's end of a transport: sends weights to the workers."""

    any_worker = False  # whether every number is accepted as a worker id

    def workers(self) -> Sequence[int]:
        """Return the worker ids: 0 to n-1 for a known number n, else those of joined workers."""
        raise NotImplementedError

    def send(
        self, weights: Weights, workers: Sequence[int] | None, *, timeout: float
    ) -> "Future[Receipt]":
        """Copy the weights and start to send them; afterwards the trainer may change them.

        Args:
            weights: The weights to send.
            workers: The ids of some of `workers()`; None: all of them.
            timeout: Seconds until the future must be done, whatever the workers do.

        Returns:
            A future of the receipt, whose rows are named `str(id)`: one for every requested worker,
            even if that worker failed. The failure of a worker does not make the future raise.

        Raises:
            StateError: The weights cannot be sent; nothing was sent.
        """
        raise NotImplementedError

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Offer the first weights to the workers, without waiting for absent workers.

        The sender's `connect()` calls this. `weights` is None if there are no first weights.
        """

    def versions(self) -> Mapping[int, int]:
        """Return the versions that workers run, by worker id; omit workers that run none."""
        return {}

    def close(self) -> None:
        """Release all resources. Never raises; calling it twice is fine."""


class Receiver:
    """The receiver's end of a transport: receives weights."""

    def connect(self, worker_idx: int | None, timeout: float) -> None:
        """Join as worker `worker_idx`. Called by the scheme's `connect()`; must not block."""

    def receive(self, timeout: float) -> Update | None:
        """Return the newest update that was not returned before; None after `timeout` seconds.

        With `background`, a version was applied before this call, otherwise this call applies it.
        """

    def reading(self, timeout: float = READING_SECONDS) -> AbstractContextManager[object]:
        """Return a context manager during which no version is applied."""
        del timeout
        return nullcontext()

    def close(self) -> None:
        """Release all resources. Never raises; calling it twice is fine."""


def merged(receipts: Sequence[Receipt]) -> Receipt:
    """Merge the receipts of one call into one; its version is that of the last receipt."""
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


# The schemes that `from_backend` can make, by the name of their transport.

# fmt: off
WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray",
    "zmq",
]
# fmt: on

# Module and class of the scheme for each name. A module is imported when its scheme is requested.
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
    """Return a decorator that registers a scheme class under `backend`, for `from_backend`."""

    def register(scheme: Scheme) -> Scheme:
        _registered[backend] = scheme
        return scheme

    return register


def scheme_class(backend: str) -> type:
    """Return the scheme class registered under a name; raise ValueError if there is none."""
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
