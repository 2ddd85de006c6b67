"""Weights as objects of Ray: stored once per version, and handed to actors by reference.

A version is one flat array beside its layout, which every actor of a host reads in place. (Ray
pickles torch tensors through byte strings, which takes several times as long.)
"""

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from ...codecs.state import State, Writer
from .gathering import Answer
from .handing import Outcome, arguments, hand_over, keep, references, weights_of


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version in the object store: a reference to it, and the bytes of its tensors."""

    ref: Any
    nbytes: int


def as_sections(header: bytes, data: Bytes) -> Any:
    """Store a version as it is: whoever takes it up reads the store's own memory."""
    return header, data


@dataclass(frozen=True, slots=True)
class Weights:
    """A version that is weights wherever it is taken up, in memory of their own.

    Attributes:
        header, data: Its layout and its data section.
        nested: Whether they are a TensorDict; else a dict.
    """

    header: bytes
    data: Bytes
    nested: bool

    def __reduce__(self) -> Any:
        return partial(weights_of, nested=self.nested), (self.header, self.data)


class Store:
    """Puts states into the object store, by way of one buffer that is kept.

    Putting copies, so the buffer is free again as soon as a version is stored.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._buffer = np.empty(0, np.uint8)
        self._writer: Writer | None = None

    def put(self, state: State, form: Callable[[bytes, Bytes], Any] = as_sections) -> StoredVersion:
        """Store a state, as it is now, in some form.

        Raises:
            RuntimeError: Ray is not running in this process.
            StateError: The state cannot travel.
        """
        import ray

        if not ray.is_initialized():
            raise RuntimeError("Ray is not running in this process: call ray.init() first")
        layout = state.layout(self._layout)
        if self._writer is None or layout is not self._layout:
            self._buffer = np.empty(layout.nbytes, np.uint8)
            self._writer, self._layout = Writer(layout, self._buffer), layout
        self._writer.write(state)
        put = cast("Any", ray).put
        return StoredVersion(put(form(layout.header, self._buffer)), layout.nbytes)


def call(actor: Any, function: Callable[..., Outcome], *args: Any) -> "Future[Answer]":
    """Call `function(instance, *args)` in an actor's process; references among them are resolved.

    This works for any actor, whatever its class. The function returns an answer, or references,
    which are waited for.
    """
    answer: Future[Answer] = Future()
    _follow([actor.__ray_call__.remote(function, *args)], answer, promised=False)
    return answer


def answer_to(returned: Any, timeout: float) -> "Future[Answer]":
    """Return a future of what becomes of a call that a user's own code has made."""
    answer: Future[Answer] = Future()
    if pending := references(returned):
        _follow(pending, answer, promised=True)
        return answer
    try:
        keep(returned, timeout)
        answer.set_result(("applied", ""))
    except Exception as error:
        answer.set_exception(error)
    return answer


def _follow(pending: list[Any], answer: "Future[Answer]", *, promised: bool) -> None:
    """Resolve an answer when references, and those that they come to, are resolved."""
    first, *rest = pending

    def ended(done: "Future[Any]") -> None:
        try:
            value = done.result()
        except BaseException as error:
            answer.set_exception(error)
            return
        if more := [*references(value), *rest]:
            _follow(more, answer, promised=True)
        else:
            answer.set_result(("applied", "") if promised else value)

    cast("Future[Any]", first.future()).add_done_callback(ended)


def taken(
    method: Callable[..., Any], weights: Any, names: Sequence[str], timeout: float, **others: Any
) -> Outcome:
    """Hand weights over to a method of the actor that this runs in.

    Ray runs an `async def` in the actor's event loop, which gets nothing to do while this thread
    waits: then a reference is returned, for the caller to wait for.

    Raises:
        Exception: What `handing.hand_over` raises.
    """
    if not inspect.iscoroutinefunction(method):
        return hand_over(method, weights, names, timeout, **others)
    import ray

    me: Any = cast("Any", ray).get_runtime_context().current_actor
    args, kwargs = arguments(method, weights, names)
    return [getattr(me, method.__name__).remote(*args, **kwargs, **others)]


def explain(actor: Any, error: BaseException) -> Answer:
    """Say what it means that a call to an actor raised."""
    from ray.exceptions import RayActorError, RayTaskError

    task_error: Any = RayTaskError

    if isinstance(error, RayActorError):
        words = str(error).split("\tclass_name:")[0]  # Ray goes on for a page
        return "lost", f"{actor!r}: {' '.join(words.split())}"
    if isinstance(error, task_error):
        error = cast("Any", error).cause
    return "failed", f"{actor!r}: {type(error).__name__}: {error}"
