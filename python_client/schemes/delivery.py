"""Delivery: what runs in a worker's process when a sender calls it.

Where no receiver is registered, the object that was called (a collector, say) may have a documented
method that takes weights; then that is called.
"""

import os
import time
from collections.abc import Callable

from .call_reception import Delivery, home
from .handing import Outcome, hand_over, weights_of
from .subject import POLICY


def deliver(
    delivery: Delivery,
    other: Callable[[], object | None],
    hand: Callable[..., Outcome] = hand_over,
) -> Outcome:
    """Give a version to whom it is for, in this process, and return what became of it.

    Args:
        delivery: The version.
        other: Returns the object that was called, which may have a method that takes weights.
        hand: Hands weights over to that method; see `handing.hand_over`.
    """
    try:
        return _delivered(delivery, other, hand)
    except Exception as error:  # raised, it would be printed here, and pickled to the sender
        return "failed", f"{type(error).__name__}: {error}"


def _delivered(
    delivery: Delivery, other: Callable[[], object | None], hand: Callable[..., Outcome]
) -> Outcome:
    reception = home.find(delivery, 0.0)
    if reception is None:
        taker = other()
        if (name := _documented(taker, delivery.strategy)) is not None:
            return _handed_over(delivery, taker, name, hand)
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
# of those for the strategy; what they call weights; and whether they want a TensorDict.
METHODS = {
    "_update_weights_tensordict": ("tensordict", ("params",), True),
    "_update_weights_state_dict": ("state_dict", ("state_dict",), False),
    "update_policy_weights_": (None, ("policy_or_weights", "policy_weights"), True),
}


def _documented(owner: object | None, strategy: str) -> str | None:
    """Return the name of the method by which an object takes weights."""
    for name, (wanted, _, _) in METHODS.items():
        if wanted in (None, strategy) and callable(getattr(owner, name, None)):
            return name
    return None


def _handed_over(
    delivery: Delivery, owner: object, method: str, hand: Callable[..., Outcome]
) -> Outcome:
    wanted, names, nested = METHODS[method]
    weights = weights_of(delivery.header, delivery.data, nested=nested)
    several = wanted is None and delivery.model_id != POLICY  # which is what collectors assume
    named = {"model_id": delivery.model_id} if several else {}
    return hand(getattr(owner, method), weights, names, delivery.timeout, **named)
