"""Weight updaters push weights to workers: `RayWeightUpdater`, and a base class for users' own.

The API is that of TorchRL's updaters, but does not require TorchRL and is not deprecated. In
addition, `RayWeightUpdater` waits, until a deadline, for every worker's acknowledgement, and names
workers that died. Its actors need only have a method `update_policy_weights_(weights)`.
"""

import abc
import inspect
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from operator import index
from typing import Any, Self, cast

import numpy as np

from ...bus.errors import PublishError
from ...bus.receipt import Receipt
from ...codecs.state import is_module, is_tensor, state_of
from .. import checks
from .call_receiver import MARGIN
from .call_sender import Answers
from .model import CallResult, Outcome, is_torchrl, references, wait_for
from .ray import AsWeights, Store, answers_to, call, call_in_actor, explain
from .sender import check
from .strategy import WeightStrategy, nested
from .transport import TIMEOUT

# names of the weights' parameter in collectors' methods
NAMES = "policy_weights", "policy_or_weights"


class WeightUpdaterBase(abc.ABC):
    """Pushes weights to workers. Subclasses implement the push to one worker.

    To push, call the updater, or `push_weights`. If TorchRL is imported, its collectors accept this
    class.
    """

    _post_hooks: list[Callable[[], Any]] | None = None
    _collector: "weakref.ref[Any] | None" = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Return an updater that TorchRL's collectors accept, if TorchRL is imported."""
        module = sys.modules.get("torchrl.collectors.weight_update")
        if module is not None:
            module.WeightUpdaterBase.register(WeightUpdaterBase)
        return super().__new__(cls)

    @classmethod
    def from_policy(cls, policy: Any) -> "WeightUpdaterBase | None":
        """Return an updater for a `policy`, or None if the caller must use the constructor."""
        del policy
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Collectors call this before their first batch. Arguments are ignored."""
        del args, kwargs

    # The collector.

    def register_collector(self, collector: Any) -> None:
        """Register the collector. This updater keeps a weak reference to it.

        Raises:
            RuntimeError: Another collector is already registered.
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
        """The registered collector; None if none is registered or it was garbage-collected."""
        return None if self._collector is None else self._collector()

    @property
    def collectors(self) -> list[Any] | None:
        """A list with the registered collector; None if no collector was ever registered."""
        return None if self._collector is None else [self._collector()]

    def increment_version(self) -> None:
        """Make the collector count a new policy version.

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
        """The functions that are called, in this order, after every push."""
        if self._post_hooks is None:
            self._post_hooks = []
        return self._post_hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Call a function after every push, without arguments, in this process.

        Args:
            hook: The function.

        Raises:
            TypeError: The hook is an `async def` function, so calling it would run nothing.
        """
        if inspect.iscoroutinefunction(hook):
            raise TypeError(
                f"the hook {hook!r} is async, and nothing awaits it: give a plain function"
            )
        self.post_hooks.append(hook)

    # Pushing.

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Push the weights of a module, a TensorDict or a dict to workers, then call the hooks.

        Args:
            policy_or_weights: The weights to push; None: the updater's weights.
            worker_ids: The workers; None: all.

        If the push fails for some workers, the hooks are called before the PublishError is raised,
        because the other workers run new weights.
        """
        failure: PublishError | None = None
        try:
            self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        except PublishError as error:
            failure = error
        for hook in self.post_hooks:
            hook()
        if failure is not None:
            raise failure

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Push weights; see `push_weights`."""
        self.push_weights(policy_or_weights, worker_ids)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        given = policy_or_weights
        weights = self._maybe_map_weights(self._get_server_weights() if given is None else given)
        ids = self.all_worker_ids() if worker_ids is None else listed(worker_ids)
        # the keywords of each call; one call if workers have no ids
        calls: list[dict[str, Any]] = [{}]
        if ids is not None:
            calls = [{"worker_id": worker} for worker in ids if not self._skip_update(worker)]
        sync = self._sync_weights_with_worker
        wait_for([sync(server_weights=weights, **worker) for worker in calls], TIMEOUT)

    def all_worker_ids(self) -> list[Any] | None:
        """Return the ids of all workers; None if workers have no ids."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        """Return whether this push leaves out a worker."""
        del worker_id
        return False

    def _get_server_weights(self) -> Any:
        """Return the weights to push if the caller gave none."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return the weights in the form that workers accept."""
        if isinstance(policy_or_weights, Mapping):
            return cast("Any", policy_or_weights)
        from tensordict import TensorDictBase
        from torch import nn

        if isinstance(policy_or_weights, TensorDictBase):
            return policy_or_weights
        if isinstance(policy_or_weights, nn.Module):
            return WeightStrategy().tensors_as_td(policy_or_weights)
        raise TypeError(
            "policy_or_weights must be None, TensorDictModuleBase, TensorDictBase or dict, got "
            f"{type(policy_or_weights)}"
        )

    @abc.abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        """Send weights to one worker. If the result is an awaitable, the push waits for it."""


def listed(worker_ids: Any) -> list[Any]:
    """Return worker ids as a list; a single id becomes a list with one item."""
    return [*cast("Any", worker_ids)] if isinstance(worker_ids, Iterable) else [worker_ids]


class RayWeightUpdater(WeightUpdaterBase):
    """Pushes weights to Ray actors, and waits until they have applied them.

    Args:
        policy_weights: The trainer's weights, a TensorDict. A push sends their current values.
        remote_collectors: The actors. Worker ids are their positions in this list.
        max_interval: How many pushes leave out a worker between two that reach it; 0: none.
        timeout: Seconds within which the workers must apply a push.

    Attributes:
        receipt: The receipt of the last push; None before the first push.
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
        self.timeout = checks.seconds(timeout, "timeout", positive=True)
        self.receipt: Receipt | None = None
        self._batches_since_weight_update = [0] * len(remote_collectors)
        self._epoch = time.time_ns() // 1_000_000
        self._version = 0
        self._versions: dict[int, int] = {}
        self._store = Store()
        self._calls: dict[str, Future[CallResult]] = {}
        # the weights of the current push, and their Ray reference
        self._shared: tuple[Any, Any] | None = None
        self._nbytes = 0  # bytes of the weights that were stored last; 0: unknown

    def versions(self) -> dict[int, int]:
        """Return, by worker id, the number of the last push that the worker acknowledged."""
        return dict(self._versions)

    def all_worker_ids(self) -> list[Any] | None:
        """Return the positions of all actors."""
        return list(range(len(self.remote_collectors)))

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        ids = self.all_worker_ids() if worker_ids is None else listed(worker_ids)
        positions = [self._position(worker) for worker in ids or ()]
        due = dict.fromkeys(worker for worker in positions if self._begin_interval(worker))
        if not due:
            return  # no worker gets this push, so do not store the weights
        started, given = time.monotonic(), policy_or_weights
        weights = self._maybe_map_weights(self._get_server_weights() if given is None else given)
        self._version += 1
        returned: dict[str, Any] = {}
        for worker in due:
            value = self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
            if value is not None:
                returned[str(worker)] = value
        self._calls.update(answers_to(returned, self.timeout))
        self._await_answers(started)

    def _position(self, worker_id: Any) -> int:
        try:
            position = index(worker_id)
        except TypeError:
            position = -1
        if not 0 <= position < len(self.remote_collectors):
            raise IndexError(
                f"there is no worker {worker_id!r}: this updater has {len(self.remote_collectors)} "
                f"remote collectors, with the ids 0 to {len(self.remote_collectors) - 1}"
            )
        return position

    def _begin_interval(self, worker_id: int) -> bool:
        """Return whether this push goes to a worker; if so, restart the worker's interval."""
        if self._skip_update(worker_id):
            return False
        self._batches_since_weight_update[worker_id] = 0
        return True

    def _skip_update(self, worker_id: int) -> bool:
        """Count this push for a worker; return whether it is too early for the worker's update."""
        self._batches_since_weight_update[worker_id] += 1
        return self._batches_since_weight_update[worker_id] <= self.max_interval

    def _get_server_weights(self) -> Any:
        """Store the trainer's current weights; return a reference, as `ray.put` does."""
        return self._stored(self.policy_weights)

    def _stored(self, weights: Any) -> Any:
        if references(weights):
            return weights  # the caller stored the weights; their size is unknown here
        if is_module(weights):
            weights = WeightStrategy().tensors_as_td(weights)
        flat = type(weights) in (dict, OrderedDict) and all(
            is_tensor(value) or isinstance(value, np.ndarray) for value in weights.values()
        )
        stored = self._store.put(state_of(weights), partial(AsWeights, nested=not flat))
        self._nbytes = stored.layout.nbytes
        return stored.ref

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return the weights unchanged; `_sync_weights_with_worker` stores them."""
        return policy_or_weights

    # Unlike in the base class, arguments may also be positional, as in TorchRL's own updater.
    def _sync_weights_with_worker(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, worker_id: Any = None, server_weights: Any = None
    ) -> Any:
        """Start the update of one worker; the push waits for the updates of all workers together.

        An override should return the reference that its call of the actor returned; the push then
        waits for that reference. If an override returns None, the receipt has no result for the
        worker.
        """
        if self._shared is None or self._shared[0] is not server_weights:
            self._shared = server_weights, self._stored(server_weights)  # once for all workers
        actor, ref = self.remote_collectors[worker_id], self._shared[1]
        self._calls[str(worker_id)] = call(actor, _update, ref, self.timeout * MARGIN)

    def _await_answers(self, started: float) -> None:
        # Wait for the workers' answers until the deadline; make the receipt, and check it.
        calls, self._calls, self._shared = self._calls, {}, None
        nbytes, self._nbytes = self._nbytes, 0
        empty = Receipt("policy", self._epoch, self._version, nbytes, 0.0, "", {})
        answers = Answers(
            empty, calls, started=started, timeout=self.timeout, explain=self._explain
        )
        self.receipt = answers.receipt.result()
        for name in self.receipt.in_state("applied"):
            self._versions[int(name)] = self._version
        for name in self.receipt.in_state("failed", "lost", "behind"):
            # The next push must not leave out this worker.
            self._batches_since_weight_update[int(name)] = self.max_interval
        check(self.receipt)

    def _explain(self, name: str, error: BaseException) -> CallResult:
        return explain(self.remote_collectors[int(name)], error)


def _update(actor: Any, weights: Any, timeout: float) -> Outcome:
    """Call the actor's method with weights, in the actor's process; return the result."""
    if isinstance(weights, dict) and is_torchrl(actor):  # TorchRL expects nested names
        weights = nested(cast("dict[str, Any]", weights))
    try:
        return call_in_actor(actor.update_policy_weights_, weights, NAMES, timeout)
    except Exception as error:  # Ray would print an error here, and pickle it for the sender
        return CallResult("failed", f"{type(error).__name__}: {error}")
