"""Weights as objects of Ray: stored once per version, and handed to actors by reference.

A version is one flat array beside its layout, which every actor of a host reads in place. (Ray
pickles torch tensors through byte strings, which takes several times as long.)
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ...codecs.layout import Layout
from ...codecs.state import State, Writer
from .gathering import Answer


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version in the object store: a reference to its layout's header and its data section."""

    ref: Any
    nbytes: int


class Store:
    """Puts states into the object store, by way of one buffer that is kept.

    Putting copies, so the buffer is free again as soon as a version is stored.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._buffer = np.empty(0, np.uint8)
        self._writer: Writer | None = None

    def put(self, state: State) -> StoredVersion:
        """Store a state, as it is now.

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
        return StoredVersion(put((layout.header, self._buffer)), layout.nbytes)


def call(actor: Any, function: Callable[..., Answer], *args: Any) -> "Future[Answer]":
    """Call `function(instance, *args)` in an actor's process; references among them are resolved.

    This works for any actor, whatever its class.
    """
    return cast("Future[Answer]", actor.__ray_call__.remote(function, *args).future())


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
