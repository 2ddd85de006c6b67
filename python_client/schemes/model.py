"""What is the user's: the model of a scheme, where it is found, and methods that take weights.

A model is given as it is, or found in a context (a collector, for example) each time it is needed,
by a path like "policy", "env.value_net" or "env.transform[0]". The context is held weakly, since it
usually holds the scheme.

What a method returns that is handed weights may be a promise of its effect: a coroutine, a future
of Python's or of torch's, a reference of Ray's, or several in a list. Only when they are kept, the
weights are taken.
"""

import asyncio
import inspect
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from ...bus.receipt import State
from ...codecs.apply import as_tensors
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from .carrier import TIMEOUT

log = logging.getLogger("weightbus.schemes")

POLICY = "policy"
_STEP = re.compile(r"\.?(?P<attribute>[^.\[\]]+)|\[(?P<key>[^\[\]]*)\]")


class Subject:
    """What a scheme is about: a model id, and the context or the model behind it."""

    def __init__(self, model_id: str | None = None) -> None:
        self.model_id = model_id
        self.given: object | None = None  # the model, if it was given as it is
        self.weights: Any = None  # to send, given apart from a model (sender)
        self.worker_idx: int | None = None  # which worker this is (receiver)
        self._context: Callable[[], object | None] = _nothing

    @property
    def context(self) -> object | None:
        """The context, while it lives."""
        return self._context()

    @context.setter
    def context(self, context: object | None) -> None:
        self._context = _nothing if context is None else weakref.ref(context)

    @property
    def forsaken(self) -> bool:
        """Whether there was a context, which is gone."""
        return self._context is not _nothing and self._context() is None

    def model(self) -> object | None:
        """Return the model; None where neither it nor a context was given, or AttributeError."""
        if self.given is not None:
            return self.given
        context = self.context
        if context is None or self.model_id is None:
            return None
        return model_in(context, self.model_id)

    def cascade(self, weights: Callable[[], object]) -> None:
        """Tell the context that its model has new weights, as TorchRL's collectors expect.

        A collector counts versions and passes weights on to collectors inside it. It can do so for
        its policy and for models that it has schemes for; of another it only counts the version.
        A context that counts no versions, like an inference server, is told of every model.

        Raises:
            Exception: What the context raises, at once or later.
        """
        context, model_id = self.context, self.model_id or POLICY
        update = getattr(context, "update_policy_weights_", None)
        if update is None:
            return
        schemes: object = getattr(context, "_weight_sync_schemes", None)
        increment = getattr(context, "increment_version", None)
        knows = model_id == POLICY or (isinstance(schemes, dict) and model_id in schemes)
        told: Any = (
            update(model_id=model_id, policy_or_weights=weights())
            if knows or increment is None
            else increment()
        )
        keep(told, TIMEOUT)


def model_in(context: object, model_id: str) -> object:
    """Return a context's model: an attribute path, or whatever its `get_model()` knows.

    Raises:
        AttributeError: There is none.
    """
    try:
        model = resolve(context, model_id)
    except AttributeError as nowhere:
        get_model = getattr(context, "get_model", None)
        if get_model is None:
            raise
        try:
            model = get_model(model_id)
        except KeyError:
            raise nowhere from None
    if model is None:
        raise AttributeError(f"Model {model_id} was `None` in context {context}")
    return model


def own_weights(subject: Subject, model_id: str, context: Any) -> Any:
    """Return the model that a subject is about, or the weights that stand for it."""
    if subject.weights is not None:
        return subject.weights
    if subject.given is not None or context is None:
        return subject.given
    cached = getattr(context, "get_cached_weights", None)
    if cached is not None and not is_torchrl(context):  # whose own may be of another device
        weights = cached(model_id)
        if weights is not None:
            return weights
    try:
        return model_in(context, model_id)
    except (AttributeError, KeyError):
        return getattr(context, "_fallback_policy", None) if model_id == POLICY else None


def is_torchrl(context: object) -> bool:
    """Tell whether a context is a collector of TorchRL's, with pipes and caches of its own use."""
    return hasattr(context, "policy_device")


def _nothing() -> None:
    return None


def resolve(context: object, path: str) -> object:
    """Return what an attribute path leads to, subscripts with numbers or strings included.

    Raises:
        AttributeError: A step of the path leads nowhere; the text says which.
        ValueError: The path cannot be read.
    """
    at, found = 0, context
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise ValueError(
                f"{path!r} cannot be read from {path[at:]!r} on; write it like env.transform[0]"
            )
        found = _step(found, step, path)
        at = step.end()
    return found


def _step(found: object, step: re.Match[str], path: str) -> object:
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


# Methods that take weights.


class Answer(NamedTuple):
    """What a worker did with a version."""

    state: State
    detail: str = ""
    intact: bool = True  # it still runs what it ran before, unless it runs this; else nothing


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
    """Call a method with weights, by one of their names, wait until they are taken, and say so.

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
    """Return how a method takes weights: by the first name that it has or takes, or by position."""
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
    """Wait for what a call has returned, where that is a promise or several; raise its failure."""
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
    kind: Any = getattr(sys.modules.get("ray"), "ObjectRef", None)  # while it is imported, too
    listed = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
    return [] if kind is None else [one for one in listed if isinstance(one, kind)]


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
