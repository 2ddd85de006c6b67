"""`RPCWeightSyncScheme`: weights by `torch.distributed.rpc`, as one flat tensor per version."""

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
from .call_reception import Delivery, Letter
from .calls import CallScheme
from .delivery import deliver
from .engine import Engine
from .gathering import Answer
from .strategy import Format
from .transport import TransportBackend, WorkerTransport

BUFFERS_MAX = 2  # buffers kept for reuse: one for the next version while one is on its way

_TIMED_OUT = "RPC ran for more than set timeout"  # how torch begins to say so


class RPCWeightSyncScheme(CallScheme):
    """Sends weights to workers of a torch RPC group.

    On the sender, `init_on_sender` takes the workers either as `workers=["worker1", ...]` (names,
    ids or `WorkerInfo`s; their places in this list are the worker ids), or from a context, or
    keywords, like TorchRL's: `collector_infos`, `collector_rrefs` and `collector_class`.

    The strategy is "state_dict" unless one is given, as the documentation of the original has it.

    A worker calls `init_on_receiver` and `connect`. Where it does not, its collector's
    `update_policy_weights_` is called.
    """

    def __init__(self, strategy: Format = "state_dict", **settings: Any) -> None:
        super().__init__(strategy, **settings)

    def _make_engine(self, **kwargs: Any) -> Engine:
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
        return self._engine(_Road(list(zip(infos, rrefs, strict=True))))

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return the transport of one worker, of which `(info, rref, class)` are given.

        They are a tuple, or the keywords `collector_info`, `collector_rref`, `collector_class`; a
        worker alone will do. See `WeightSyncScheme.create_transport` for the rest.
        """
        if pipe_or_context is None and "collector_info" in kwargs:
            pipe_or_context = kwargs["collector_info"], kwargs.get("collector_rref"), None
        if pipe_or_context is None or self.initialized_on_receiver:
            return super().create_transport(pipe_or_context, **kwargs)
        info, rref = _peer(pipe_or_context)
        return RPCTransport(info, rref, scheme=self)

    def _engine_of(self, pipe_or_context: Any) -> Engine:
        return self._engine(_Road([_peer(pipe_or_context)]))


class RPCTransport(WorkerTransport):
    """The way to one worker of a torch RPC group.

    Args:
        collector_info: The worker: its name, id or `WorkerInfo`.
        collector_rref: A reference to its collector, if it has one.
        collector_class, worker_rank: Not needed; taken for compatibility.
        scheme: What says how weights are taken out of models, and by when they must be there.
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
        peer = collector_info, collector_rref
        super().__init__(*(scheme or RPCWeightSyncScheme()).way_to(peer))


def _peer(given: Any) -> tuple[Any, Any]:
    """Return a worker and the reference to its collector, of which the first alone may be given."""
    if issubclass(type(given), tuple) and not hasattr(given, "name"):  # a WorkerInfo has a name
        info, rref, *_ = *given, None
        return info, rref
    return given, None


class _Road:
    """RPCs to some workers of the group."""

    def __init__(self, peers: list[tuple[Any, Any]]) -> None:
        self._peers = peers
        self._buffers = _Buffers()

    def workers(self) -> int:
        return len(self._peers)

    def pack(self, state: State) -> "_Parcel":
        return self._buffers.fill(state)

    def call(
        self, worker: int, parcel: "_Parcel", letter: Letter, timeout: float
    ) -> "Future[Answer]":
        peer, rref = self._peers[worker]
        arguments = (letter, parcel.layout.header, parcel.tensor, rref)
        start = cast("Any", rpc).rpc_async
        return _promised(start(peer, _deliver, args=arguments, timeout=timeout))

    def explain(self, worker: int, error: BaseException) -> Answer:
        peer = self._peers[worker][0]
        name = getattr(peer, "name", peer)
        if _TIMED_OUT in str(error):
            return "behind", f"RPC worker {name} did not answer in time; it is stopped or cut off"
        return "lost", f"RPC worker {name} cannot be reached: {error}"


def _deliver(letter: Letter, header: bytes, tensor: torch.Tensor, rref: Any) -> Answer:
    """Take a version in. (Runs in the worker, in a thread of the RPC agent.)"""
    delivery = Delivery.of(letter, header, tensor.numpy(), waits=True)
    return deliver(delivery, lambda: None if rref is None else rref.local_value())


def _promised(future: Any) -> "Future[Answer]":
    """Return a torch future as one of Python's."""
    promised: Future[Answer] = Future()

    def done(ended: Any) -> None:
        try:
            promised.set_result(ended.value())
        except Exception as error:
            promised.set_exception(error)

    future.add_done_callback(done)
    return promised


# The buffers.


@dataclass
class _Parcel:
    """A version in one flat tensor, which RPCs read while they are on their way."""

    layout: Layout
    tensor: torch.Tensor
    writer: Writer
    buffers: "_Buffers"

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def done(self, *, clean: bool) -> None:
        if clean:  # else an RPC that was given up may still be sending it: let it be freed
            self.buffers.free(self)


class _Buffers:
    """Flat tensors that are not on their way, kept since new memory costs more than the copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._free: list[_Parcel] = []

    def fill(self, state: State) -> _Parcel:
        """Return a snapshot of a state, in a buffer that no RPC is reading."""
        with self._lock:
            layout = state.layout(self._layout)
            if layout is not self._layout:
                self._layout, self._free = layout, []
            parcel = self._free.pop() if self._free else None
        if parcel is None:
            data: Bytes = np.empty(layout.nbytes, np.uint8)
            tensor = torch.as_tensor(data)  # shares its memory
            parcel = _Parcel(layout, tensor, Writer(layout, data), self)
        parcel.writer.write(state)
        return parcel

    def free(self, parcel: _Parcel) -> None:
        """Take a buffer back."""
        with self._lock:
            if parcel.layout is self._layout and len(self._free) < BUFFERS_MAX:
                self._free.append(parcel)
