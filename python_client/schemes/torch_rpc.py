"""`RPCWeightSyncScheme`: weights to the workers of a `torch.distributed.rpc` group."""

from concurrent.futures import Future
from typing import Any, cast

import torch
from torch.distributed import rpc

from ...codecs.state import State
from .call_reception import Delivery, Letter
from .calls import CallScheme
from .delivery import deliver
from .engine import Engine
from .gathering import Answer
from .handing import Outcome
from .rpc_buffers import Outbox, Parcel, Staging
from .strategy import Format
from .transport import TransportBackend, WorkerTransport

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
        parts = [*given, None]
        return parts[0], parts[1]
    return given, None


_staging = Staging()  # of this process, where it is a worker


class _Road:
    """RPCs to some workers of the group."""

    def __init__(self, peers: list[tuple[Any, Any]]) -> None:
        self._peers = peers
        self._outbox = Outbox()

    def workers(self) -> int:
        return len(self._peers)

    def pack(self, state: State) -> Parcel:
        return self._outbox.pack(state)

    def call(self, worker: int, parcel: Parcel, letter: Letter, timeout: float) -> "Future[Answer]":
        peer, rref = self._peers[worker]
        arguments = (letter, parcel.layout.header, parcel.pieces, rref)
        start = cast("Any", rpc).rpc_async
        return _promised(start(peer, _deliver, args=arguments, timeout=timeout))

    def explain(self, worker: int, error: BaseException) -> Answer:
        peer = self._peers[worker][0]
        name = getattr(peer, "name", peer)
        if _TIMED_OUT in str(error):
            return "behind", f"RPC worker {name} did not answer in time; it is stopped or cut off"
        return "lost", f"RPC worker {name} cannot be reached: {error}"


def _deliver(letter: Letter, header: bytes, pieces: list[torch.Tensor], rref: Any) -> Outcome:
    """Take a version in. (Runs in the worker, in a thread of the RPC agent.)"""
    data = _staging.join(pieces)
    delivery = Delivery.of(letter, header, data, waits=True)
    answer = deliver(delivery, lambda: None if rref is None else rref.local_value())
    if answer[0] != "staged":  # then somebody holds on to it
        _staging.free(data)
    return answer


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
