"""Finds the model of a scheme, and calls the user's methods that accept weights.

Either the user passes the model itself, or the scheme looks it up in a context (a collector, for
example) on each use, by a path like "policy", "env.value_net" or "env.transform[0]". The scheme has
a weak reference to the context, since the context usually refers to the scheme.

A method that gets weights may return an awaitable: a coroutine, a Python or torch future, a Ray
reference, or a list of these. The weights count as applied when every awaitable is done.
"""

import asyncio
import inspect
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from ...bus.receipt import State
from ...codecs.apply import as_tensors
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from .transport import TIMEOUT

log = logging.getLogger("weightbus.schemes")

POLICY = "policy"
_STEP = re.compile(r"\.?(?P<attribute>[^.\[\]]+)|\[(?P<key>[^\[\]]*)\]")


class ModelReference:
    """The model id of a scheme, and its model or the context that has the model."""

    def __init__(self, model_id: str | None = None) -> None:
        self.model_id = model_id
        self.given: object | None = None  # the model, if the user passed the model itself
        self.weights: Any = None  # on a sender: weights that were passed without a model
        self.worker_idx: int | None = None  # the id of this worker; None on a sender
        self._context: Callable[[], object | None] = _nothing

    @property
    def context(self) -> object | None:
        """The context; None if none was given or it was garbage-collected."""
        return self._context()

    @context.setter
    def context(self, context: object | None) -> None:
        self._context = _nothing if context is None else weakref.ref(context)

    @property
    def context_collected(self) -> bool:
        """Whether there was a context that was garbage-collected."""
        return self._context is not _nothing and self._context() is None

    def model(self) -> object | None:
        """Return the model; None if neither a model nor a context was given.

        Raises:
            AttributeError: The context has no such model.
        """
        if self.given is not None:
            return self.given
        context = self.context
        if context is None or self.model_id is None:
            return None
        return model_in(context, self.model_id)

    def source(self, model_id: str, context: Any) -> Any:
        """Return the weights or model that a send without weights sends; None if there are none.

        They are those that the user passed, else those in the context.
        """
        if self.weights is not None:
            return self.weights
        if self.given is not None or context is None:
            return self.given
        cached = getattr(context, "get_cached_weights", None)
        # Do not use the cache of TorchRL's collectors: its weights may be on another device.
        if cached is not None and not is_torchrl(context):
            weights = cached(model_id)
            if weights is not None:
                return weights
        try:
            return model_in(context, model_id)
        except (AttributeError, KeyError):
            return getattr(context, "_fallback_policy", None) if model_id == POLICY else None

    def notify_context(self, weights: Callable[[], object]) -> None:
        """Notify the context that its model has new weights, as TorchRL's collectors expect.

        A collector gets the weights of its policy and of models for which it has schemes: it counts
        the version, and forwards the weights to its inner collectors. For other models it only
        counts the version. A context that counts no versions, such as an inference server, gets the
        weights of every model.

        Raises:
            Exception: The error of the context's method or of the awaitable that it returns.
        """
        context, model_id = self.context, self.model_id or POLICY
        update = getattr(context, "update_policy_weights_", None)
        if update is None:
            return
        schemes: object = getattr(context, "_weight_sync_schemes", None)
        increment = getattr(context, "increment_version", None)
        forwards = model_id == POLICY or (isinstance(schemes, dict) and model_id in schemes)
        returned: Any = (
            update(model_id=model_id, policy_or_weights=weights())
            if forwards or increment is None
            else increment()
        )
        wait_for(returned, TIMEOUT)


# Paths in a context.


def model_in(context: object, model_id: str) -> object:
    """Return a context's model: at attribute path `model_id`, or the result of its `get_model()`.

    Raises:
        AttributeError: The context has no such model.
    """
    try:
        model = resolve(context, model_id)
    except AttributeError as not_found:
        get_model = getattr(context, "get_model", None)
        if get_model is None:
            raise
        try:
            model = get_model(model_id)
        except KeyError:
            raise not_found from None
    if model is None:
        raise AttributeError(f"Model {model_id} was `None` in context {context}")
    return model


def is_torchrl(context: object) -> bool:
    """Return whether a context is a TorchRL collector: schemes must not use its pipes and cache."""
    return hasattr(context, "policy_device")


def _nothing() -> None:
    return None


def resolve(context: object, path: str) -> object:
    """Return the object at an attribute path, which may have subscripts (numbers, strings).

    Raises:
        AttributeError: A step of the path does not exist; the text names the step.
        ValueError: The path is malformed.
    """
    at, found = 0, context
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise ValueError(
                f"{path!r} is malformed from {path[at:]!r} on; write it like env.transform[0]"
            )
        found = _step(found, step, path)
        at = step.end()
    return found


def _step(found: object, step: re.Match[str], path: str) -> object:
    # Return the object that one step of the path leads to: an attribute, or an item.
    attribute, key = step["attribute"], step["key"]
    if attribute is not None:
        try:
            return getattr(found, attribute)
        except AttributeError:
            raise AttributeError(
                f"{path!r}: a {type(found).__name__} has no attribute {attribute!r}"
            ) from None
    index: int | str = int(key) if re.fullmatch(r"-?\d+", key) else key.strip("'\"")
    try:
        return found[index]  # type: ignore[index]
    except (LookupError, TypeError) as error:
        raise AttributeError(f"{path!r}: no [{key}] in a {type(found).__name__}: {error}") from None


# Methods that accept weights.


class CallResult(NamedTuple):
    """The result of applying a version on one worker."""

    state: State
    detail: str = ""
    # False: the apply failed after it began to write, so the model cannot be used
    intact: bool = True


Outcome: TypeAlias = CallResult | list[Any]  # a result, or Ray references that resolve to a result


def weights_of(header: bytes, data: Bytes, *, nested: bool) -> Any:
    """Return a copy of a version's weights: a TensorDict if `nested`, else a dict."""
    weights = as_tensors(Layout.parse(header), data)
    if not nested:
        return weights
    from tensordict import TensorDict

    return cast("Any", TensorDict)(weights).unflatten_keys(".")


def hand_over(
    method: Callable[..., Any], weights: Any, names: Sequence[str], timeout: float, **others: Any
) -> CallResult:
    """Call a method with weights, and wait for the awaitable that it returns, if any.

    The method gets the arguments that `arguments()` returns, and `others` as keyword arguments.

    Raises:
        TimeoutError: The awaitable that the method returned was not done in time.
        Exception: The error of the method or of the awaitable.
    """
    args, kwargs = arguments(method, weights, names)
    wait_for(method(*args, **kwargs, **others), timeout)
    return CallResult("applied")


def arguments(
    method: Callable[..., Any], weights: Any, names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that pass weights to a method.

    The weights are passed as the first of `names` that is a parameter, or by position.
    """
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return (weights,), {}
    kinds = {parameter.kind for parameter in parameters.values()}
    named = next((name for name in names if name in parameters), None)
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    if named is None and not kinds & positional and inspect.Parameter.VAR_KEYWORD in kinds:
        named = names[0]
    return ((weights,), {}) if named is None else ((), {named: weights})


def wait_for(returned: Any, timeout: float) -> None:
    """Wait for an awaitable, or for each of a list; raise the first error. Ignore other values."""
    deadline = time.monotonic() + timeout
    if isinstance(returned, (list, tuple)):
        for one in cast("Sequence[Any]", returned):
            wait_for(one, deadline - time.monotonic())
        return
    if inspect.iscoroutine(returned):
        result: Any = asyncio.run(_within(returned, timeout))
    elif (future := _future_of(returned)) is not None:
        done = threading.Event()

        def ended(_: object) -> None:
            done.set()

        future.add_done_callback(ended)
        if not done.wait(timeout):
            raise _not_done(returned, timeout)
        result = future.result() if hasattr(future, "result") else future.wait()  # a torch future
    else:
        return
    wait_for(result, deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that a coroutine raised."""

    error: Exception


def run_together(coroutines: list[Coroutine[Any, Any, Any]], timeout: float) -> list[Any]:
    """Run coroutines at the same time; return the result of each, or its `Failure`."""

    async def outcome(coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await _within(coroutine, timeout)
        except Exception as error:
            return Failure(error)

    async def outcomes() -> list[Any]:
        return await asyncio.gather(*map(outcome, coroutines))

    whole = outcomes()
    try:
        return asyncio.run(whole)
    except RuntimeError as error:  # an event loop is running in this thread
        for each in (whole, *coroutines):
            each.close()
        return [Failure(error)] * len(coroutines)


def references(value: Any) -> list[Any]:
    """Return the Ray references in a value: one reference, or a list with some references."""
    kind: Any = getattr(sys.modules.get("ray"), "ObjectRef", None)  # None during Ray's own import
    listed = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
    return [] if kind is None else [one for one in listed if isinstance(one, kind)]


def _future_of(returned: Any) -> Any:
    if references(returned):
        return returned.future()
    return returned if hasattr(returned, "add_done_callback") else None


async def _within(returned: Any, timeout: float) -> Any:
    try:
        return await asyncio.wait_for(returned, timeout)
    except TimeoutError:
        raise _not_done(returned, timeout) from None


def _not_done(returned: Any, timeout: float) -> TimeoutError:
    return TimeoutError(
        f"it returned a {type(returned).__name__}, which was not done within {timeout:.3g} s"
    )
