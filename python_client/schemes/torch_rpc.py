"""`RPCWeightSyncScheme` sends weights to the workers of a `torch.distributed.rpc` group.

Versions are sent in pieces, which the worker joins: RPC receives every tensor into new memory. The
allocator returns large blocks to the system. So each version of a large tensor would cost one page
fault per page, which takes several times as long as the copy. Blocks of a few MiB are reused.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import rpc

from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from ...codecs.state import State, Writer
from .call_receiver import Call, IncomingVersion, deliver
from .call_sender import CallSender, Channel, Peers
from .legacy_api import WeightSyncScheme
from .model import CallResult, Outcome
from .receiver import Destination
from .strategy import Format
from .transport import Receiver, Transport
from .worker_transports import TransportBackend, WorkerTransport

PIECE_BYTES = 2 * 2**20  # the fastest of 1, 2, 4 and 8 MiB, by a small margin
KEPT_MAX = 2  # buffers kept for reuse: one may be in use while the other gets the next version
_TIMED_OUT = "RPC ran for more than set timeout"  # how torch's error text for a timeout begins


class RPCWeightSyncScheme(WeightSyncScheme):
    """Sends weights to workers of a torch RPC group.

    Args:
        strategy: The naming of the weights: "tensordict" or "state_dict".
        **settings: The settings of every scheme: `timeout` (seconds), `strict`, `cast`,
            `background`.

    On the sender, `init_on_sender` takes the workers as `workers=["worker1", ...]` (names, ids or
    `WorkerInfo`s; the positions in this list are the worker ids), or from a context, or from
    TorchRL's keywords `collector_infos`, `collector_rrefs` and `collector_class`.

    The default strategy is "state_dict", as in TorchRL's documentation.

    A worker becomes a receiver if it calls `init_on_receiver` and `connect`. If a worker is not a
    receiver, a send calls its collector's `update_policy_weights_`.
    """

    def __init__(self, strategy: Format = "state_dict", **settings: Any) -> None:
        super().__init__(strategy, **settings)
        self._channel = Channel()

    def _make_transport(self, **kwargs: Any) -> Transport:
        def given(name: str) -> Any:
            value = kwargs.get(name)
            return getattr(self.context, name, None) if value is None else value

        infos = kwargs.get("workers") or given("collector_infos")
        if not infos:
            raise ValueError(
                f"{type(self).__name__} does not know its workers: give init_on_sender their RPC "
                "names, workers=[...], or a context that has collector_infos"
            )
        rrefs = given("collector_rrefs") or [None] * len(infos)
        peers = _Peers(list(zip(infos, rrefs, strict=True)))
        return CallSender(self._channel, peers, self.strategy_str)

    def _make_receiver(self, destination: Destination, **kwargs: Any) -> Receiver:
        return self._channel.receiver(destination, **kwargs)

    def transport_to(self, pipe_or_context: Any) -> Transport:
        return CallSender(self._channel, _Peers([_peer(pipe_or_context)]), self.strategy_str)

    def _transport_of(self, peer: Any) -> TransportBackend:
        return RPCTransport(*_peer(peer), scheme=self)


class RPCTransport(WorkerTransport):
    """The transport to one worker of a torch RPC group.

    Args:
        collector_info: The worker's name, id or `WorkerInfo`.
        collector_rref: A reference to the worker's collector, if the worker has one.
        collector_class, worker_rank: Not needed; accepted for compatibility.
        scheme: Provides the strategy that extracts weights from models, and the timeout.
    """

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
        *,
        scheme: RPCWeightSyncScheme | None = None,
    ) -> None:
        del collector_class, worker_rank
        if collector_info is None:
            raise ValueError("an RPCTransport needs a worker: its RPC name, id or WorkerInfo")
        scheme = scheme or RPCWeightSyncScheme()
        super().__init__(scheme, scheme.transport_to((collector_info, collector_rref)))


def _peer(given: Any) -> tuple[Any, Any]:
    """Return the pair (worker, reference to its collector or None); `given` may be either."""
    if issubclass(type(given), tuple) and not hasattr(given, "name"):  # a WorkerInfo has a name
        parts = [*given, None]
        return parts[0], parts[1]
    return given, None


# On the sender.


# Calls to the workers of a torch RPC group.
class _Peers(Peers):
    def __init__(self, workers: list[tuple[Any, Any]]) -> None:
        super().__init__(workers)
        self._snapshots = Snapshots()

    def pack(self, state: State) -> "Pieces":
        return self._snapshots.take(state)

    def call(
        self, worker: int, payload: "Pieces", what: Call, timeout: float
    ) -> "Future[CallResult]":
        peer, rref = self.workers[worker]
        arguments = (what, payload.layout.header, payload.pieces, rref)
        start = cast("Any", rpc).rpc_async
        return _as_python_future(start(peer, _deliver, args=arguments, timeout=timeout))

    def explain(self, worker: int, error: BaseException) -> CallResult:
        peer = self.workers[worker][0]
        name = getattr(peer, "name", peer)
        if _TIMED_OUT in str(error):
            late = f"RPC worker {name} did not answer in time; it is stopped or cut off"
            return CallResult("behind", late)
        return CallResult("lost", f"RPC worker {name} cannot be reached: {error}")


def _as_python_future(future: Any) -> "Future[CallResult]":
    """Return a Python future with the result or error of a torch future."""
    result: Future[CallResult] = Future()

    def done(ended: Any) -> None:
        try:
            result.set_result(ended.value())
        except Exception as error:
            result.set_exception(error)

    future.add_done_callback(done)
    return result


@dataclass(eq=False)
class Pieces:
    """A copy of a version, cut into tensors that RPCs read until `done` is called."""

    layout: Layout
    pieces: list[torch.Tensor]
    owner: "Snapshots"

    def done(self, clean: bool) -> None:
        """Allow the memory to be reused, unless an RPC that timed out may still read it."""
        if clean:
            self.owner.take_back(self)


class Snapshots:
    """Copies states into pieces, and reuses the memory of versions whose RPCs have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._free: list[Pieces] = []

    def take(self, state: State) -> Pieces:
        """Return a copy of a state, in memory that no RPC is reading."""
        with self._lock:
            layout = state.layout(None if self._writer is None else self._writer.section.layout)
            if self._writer is None or layout is not self._writer.section.layout:
                self._writer = Writer(layout, np.empty(layout.nbytes, np.uint8))
                self._free = []
            self._writer.write(state)
            flat = torch.as_tensor(self._writer.section.data)
            begins = range(0, layout.nbytes, PIECE_BYTES)
            parts = [flat[begin : begin + PIECE_BYTES] for begin in begins]
            if not self._free:
                # Clone: RPC would copy a view of a larger tensor again for every worker.
                return Pieces(layout, [part.clone() for part in parts], self)
            reused = self._free.pop()
            for piece, part in zip(reused.pieces, parts, strict=True):
                piece.copy_(part)
            return reused

    def take_back(self, used: Pieces) -> None:
        """Keep the memory of a copy for reuse, if its layout is still the current one."""
        with self._lock:
            current = self._writer is not None and used.layout is self._writer.section.layout
            if current and len(self._free) < KEPT_MAX:
                self._free.append(used)


# On a worker.


def _deliver(call: Call, header: bytes, pieces: list[torch.Tensor], rref: Any) -> Outcome:
    """Receive a version in a thread of the RPC agent; return the result."""
    data = _staging.join(pieces)
    version = IncomingVersion.of(call, header, data, waits=True)
    answer = deliver(version, lambda: None if rref is None else rref.local_value())
    if answer[0] != "staged":  # a staged version still needs its data
        _staging.free(data)
    return answer


class Staging:
    """Joins the pieces of a version, in memory that is reused for later versions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Bytes] = []

    def join(self, pieces: list[torch.Tensor]) -> Bytes:
        """Return the pieces as one read-only array; free it with `free`."""
        size = sum(piece.numel() for piece in pieces)
        with self._lock:
            index = next((i for i, free in enumerate(self._free) if free.size == size), None)
            data = np.empty(size, np.uint8) if index is None else self._free.pop(index)
        if pieces:  # join with numpy, because torch would start a thread pool in each RPC thread
            np.concatenate([piece.numpy() for piece in pieces], out=data)
        joined = data.view()
        joined.flags.writeable = False  # so that user code must copy a part that it keeps
        return joined

    def free(self, joined: Bytes) -> None:
        """Allow reuse of the memory of an array that `join` returned, and that nothing uses."""
        data = joined.base
        with self._lock:
            if isinstance(data, np.ndarray):
                self._free = [*self._free[1 - KEPT_MAX :], data]


_staging = Staging()  # used if this process is a worker
