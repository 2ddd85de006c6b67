"""Weights are handed over by the name that a method has for them, and taken when it is done."""

from concurrent.futures import Future
from typing import Any

import pytest

from weightbus.python_client.schemes.model import arguments, hand_over, wait_for

NAMES = "policy_or_weights", "policy_weights"


class Methods:
    """Ways to take weights, each by the place where they are found."""

    def first(self, weights: Any) -> Any:
        return weights

    def only(self, weights: Any, /) -> Any:
        return weights

    def named(self, *, policy_weights: Any) -> Any:
        return policy_weights

    def not_first(self, worker_ids: Any = None, policy_or_weights: Any = None) -> Any:
        return policy_or_weights if worker_ids is None else "as the ids"

    def any_name(self, **kwargs: Any) -> Any:
        return kwargs["policy_or_weights"]

    def anything(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs)[1]["policy_or_weights"]

    def several(self, *weights: Any) -> Any:
        return weights[0]


@pytest.mark.parametrize("name", [name for name in vars(Methods) if not name.startswith("__")])
def test_weights_go_by_the_name_that_a_method_has_for_them(name: str) -> None:
    method = getattr(Methods(), name)
    args, kwargs = arguments(method, "weights", NAMES)
    assert method(*args, **kwargs) == "weights"


def test_what_cannot_say_what_it_takes_is_given_them_by_position() -> None:
    assert arguments(max, "weights", NAMES) == (("weights",), {})


async def later(value: Any) -> Any:
    return value


def resolved(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_promises_of_promises_are_waited_for() -> None:
    seen: list[str] = []

    async def see(name: str) -> None:
        seen.append(name)

    wait_for(later(resolved([see("a"), (see("b"), later(see("c")))])), 10.0)
    assert seen == ["a", "b", "c"]


def test_a_promise_that_is_broken_raises_what_it_came_to() -> None:
    async def fail() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        hand_over(lambda _: [None, fail()], {}, NAMES, 10.0)
    with pytest.raises(TimeoutError, match=r"a Future, which was not done within 0\.01 s"):
        hand_over(lambda _: Future(), {}, NAMES, 0.01)
