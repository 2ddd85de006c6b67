"""The updater API: `RayWeightUpdater` pushes weights to Ray collectors, at most every so often.

It is the documented API of TorchRL's updaters, with what those leave out: a push is acknowledged
by every worker it went to, within a deadline, and a worker that died is named. Neither TorchRL nor
its collectors are needed: any Ray actor with a method `update_policy_weights_(weights)` will do.
"""

import abc
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from operator import index
from typing import Any, cast

import numpy as np

from ...bus.errors import PublishError
from ...bus.receipt import Receipt
from ...codecs import numpy_tensors
from ...codecs.apply import as_tensors
from ...codecs.layout import Layout
from ...codecs.state import is_module, is_tensor, state_of
from .gathering import Answer, Shipment, gather
from .ray_objects import Store, StoredVersion, call, explain

TIMEOUT = 60.0  # seconds that the workers of one push have, unless told otherwise


class WeightUpdaterBase(abc.ABC):
    """Pushes weights to workers. Subclasses say how, in `_sync_weights_with_worker`.

    Called, it pushes. Where TorchRL is imported, this class counts as one of its updaters.
    """

    _post_hooks: list[Callable[[], Any]] | None = None
    _collector: "weakref.ref[Any] | None" = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "WeightUpdaterBase":
        """Make one that TorchRL's collectors accept, if TorchRL is there."""
        _meet_torchrl()
        return super().__new__(cls)

    @classmethod
    def from_policy(cls, policy: Any) -> "WeightUpdaterBase | None":
        """Return an updater made for a policy, or None: use the constructor."""
        del policy
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Take what a collector has to say before its first batch; here, nothing."""

    # The collector.

    def register_collector(self, collector: Any) -> None:
        """Remember the collector, weakly. There can be one.

        Raises:
            RuntimeError: Another one is registered already.
        """
        known = self.collector
        if known is not None and known is not collector:
            raise RuntimeError(
                f"Cannot register collector twice: this updater belongs to {type(known).__name__} "
                f"{hex(id(known))}; make a new updater for this one"
            )
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector; None if there is none, or none any more."""
        return None if self._collector is None else self._collector()

    @property
    def collectors(self) -> list[Any] | None:
        """The registered collector in a list; None if none was ever registered."""
        return None if self._collector is None else [self._collector()]

    def increment_version(self) -> None:
        """Have the collector count a new policy version.

        Raises:
            RuntimeError: No collector is registered.
        """
        collector = self.collector
        if collector is None:
            raise RuntimeError("no collector is registered, or it is gone: register_collector()")
        collector.increment_version()

    # Hooks.

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """What is called after every push, in this order."""
        if self._post_hooks is None:
            self._post_hooks = []
        return self._post_hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Have a function called, without arguments and in this process, after every push."""
        self.post_hooks.append(hook)

    def _call_post_hooks(self) -> None:
        for hook in self.post_hooks:
            hook()

    # Pushing.

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Push weights to workers, then call the hooks.

        Args:
            policy_or_weights: A module, a TensorDict or a dict; None: the updater's own.
            worker_ids: A worker, or a list of them; None: all.

        Where some workers were missed, the hooks are called before that is raised: the others do
        run new weights.
        """
        try:
            self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        except PublishError:
            self._call_post_hooks()
            raise
        self._call_post_hooks()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Push weights; see `push_weights`."""
        self.push_weights(policy_or_weights, worker_ids)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        weights = policy_or_weights
        weights = self._maybe_map_weights(
            self._get_server_weights() if weights is None else weights
        )
        ids = self.all_worker_ids() if worker_ids is None else _listed(worker_ids)
        if ids is None:
            self._sync_weights_with_worker(server_weights=weights)
            return
        for worker in ids:
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)

    def all_worker_ids(self) -> list[Any] | None:
        """Return the ids of all workers; None where workers have none."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        """Tell whether a worker goes without this push."""
        del worker_id
        return False

    def _get_server_weights(self) -> Any:
        """Return the weights to push where none were given."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return the weights in the form that workers take."""
        if isinstance(policy_or_weights, Mapping):
            return policy_or_weights
        from tensordict import TensorDict, TensorDictBase
        from torch import nn

        if isinstance(policy_or_weights, TensorDictBase):
            return policy_or_weights
        if isinstance(policy_or_weights, nn.Module):
            return TensorDict.from_module(policy_or_weights).data
        raise TypeError(
            "policy_or_weights must be None, TensorDictModuleBase, TensorDictBase or dict, got "
            f"{type(policy_or_weights)}"
        )

    @abc.abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Bring weights to a worker."""


@dataclass(frozen=True, slots=True)
class ServerWeights:
    """The weights of one push in the object store; `nested` if actors get a TensorDict of them."""

    stored: StoredVersion
    nested: bool


class RayWeightUpdater(WeightUpdaterBase):
    """Pushes weights to Ray actors, and waits until they have them.

    Args:
        policy_weights: The trainer's weights, a TensorDict. What is pushed is what they are then.
        remote_collectors: The actors. Worker ids are their places in this list.
        max_interval: How many pushes a worker goes without between two that reach it; 0: none.
        timeout: Seconds that the workers of one push have to apply it.

    Attributes:
        receipt: What became of the last push that went out; None before the first.
    """

    def __init__(
        self,
        policy_weights: Any,
        remote_collectors: list[Any],
        max_interval: int = 0,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self.timeout = timeout
        self.receipt: Receipt | None = None
        self._batches_since_weight_update = [0] * len(remote_collectors)
        self._epoch = time.time_ns() // 1_000_000
        self._version = 0
        self._versions: dict[int, int] = {}
        self._store = Store()
        self._calls: dict[str, Future[Answer]] = {}

    def versions(self) -> dict[int, int]:
        """Return how many pushes had gone out when a worker last acknowledged one, by its id."""
        return dict(self._versions)

    def all_worker_ids(self) -> list[Any] | None:
        """Return the places of all actors."""
        return list(range(len(self.remote_collectors)))

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        ids = self.all_worker_ids() if worker_ids is None else _listed(worker_ids)
        checked = [self._checked(worker) for worker in ids or ()]
        due = dict.fromkeys(worker for worker in checked if not self._skip_update(worker))
        if not due:
            return  # nobody is to have it, so it need not be stored either
        started, given = time.monotonic(), policy_or_weights
        weights = self._maybe_map_weights(self._get_server_weights() if given is None else given)
        if not isinstance(weights, ServerWeights):
            weights = self._stored(weights)
        self._version += 1
        for worker in due:
            self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        self._acknowledge(weights.stored.nbytes, started)

    def _checked(self, worker_id: Any) -> int:
        try:
            place = index(worker_id)
        except TypeError:
            place = -1
        if not 0 <= place < len(self.remote_collectors):
            raise IndexError(
                f"there is no worker {worker_id!r}: this updater has {len(self.remote_collectors)} "
                f"remote collectors, with the ids 0 to {len(self.remote_collectors) - 1}"
            )
        return place

    def _skip_update(self, worker_id: Any) -> bool:
        """Count a push for a worker, and tell whether it is still within the interval."""
        self._batches_since_weight_update[worker_id] += 1
        skip = self._batches_since_weight_update[worker_id] <= self.max_interval
        if not skip:
            self._batches_since_weight_update[worker_id] = 0
        return skip

    def _get_server_weights(self) -> Any:
        """Store the trainer's weights in Ray's object store, as they are now."""
        return self._stored(self.policy_weights)

    def _stored(self, weights: Any) -> "ServerWeights":
        if is_module(weights):
            from tensordict import TensorDict

            weights = TensorDict.from_module(weights).data
        flat = isinstance(weights, dict) and all(
            is_tensor(value) or isinstance(value, np.ndarray)
            for value in cast("dict[Any, Any]", weights).values()
        )
        return ServerWeights(self._store.put(state_of(weights)), nested=not flat)

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return the weights as they are."""
        return policy_or_weights

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Start a worker's update; the push waits for all of them together."""
        actor, weights = self.remote_collectors[worker_id], server_weights
        self._calls[str(worker_id)] = call(actor, _update, weights.nested, weights.stored.ref)

    def _acknowledge(self, nbytes: int, started: float) -> None:
        calls, self._calls = self._calls, {}
        shipment = Shipment("policy", self._epoch, self._version, nbytes, started, self.timeout)
        missed: list[str] = []
        try:
            self.receipt = gather(shipment, calls, explain).result()
        except PublishError as error:
            self.receipt = error.receipt
            missed = error.receipt.in_state("failed", "lost", "behind")
            raise
        finally:
            for name in calls:
                if name in missed:  # it is due again with the very next push
                    self._batches_since_weight_update[int(name)] = self.max_interval
                else:
                    self._versions[int(name)] = self._version


def _update(actor: Any, nested: bool, version: tuple[bytes, numpy_tensors.Bytes]) -> Answer:
    """Give an actor its weights. (Runs in the actor.)"""
    header, data = version
    # Tensors of its own, for the stored ones are shared by all actors, and must not be written.
    weights: Any = as_tensors(Layout.parse(header), data)
    if nested:
        from tensordict import TensorDict

        weights = TensorDict(weights).unflatten_keys(".")
    try:
        actor.update_policy_weights_(weights)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "applied", ""


def _listed(worker_ids: Any) -> list[Any]:
    return list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]


def _meet_torchrl() -> None:
    """Have TorchRL, if it is imported, take our updaters for its own."""
    module = sys.modules.get("torchrl.collectors.weight_update")
    if module is not None:
        module.WeightUpdaterBase.register(WeightUpdaterBase)
