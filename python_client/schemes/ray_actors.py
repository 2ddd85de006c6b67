"""`RayWeightSyncScheme`: weights to Ray actors, stored once per version in Ray's object store."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from ...codecs.numpy_tensors import Bytes
from ...codecs.state import State
from .call_reception import Delivery, Letter
from .calls import CallScheme
from .delivery import deliver
from .engine import Engine
from .gathering import Answer
from .handing import Outcome
from .ray_objects import Store, StoredVersion, call, explain, taken
from .strategy import Format
from .transport import TransportBackend, WorkerTransport


class RayWeightSyncScheme(CallScheme):
    """Sends weights to Ray actors of any class.

    On the sender, `init_on_sender` takes the actors as `remote_collectors=[...]` (or `actors`, or
    `actor_refs`), or from a context with `remote_collectors`. Their places are the worker ids.

    An actor calls `init_on_receiver` and `connect` in one of its methods; versions are applied
    between its tasks. Where it does not, its `update_policy_weights_` is called.
    """

    def __init__(self, strategy: Format = "tensordict", backend: str = "gloo", **kwargs: Any):
        """Make one. `backend` is taken for compatibility; no process group is needed."""
        del backend
        super().__init__(strategy, **kwargs)

    def _make_engine(self, **kwargs: Any) -> Engine:
        actors = actors_in(self.context, kwargs, ("remote_collectors", "actors", "actor_refs"))
        if not actors:
            raise ValueError("remote_collectors (or actors) must be provided via context or kwargs")
        return self._engine(ActorRoad(actors))

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return the transport of one actor, given as it is, or as `remote_actor`."""
        actor = kwargs.get("remote_actor") if pipe_or_context is None else pipe_or_context
        if actor is None or self.initialized_on_receiver:
            return super().create_transport(pipe_or_context, **kwargs)
        return RayTransport(actor, scheme=self)

    def _engine_of(self, pipe_or_context: Any) -> Engine:
        return self._engine(ActorRoad([pipe_or_context]))

    def _await_first(self, timeout: float) -> None:
        """Go on: an actor that waited here could not be called, and so not be given weights."""


class RayTransport(WorkerTransport):
    """The way to one actor.

    Args:
        remote_collector: The actor, or what wraps it.
        tensor_transport: Taken for compatibility; the object store carries the weights.
        scheme: What says how weights are taken out of models, and by when they must be there.
    """

    def __init__(
        self,
        remote_collector: Any = None,
        tensor_transport: str = "object_store",
        *,
        scheme: RayWeightSyncScheme | None = None,
    ) -> None:
        del tensor_transport
        if remote_collector is None:
            raise ValueError("a RayTransport needs an actor, remote_collector")
        super().__init__(*(scheme or RayWeightSyncScheme()).way_to(remote_collector))


def actors_in(context: Any, kwargs: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """Return the actors that keywords or a context name, in the first place that has any."""
    for name in names:
        actors = kwargs.get(name) or getattr(context, name, None)
        if actors:
            return list(actors)
    return []


def actor_of(owner: Any) -> Any:
    """Return an actor's handle, given as it is or by what wraps it, as TorchRL's services do."""
    from ray.actor import ActorHandle

    handle: Any = ActorHandle
    return owner if isinstance(owner, handle) else getattr(owner, "_actor", owner)


class _Parcel:
    """A stored version. Ray frees it once nobody refers to it any more."""

    def __init__(self, stored: StoredVersion) -> None:
        self.ref, self.nbytes = stored.ref, stored.nbytes

    def done(self, *, clean: bool) -> None:
        """There is nothing to take back."""


class ActorRoad:
    """Calls to some actors."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = [actor_of(actor) for actor in actors]
        self._store = Store()

    def workers(self) -> int:
        return len(self._actors)

    def pack(self, state: State) -> _Parcel:
        return _Parcel(self._store.put(state))

    def call(
        self, worker: int, parcel: _Parcel, letter: Letter, timeout: float
    ) -> "Future[Answer]":
        del timeout  # Ray's calls have none; whoever gathers the answers keeps the time
        return call(self._actors[worker], _deliver, letter, parcel.ref)

    def explain(self, worker: int, error: BaseException) -> Answer:
        return explain(self._actors[worker], error)


def _deliver(actor: Any, letter: Letter, version: tuple[bytes, Bytes]) -> Outcome:
    """Take a version in. (Runs in the actor.)"""
    header, data = version
    return deliver(Delivery.of(letter, header, data, waits=False), lambda: actor, taken)
