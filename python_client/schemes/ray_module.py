"""`RayModuleTransformScheme`: weights to the module inside a Ray actor."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from ...bus.errors import WorkersMissingError
from .calls import CallEngine
from .destination import Destination
from .engine import Engine, Prepared, Reception
from .ray_actors import ActorRoad, RayTransport, RayWeightSyncScheme, actor_of, actors_in
from .receiver import WeightReceiver
from .sender import WeightSender
from .transport import TransportBackend

HOOK = "_init_weight_sync_scheme"  # by which TorchRL's ModuleTransform takes a receiver


class RayModuleTransformSender(WeightSender):
    """Sends weights to modules in Ray actors."""


class RayModuleTransformReceiver(WeightReceiver):
    """Receives weights for the module of the actor that it is in."""


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Sends weights to the module of a Ray actor.

    The sender takes it from the transform that was given this scheme, or as `ray_transform=...`,
    `actor_refs=[...]` or `actors=[...]` at `init_on_sender`. The receiver is the actor; its module
    is `model`, or the context's `_actor_module` or `module`. TorchRL's transforms become receivers
    by themselves when the sender connects.
    """

    def __init__(self, strategy: Any = "tensordict", backend: str = "gloo", **kwargs: Any):
        """Make one. `backend` is taken for compatibility; no process group is needed."""
        super().__init__(strategy, backend, **kwargs)
        self._ray_transform: Any = None

    def _set_transform(self, ray_transform: Any) -> None:
        """Remember the transform whose module this is about. (TorchRL calls this.)"""
        self._ray_transform = ray_transform

    def _make_engine(self, **kwargs: Any) -> Engine:
        names = ("actor_refs", "actors", "remote_collectors")
        actors = actors_in(self.context, kwargs, names)
        transform = self._ray_transform or kwargs.get("ray_transform")
        if not actors and transform is not None:
            actors = [transform]
        if not actors:
            raise ValueError("actor_refs (or actors) must be provided via context or kwargs")
        return _ModuleEngine(self, self._engine(ActorRoad(actors)), actors)

    def _make_reception(self, destination: Destination, **kwargs: Any) -> Reception:
        context = kwargs["context"]
        if destination.subject.given is None:
            found = (getattr(context, name, None) for name in ("_actor_module", "module"))
            destination.subject.given = next((m for m in found if m is not None), None)
        return super()._make_reception(destination, **kwargs)

    def create_sender(self) -> RayModuleTransformSender:
        """Return a new sender of this scheme."""
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        """Return a new receiver of this scheme."""
        return RayModuleTransformReceiver(self)

    def create_transport(self, pipe_or_context: Any = None, **kwargs: Any) -> TransportBackend:
        """Return the transport of one actor, or of the one that a context has as `_actor`."""
        actor = kwargs.get("remote_actor") if pipe_or_context is None else pipe_or_context
        if actor is None or self.initialized_on_receiver:
            return super().create_transport(pipe_or_context, **kwargs)
        return RayActorTransport(actor, self.strategy_str, scheme=self)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_ray_transform": None}


class RayActorTransport(RayTransport):
    """The way to the module of one actor.

    Args:
        actor_ref: The actor, or what has it as `_actor`.
        update_method: "tensordict" or "state_dict": what the actor's own method is given, where
            the actor is no receiver.
        scheme: What says how weights are taken out of models, and by when they must be there.
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


class _ModuleEngine:
    """An engine that makes receivers of actors that offer to become one."""

    def __init__(self, scheme: RayModuleTransformScheme, engine: CallEngine, actors: list[Any]):
        self._scheme: Callable[[], RayModuleTransformScheme | None] = weakref.ref(scheme)
        self._actors = [actor for actor in map(actor_of, actors) if hasattr(actor, HOOK)]
        self.workers, self.send, self.versions = engine.workers, engine.send, engine.versions
        self._engine, self.close = engine, engine.close

    def greet(self, weights: Prepared | None, *, timeout: float) -> None:
        """Make the receivers, then bring them their first weights."""
        scheme = self._scheme()
        made = [
            getattr(actor, HOOK).remote(scheme=scheme, model_id=scheme and scheme.model_id)
            for actor in self._actors
        ]
        for actor, ref in zip(self._actors, made, strict=True):
            future = cast("Future[Any]", ref.future())
            try:
                future.result(timeout)
            except TimeoutError:
                raise WorkersMissingError(
                    f"{actor!r} has not become a receiver within {timeout} s; it is stopped or busy"
                ) from None
        self._engine.greet(weights, timeout=timeout)
