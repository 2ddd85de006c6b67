"""The updater API: `RayWeightUpdater` pushes weights to Ray collectors, at most every so often.

It is the documented API of TorchRL's updaters, with what those leave out: a push is acknowledged
by every worker it went to, within a deadline, and a worker that died is named. Neither TorchRL nor
its collectors are needed: any Ray actor with a method `update_policy_weights_(weights)` will do.
"""

import time
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial
from operator import index
from typing import Any

import numpy as np

from ...bus.receipt import Receipt
from ...codecs.state import is_module, is_tensor, state_of
from .. import checks
from .call_reception import MARGIN
from .engine import TIMEOUT
from .gathering import Answer, Shipment, gather
from .handing import Outcome, references
from .ray_objects import Store, Weights, answer_to, call, explain, taken
from .sending import check
from .updater import WeightUpdaterBase, listed, tensors_of

NAMES = "policy_weights", "policy_or_weights"  # what collectors' methods call weights


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
        self.timeout = checks.seconds(timeout, "timeout", positive=True)
        self.receipt: Receipt | None = None
        self._batches_since_weight_update = [0] * len(remote_collectors)
        self._epoch = time.time_ns() // 1_000_000
        self._version = 0
        self._versions: dict[int, int] = {}
        self._store = Store()
        self._calls: dict[str, Future[Answer]] = {}
        self._shared: tuple[Any, Any] | None = None  # what a push gives workers, and where it is
        self._nbytes = 0

    def versions(self) -> dict[int, int]:
        """Return how many pushes had gone out when a worker last acknowledged one, by its id."""
        return dict(self._versions)

    def all_worker_ids(self) -> list[Any] | None:
        """Return the places of all actors."""
        return list(range(len(self.remote_collectors)))

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        ids = self.all_worker_ids() if worker_ids is None else listed(worker_ids)
        checked = [self._checked(worker) for worker in ids or ()]
        due = dict.fromkeys(worker for worker in checked if self._is_due(worker))
        if not due:
            return  # nobody is to have it, so it need not be stored either
        started, given = time.monotonic(), policy_or_weights
        weights = self._maybe_map_weights(self._get_server_weights() if given is None else given)
        self._version += 1
        for worker in due:
            returned = self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
            if returned is not None:
                self._calls[str(worker)] = answer_to(returned, self.timeout)
        self._acknowledge(started)

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

    def _is_due(self, worker_id: int) -> bool:
        """Count a push for a worker, and tell whether it is to reach it."""
        skipped = self._skip_update(worker_id)
        since = self._batches_since_weight_update
        since[worker_id] = since[worker_id] + 1 if skipped else 0
        return not skipped

    def _skip_update(self, worker_id: int) -> bool:
        """Tell whether a worker goes without the next push, since the interval is not over."""
        return self._batches_since_weight_update[worker_id] < self.max_interval

    def _get_server_weights(self) -> Any:
        """Store the trainer's weights in Ray's object store, as they are now.

        Returns:
            A reference, as `ray.put` makes them: a method that is given it gets a TensorDict.
        """
        return self._stored(self.policy_weights)

    def _stored(self, weights: Any) -> Any:
        if references(weights):
            return weights  # by somebody else, so that nobody here knows how large they are
        if is_module(weights):
            weights = tensors_of(weights)
        flat = type(weights) in (dict, OrderedDict) and all(
            is_tensor(value) or isinstance(value, np.ndarray) for value in weights.values()
        )
        stored = self._store.put(state_of(weights), partial(Weights, nested=not flat))
        self._nbytes = stored.nbytes
        return stored.ref

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return what workers are to be given, of what was given to a push or is the server's.

        Args:
            policy_or_weights: What was given to the push, as it is, or what `_get_server_weights`
                returns.
        """
        return policy_or_weights

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        """Start a worker's update; the push waits for all of them together.

        Args:
            worker_id: The worker's place.
            server_weights: What `_maybe_map_weights` returns.

        Returns:
            Of an override, the reference that its call of the actor returned: the push waits for
            what that comes to. Of one that returns nothing, nobody knows what became.
        """
        if self._shared is None or self._shared[0] is not server_weights:
            self._shared = server_weights, self._stored(server_weights)  # once for all workers
        actor, ref = self.remote_collectors[worker_id], self._shared[1]
        self._calls[str(worker_id)] = call(actor, _update, ref, self.timeout * MARGIN)

    def _acknowledge(self, started: float) -> None:
        calls, self._calls, self._shared = self._calls, {}, None
        nbytes, self._nbytes = self._nbytes, 0
        shipment = Shipment("policy", self._epoch, self._version, nbytes, started, self.timeout)
        self.receipt = gather(shipment, calls, self._explain).result()
        for name in self.receipt.in_state("applied"):
            self._versions[int(name)] = self._version
        for name in self.receipt.in_state("failed", "lost", "behind"):
            # It is due again with the very next push.
            self._batches_since_weight_update[int(name)] = self.max_interval
        check(self.receipt)

    def _explain(self, name: str, error: BaseException) -> Answer:
        return explain(self.remote_collectors[int(name)], error)


def _update(actor: Any, weights: Any, timeout: float) -> Outcome:
    """Give an actor its weights. (Runs in the actor.)"""
    try:
        return taken(actor.update_policy_weights_, weights, NAMES, timeout)
    except Exception as error:  # raised, it would be printed here, and pickled to the sender
        return "failed", f"{type(error).__name__}: {error}"
