"""The updater API: `WeightUpdaterBase`, from which users derive their own ways to push weights.

It is that of TorchRL's updaters, without their deprecation, and without TorchRL.
"""

import abc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, cast

from ...bus.errors import PublishError
from .engine import TIMEOUT
from .handing import keep


class WeightUpdaterBase(abc.ABC):
    """Pushes weights to workers. Subclasses say how, in `_sync_weights_with_worker`.

    Called, it pushes. Where TorchRL is imported, this class counts as one of its updaters.
    """

    _post_hooks: list[Callable[[], Any]] | None = None
    _collector: "weakref.ref[Any] | None" = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
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
        del args, kwargs

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
        """Have a function called, without arguments and in this process, after every push.

        Raises:
            TypeError: It is `async`, so that a call of it does nothing.
        """
        if inspect.iscoroutinefunction(hook):
            raise TypeError(
                f"the hook {hook!r} is async, and nobody awaits it: plain function, please"
            )
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
        given = policy_or_weights
        weights = self._maybe_map_weights(self._get_server_weights() if given is None else given)
        ids = self.all_worker_ids() if worker_ids is None else listed(worker_ids)
        due: list[dict[str, Any]] = [{}]  # where workers have no ids, one call without
        if ids is not None:
            due = [{"worker_id": worker} for worker in ids if not self._skip_update(worker)]
        sync = self._sync_weights_with_worker
        keep([sync(server_weights=weights, **worker) for worker in due], TIMEOUT)

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
            return cast("Any", policy_or_weights)
        from tensordict import TensorDictBase
        from torch import nn

        if isinstance(policy_or_weights, TensorDictBase):
            return policy_or_weights
        if isinstance(policy_or_weights, nn.Module):
            return tensors_of(policy_or_weights)
        raise TypeError(
            "policy_or_weights must be None, TensorDictModuleBase, TensorDictBase or dict, got "
            f"{type(policy_or_weights)}"
        )

    @abc.abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        """Bring weights to a worker; what is returned, if it is a promise, is waited for."""


def tensors_of(module: Any) -> Any:
    """Return a module's parameters and buffers as a TensorDict that shares their memory."""
    from tensordict import TensorDict

    return cast("Any", TensorDict).from_module(module).data


def listed(worker_ids: Any) -> list[Any]:
    """Return worker ids as a list, one alone too."""
    return [*cast("Any", worker_ids)] if isinstance(worker_ids, Iterable) else [worker_ids]


def _meet_torchrl() -> None:
    """Have TorchRL, if it is imported, take our updaters for its own."""
    module = sys.modules.get("torchrl.collectors.weight_update")
    if module is not None:
        module.WeightUpdaterBase.register(WeightUpdaterBase)
