"""Handing weights over to a method of a user's own, and waiting until it has taken them.

What such a method returns may be a promise of its effect: a coroutine, a future of Python's or of
torch's, a reference of Ray's, or several in a list. Only when they are kept, the weights are taken.
"""

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from ...bus.receipt import State
from ...codecs.apply import as_tensors
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes


class Answer(NamedTuple):
    """What a worker did with a version.

    Attributes:
        state: As in a receipt.
        detail: Words about it.
        intact: What the worker ran before, it still runs, unless it runs this; else nothing.
    """

    state: State
    detail: str = ""
    intact: bool = True


Outcome: TypeAlias = Answer | list[Any]  # an answer, or references of Ray's that promise one


def weights_of(header: bytes, data: Bytes, *, nested: bool) -> Any:
    """Return a version's weights, in memory of their own: a TensorDict if `nested`, else a dict."""
    weights = as_tensors(Layout.parse(header), data)
    if not nested:
        return weights
    from tensordict import TensorDict

    return cast("Any", TensorDict)(weights).unflatten_keys(".")


def hand_over(
    method: Callable[..., Any], weights: Any, names: Sequence[str], timeout: float, **others: Any
) -> Answer:
    """Call a method with weights, wait until they are taken, and say so.

    Args:
        method: It.
        weights: They.
        names: What the method may call them.
        timeout: Seconds to wait for what it promises.
        **others: What else it is given.

    Raises:
        TimeoutError: What it promised did not happen in time.
        Exception: Whatever it raises, at once or later.
    """
    args, kwargs = arguments(method, weights, names)
    keep(method(*args, **kwargs, **others), timeout)
    return Answer("applied")


def arguments(
    method: Callable[..., Any], weights: Any, names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how a method takes weights: by the first of some names that it has, or by position.

    One that takes any name is given the first.
    """
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # not every callable can say
        return (weights,), {}
    kinds = {parameter.kind for parameter in parameters.values()}
    named = next((name for name in names if name in parameters), None)
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if named is None and not kinds & positional and inspect.Parameter.VAR_KEYWORD in kinds:
        named = names[0]
    return ((weights,), {}) if named is None else ((), {named: weights})


def keep(promised: Any, timeout: float) -> None:
    """Wait for what a call has returned, where that is a promise or several of them.

    Raises:
        TimeoutError: It was not kept in time.
        Exception: What it came to, if it failed.
    """
    deadline = time.monotonic() + timeout
    if isinstance(promised, (list, tuple)):
        for one in cast("Sequence[Any]", promised):
            keep(one, deadline - time.monotonic())
        return
    if inspect.iscoroutine(promised):
        came: Any = asyncio.run(_within(promised, timeout))
    elif (future := _future_of(promised)) is not None:
        done = threading.Event()

        def ended(_: object) -> None:
            done.set()

        future.add_done_callback(ended)
        if not done.wait(timeout):
            raise _broken(promised, timeout)
        came = future.result() if hasattr(future, "result") else future.wait()  # torch's
    else:
        return
    keep(came, deadline - time.monotonic())


def references(value: Any) -> list[Any]:
    """Return the references of Ray's that a value is, or lists."""
    ray: Any = sys.modules.get("ray")
    listed = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
    return [] if ray is None else [one for one in listed if isinstance(one, ray.ObjectRef)]


def _future_of(promised: Any) -> Any:
    if references(promised):
        return promised.future()
    return promised if hasattr(promised, "add_done_callback") else None


async def _within(promised: Any, timeout: float) -> Any:
    try:
        return await asyncio.wait_for(promised, timeout)
    except TimeoutError:
        raise _broken(promised, timeout) from None


def _broken(promised: Any, timeout: float) -> TimeoutError:
    return TimeoutError(
        f"it returned a {type(promised).__name__}, which was not done within {timeout:.3g} s"
    )
