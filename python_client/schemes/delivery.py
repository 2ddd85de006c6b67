"""Delivery: what runs in a worker's process when a sender calls it.

Where no receiver is registered, the object that was called (a collector, say) may have a documented
method that takes weights; then that is called.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from ...codecs.apply import as_tensors
from ...codecs.layout import Layout
from .call_reception import Delivery, home
from .gathering import Answer
from .subject import POLICY


def deliver(delivery: Delivery, other: Callable[[], object | None]) -> Answer:
    """Give a version to whom it is for, in this process, and return what became of it.

    Args:
        delivery: The version.
        other: Returns the object that was called, which may have a method that takes weights.
    """
    try:
        return _delivered(delivery, other)
    except Exception as error:  # raised, it would be printed here, and pickled to the sender
        return "failed", f"{type(error).__name__}: {error}"


def _delivered(delivery: Delivery, other: Callable[[], object | None]) -> Answer:
    reception = home.find(delivery, 0.0)
    if reception is None:
        taker = _documented(other(), delivery.strategy)
        if taker is not None:
            return _handed_over(delivery, *taker)
        if delivery.greeting:
            reception = home.find_or_keep(delivery)
            if reception is None:
                return "staged", "kept until a receiver connects"
    deadline = time.monotonic() + delivery.patience
    reception = reception or home.find(delivery, delivery.patience)
    if reception is None:
        return "failed", (
            f"process {os.getpid()} has no receiver of model {delivery.model_id!r} for worker "
            f"{delivery.worker}: call init_on_receiver(model_id={delivery.model_id!r}, ..., "
            f"worker_idx={delivery.worker}) and connect() there, and keep the scheme"
        )
    delivery.patience = max(0.0, deadline - time.monotonic())
    return reception.accept(delivery)


# By which methods an object takes weights where no receiver is registered: the first that it has,
# of those for the strategy. One without a strategy takes a TensorDict by any.
METHODS = (
    ("tensordict", "_update_weights_tensordict"),
    ("state_dict", "_update_weights_state_dict"),
    (None, "update_policy_weights_"),
)


def _documented(owner: object | None, strategy: str) -> tuple[Callable[..., Any], bool] | None:
    """Return the method of an object that takes weights, and whether it wants a state dict."""
    for wanted, name in METHODS:
        method = getattr(owner, name, None)
        if wanted in (None, strategy) and callable(method):
            return method, wanted == "state_dict"
    return None


def _handed_over(delivery: Delivery, method: Callable[..., Any], as_state_dict: bool) -> Answer:
    weights: Any = as_tensors(Layout.parse(delivery.header), delivery.data)
    if not as_state_dict:
        from tensordict import TensorDict

        weights = TensorDict(weights).unflatten_keys(".")
    named = {"model_id": delivery.model_id} if method.__name__ == "update_policy_weights_" else {}
    if delivery.model_id == POLICY:  # which is what collectors assume
        named = {}
    method(weights, **named)
    return "applied", ""
