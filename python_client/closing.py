"""Closes publishers, subscribers and relays: by `with`, by `close()`, or by garbage collection.

If the thread of a dropped publisher or subscriber kept running, the peers would still wait for that
process. So the thread must not hold a reference to its owner, the publisher or subscriber. When the
owner is garbage-collected, the thread sends `bye`, closes the sockets and ends; the garbage
collector does not wait for the thread.

A forked child has a copy of the owner, but not the owner's threads. The copy is marked right after
the fork, so each call can detect a copy by reading one attribute.
"""

import logging
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from typing import Protocol, Self

from ..bus.errors import ClosedError

log = logging.getLogger("weightbus")


class Closable(ABC):
    """An object that is closed at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the object."""


class AsyncClosable(Closable):
    """An object that can also be closed from a coroutine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close_awaitable()

    @abstractmethod
    async def close_awaitable(self) -> None:
        """Close the object without blocking the event loop."""


class InOneProcess(AsyncClosable):
    """An object that works only in the process that made it. `stop_with` registers it."""

    _process = 0  # the pid of the process that made this object
    _is_forked_copy = False  # whether this object is the copy in a forked child

    def _register(self) -> None:
        self._process = os.getpid()
        if not _fork_handlers:
            _fork_handlers.append(None)
            os.register_at_fork(after_in_child=_mark_copies)
        _owners.add(self)

    def _mark_as_copy(self) -> None:
        """Make every later call raise. Take no lock: a thread of the parent may have held it."""
        self._is_forked_copy = True

    def _check_process(self) -> None:
        """Check that this process made the object.

        Raises:
            ClosedError: This is a forked child of that process.
        """
        if self._is_forked_copy:
            raise self._fork_error()

    def _fork_error(self) -> ClosedError:
        kind = type(self).__name__
        return ClosedError(
            f"this {kind.lower()} was made in process {self._process}, this is process "
            f"{os.getpid()}: sockets and threads do not survive a fork. Make a {kind} here, after "
            "the fork: in gunicorn's post_fork, the lifespan of an ASGI application, or Celery's "
            "worker_process_init (docs/guides/servers.md)"
        )


_owners: "weakref.WeakSet[InOneProcess]" = weakref.WeakSet()
_fork_handlers: list[None] = []  # not empty once the fork handler is registered


def _mark_copies() -> None:
    for owner in list(_owners):
        owner._mark_as_copy()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class Loop(Protocol):
    """The thread of a publisher, a relay or a subscriber."""

    def stop(self) -> bool:
        """Tell the thread to end; return False if it was stopped before."""
        ...


def stop_with(owner: InOneProcess, *loops: Loop) -> None:
    """Stop `loops` when `owner` is garbage-collected; mark copies of `owner` in forked children."""
    owner._register()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    finalizer = weakref.finalize(owner, _end, loops, repr(owner), os.getpid())
    finalizer.atexit = False  # threads end with the process


def _end(loops: tuple[Loop, ...], what: str, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has no thread to end
        return
    stopped = [loop.stop() for loop in loops]
    if any(stopped):
        text = f"{what} was dropped without close(): call it, or use a with block"
        log.warning("%s", text)  # by default Python does not show a ResourceWarning
        warnings.warn(text, ResourceWarning, stacklevel=2)
