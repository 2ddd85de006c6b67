"""Defines the schemes over Ray, which send weights to actors through Ray's object store.

A version is stored once, as a layout and one flat array. All actors of a host read that array in
place. (Ray would pickle torch tensors through byte strings, which takes several times as long.)
"""

import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from ...bus.errors import WorkersMissingError
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from ...codecs.state import State, Writer
from .call_receiver import Call, IncomingVersion, deliver
from .call_sender import CallSender, Channel, Peers
from .legacy_api import WeightReceiver, WeightSender, WeightSyncScheme
from .model import (
    CallResult,
    Failure,
    Outcome,
    arguments,
    hand_over,
    references,
    run_together,
    wait_for,
    weights_of,
)
from .receiver import Destination
from .strategy import Format
from .transport import Prepared, Receiver, Transport
from .worker_transports import TransportBackend, WorkerTransport

HOOK = "_init_weight_sync_scheme"  # TorchRL's ModuleTransform becomes a receiver by this method


class RayWeightSyncScheme(WeightSyncScheme):
    """Sends weights to Ray actors of any class.

    Args:
        strategy: The naming of the weights: "tensordict" or "state_dict".
        backend: Accepted for compatibility; no process group is needed.
        **kwargs: The settings of every scheme: `timeout` (seconds), `strict`, `cast`, `background`.

    On the sender, `init_on_sender` takes the actors as `remote_collectors=[...]` (or `actors`, or
    `actor_refs`), or from a context with `remote_collectors`. Their positions are the worker ids.

    An actor becomes a receiver by calling `init_on_receiver` and `connect` in one of its methods;
    versions are applied between its tasks. For other actors, a send calls their method
    `update_policy_weights_`.
    """

    # an actor that waits cannot be called, so it would never get the weights
    _waits_for_first = False

    def __init__(self, strategy: Format = "tensordict", backend: str = "gloo", **kwargs: Any):
        """Construct a scheme. Arguments are described in the class."""
        del backend
        super().__init__(strategy, **kwargs)
        self._channel = Channel()

    def _make_transport(self, **kwargs: Any) -> Transport:
        actors = _actors_in(self.context, kwargs, ("remote_collectors", "actors", "actor_refs"))
        if not actors:
            raise ValueError("remote_collectors (or actors) must be provided via context or kwargs")
        return CallSender(self._channel, _Actors(actors), self.strategy_str)

    def _make_receiver(self, destination: Destination, **kwargs: Any) -> Receiver:
        return self._channel.receiver(destination, **kwargs)

    def transport_to(self, pipe_or_context: Any) -> Transport:
        return CallSender(self._channel, _Actors([pipe_or_context]), self.strategy_str)

    def _transport_of(self, peer: Any) -> TransportBackend:
        return RayTransport(peer, scheme=self)


class RayTransport(WorkerTransport):
    """The transport to one actor.

    Args:
        remote_collector: The actor, or an object that has it as `_actor`.
        tensor_transport: Accepted for compatibility; weights always go through the object store.
        scheme: Provides the strategy that extracts weights from models, and the timeout.
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
        scheme = scheme or RayWeightSyncScheme()
        super().__init__(scheme, scheme.transport_to(remote_collector))


# Modules in actors.


class RayModuleTransformSender(WeightSender):
    """Sends weights to modules in Ray actors."""


class RayModuleTransformReceiver(WeightReceiver):
    """Receives weights for the module of the actor that it runs in."""


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Sends weights to the module of a Ray actor. Arguments are those of `RayWeightSyncScheme`.

    The sender takes the actor from the transform that has this scheme, or from `ray_transform=...`,
    `actor_refs=[...]` or `actors=[...]` of `init_on_sender`. The actor is the receiver: weights go
    into the argument `model` of `init_on_receiver`, or the context's `_actor_module` or `module`.
    TorchRL's transforms become receivers when the sender connects.
    """

    def __init__(self, strategy: Any = "tensordict", backend: str = "gloo", **kwargs: Any):
        """Construct a scheme. Arguments are those of `RayWeightSyncScheme`."""
        super().__init__(strategy, backend, **kwargs)
        self._ray_transform: Any = None

    def _set_transform(self, ray_transform: Any) -> None:
        """Set the transform whose module gets the weights. Called by TorchRL."""
        self._ray_transform = ray_transform

    def _make_transport(self, **kwargs: Any) -> Transport:
        names = ("actor_refs", "actors", "remote_collectors")
        actors = _actors_in(self.context, kwargs, names)
        transform = self._ray_transform or kwargs.get("ray_transform")
        if not actors and transform is not None:
            actors = [transform]
        if not actors:
            raise ValueError("actor_refs (or actors) must be provided via context or kwargs")
        return _ModuleSender(self, self._channel, actors)

    def _make_receiver(self, destination: Destination, **kwargs: Any) -> Receiver:
        context = kwargs["context"]
        if destination.subject.given is None:
            found = (getattr(context, name, None) for name in ("_actor_module", "module"))
            destination.subject.given = next((m for m in found if m is not None), None)
        return super()._make_receiver(destination, **kwargs)

    def _transport_of(self, peer: Any) -> TransportBackend:
        return RayActorTransport(peer, self.strategy_str, scheme=self)

    def create_sender(self) -> RayModuleTransformSender:
        """Return a new sender of this scheme."""
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        """Return a new receiver of this scheme."""
        return RayModuleTransformReceiver(self)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_ray_transform": None}


class RayActorTransport(RayTransport):
    """The transport to the module of one actor.

    Args:
        actor_ref: The actor, or an object that has it as `_actor`.
        update_method: "tensordict" or "state_dict": the form of the weights that the actor's own
            method gets, if the actor is not a receiver.
        scheme: Provides the strategy that extracts weights from models, and the timeout.
    """

    def __init__(
        self,
        actor_ref: Any = None,
        update_method: str = "tensordict",
        *,
        scheme: RayModuleTransformScheme | None = None,
    ) -> None:
        if update_method not in ("tensordict", "state_dict"):
            raise ValueError(f"Unknown update method: {update_method}")
        super().__init__(actor_ref, scheme=scheme or RayModuleTransformScheme(update_method))


class _ModuleSender(CallSender):
    """Sends to actors. `greet` first turns actors that have a method `HOOK` into receivers."""

    def __init__(self, scheme: RayModuleTransformScheme, channel: Channel, actors: list[Any]):
        super().__init__(channel, _Actors(actors), scheme.strategy_str)
        self._scheme: Callable[[], RayModuleTransformScheme | None] = weakref.ref(scheme)
        self._actors = [actor for actor in map(actor_of, actors) if hasattr(actor, HOOK)]

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Turn actors with a method `HOOK` into receivers, then send all actors the weights."""
        scheme = self._scheme()
        refs = [
            getattr(actor, HOOK).remote(scheme=scheme, model_id=scheme and scheme.model_id)
            for actor in self._actors
        ]
        for actor, ref in zip(self._actors, refs, strict=True):
            future = cast("Future[Any]", ref.future())
            try:
                future.result(timeout)
            except TimeoutError:
                raise WorkersMissingError(
                    f"{actor!r} has not become a receiver within {timeout} s; it is stopped or busy"
                ) from None
        super().greet(weights, timeout=timeout)


# Actors, and calls to them.


def _actors_in(context: Any, kwargs: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """Return the actors under the first of `names` that is in `kwargs` or in the context."""
    found = (kwargs.get(name) or getattr(context, name, None) for name in names)
    return list(next((actors for actors in found if actors), ()))


def actor_of(owner: Any) -> Any:
    """Return an actor's handle: `owner` itself, or its `_actor`, as in TorchRL's services."""
    from ray.actor import ActorHandle

    handle: Any = ActorHandle
    return owner if isinstance(owner, handle) else getattr(owner, "_actor", owner)


# Calls to Ray actors.
class _Actors(Peers):
    def __init__(self, actors: list[Any]) -> None:
        super().__init__([actor_of(actor) for actor in actors])
        self._store = Store()

    def pack(self, state: State) -> "Stored":
        return self._store.put(state)

    def call(
        self, worker: int, payload: "Stored", what: Call, timeout: float
    ) -> "Future[CallResult]":
        del timeout  # Ray's calls have no timeout; `Answers` ends the wait at the deadline
        return call(self.workers[worker], _deliver, what, payload.ref)

    def explain(self, worker: int, error: BaseException) -> CallResult:
        return explain(self.workers[worker], error)


def _deliver(actor: Any, what: Call, version: tuple[bytes, Bytes]) -> Outcome:
    """Receive a version in the actor's process; return the result."""
    return deliver(IncomingVersion.of(what, *version, waits=False), lambda: actor, call_in_actor)


def call(actor: Any, function: Callable[..., Outcome], *args: Any) -> "Future[CallResult]":
    """Call `function(instance, *args)` in an actor's process; return a future of the result.

    The actor may be of any class. Ray resolves references in `args`. If the function returns
    references, the result is "applied" when these are resolved.
    """
    answer: Future[CallResult] = Future()
    _follow([actor.__ray_call__.remote(function, *args)], answer, by_user=False)
    return answer


def answers_to(returned: Mapping[str, Any], timeout: float) -> "dict[str, Future[CallResult]]":
    """Return a future of the result of each call that the user's own code made, by worker.

    `returned` has the values that the calls returned. Those that are coroutines all run at the same
    time in one event loop, and are done or cancelled after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    coroutines = {name: each for name, each in returned.items() if inspect.iscoroutine(each)}
    values = dict(returned)
    if coroutines:
        values.update(zip(coroutines, run_together([*coroutines.values()], timeout), strict=True))
    return {name: _answer_to(value, deadline) for name, value in values.items()}


def _answer_to(value: Any, deadline: float) -> "Future[CallResult]":
    answer: Future[CallResult] = Future()
    if pending := references(value):
        _follow(pending, answer, by_user=True)
        return answer
    if isinstance(value, Failure):
        answer.set_exception(value.error)
        return answer
    try:
        wait_for(value, deadline - time.monotonic())
        answer.set_result(CallResult("applied"))
    except Exception as error:
        answer.set_exception(error)
    return answer


def _follow(pending: list[Any], answer: "Future[CallResult]", *, by_user: bool) -> None:
    """Complete `answer` when all `pending` references, and the references in their values, resolve.

    The result is "applied" if user code returned them (`by_user`), else the only reference's value.
    """
    first, *rest = pending

    def ended(done: "Future[Any]") -> None:
        try:
            value = done.result()
        except BaseException as error:
            answer.set_exception(error)
            return
        if more := [*references(value), *rest]:
            _follow(more, answer, by_user=True)
        else:
            answer.set_result(CallResult("applied") if by_user else value)

    cast("Future[Any]", first.future()).add_done_callback(ended)


def call_in_actor(
    method: Callable[..., Any], weights: Any, names: Sequence[str], timeout: float, **others: Any
) -> Outcome:
    """Call a method of the actor with weights, in the actor's process; return the result.

    Ray runs an `async def` method in the actor's event loop, which a wait here would block. For
    such a method, return a reference for which the caller must wait.
    """
    if not inspect.iscoroutinefunction(method):
        return hand_over(method, weights, names, timeout, **others)
    import ray

    me: Any = cast("Any", ray).get_runtime_context().current_actor
    args, kwargs = arguments(method, weights, names)
    return [getattr(me, method.__name__).remote(*args, **kwargs, **others)]


def explain(actor: Any, error: BaseException) -> CallResult:
    """Return the result to report for an actor if a call to it raised `error`."""
    from ray.exceptions import RayActorError, RayTaskError

    task_error: Any = RayTaskError

    if isinstance(error, RayActorError):
        text = str(error).split("\tclass_name:")[0]  # cut off Ray's long description of the actor
        return CallResult("lost", f"{actor!r}: {' '.join(text.split())}")
    if isinstance(error, task_error):
        error = cast("Any", error).cause
    return CallResult("failed", f"{actor!r}: {type(error).__name__}: {error}")


# Versions in the object store.


@dataclass(frozen=True, slots=True)
class Stored:
    """A version in the object store: a reference to it, and its layout."""

    ref: Any
    layout: Layout

    def done(self, clean: bool) -> None:
        """Do nothing: Ray frees the version once there is no reference to it."""


@dataclass(frozen=True, slots=True)
class AsWeights:
    """A version that unpickles as a TensorDict or dict of weights, in new memory."""

    header: bytes
    data: Bytes
    nested: bool  # True: unpickles as a TensorDict; False: as a dict

    def __reduce__(self) -> Any:
        return partial(weights_of, nested=self.nested), (self.header, self.data)


class Store:
    """Puts states into the object store: writes them into one buffer, which `ray.put` copies."""

    def __init__(self) -> None:
        self._writer: Writer | None = None

    def put(self, state: State, form: Callable[[bytes, Bytes], Any] | None = None) -> Stored:
        """Store a copy of a state, as `form(header, data)` or as the pair `(header, data)`."""
        import ray

        if not ray.is_initialized():
            raise RuntimeError("Ray is not running in this process: call ray.init() first")
        layout = state.layout(None if self._writer is None else self._writer.section.layout)
        if self._writer is None or layout is not self._writer.section.layout:
            self._writer = Writer(layout, np.empty(layout.nbytes, np.uint8))
        self._writer.write(state)
        put, sections = cast("Any", ray).put, (layout.header, self._writer.section.data)
        return Stored(put(form(*sections) if form else sections), layout)
