"""Closing publishers and subscribers: by a `with` block, by `close()`, or by garbage collection.

If the thread of a dropped publisher or subscriber kept running, the peers would still wait for that
process. So no object that the thread holds may refer to its owner, the publisher or subscriber.
When the owner is collected, the thread sends `bye`, closes the sockets and ends. The collector does
not wait for that.

A forked child has a copy of the owner and none of its threads. The copy is marked right after the
fork, so each call can detect a copy by reading one attribute.
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
    """An object that works only in the process that made it. `end_with` registers it."""

    _process = 0  # the pid of the process that made this object
    _inherited = False  # whether this object is the copy in a forked child

    def _belong_here(self) -> None:
        self._process = os.getpid()
        if not _owners_marked:
            _owners_marked.append(None)
            os.register_at_fork(after_in_child=_mark_copies)
        _owners.add(self)

    def _become_copy(self) -> None:
        """Make every later call raise. Take no lock: a thread of the parent may have held it."""
        self._inherited = True

    def _check_process(self) -> None:
        """Check that this process made the object.

        Raises:
            ClosedError: This is a forked child of that process.
        """
        if self._inherited:
            raise self._forked()

    def _forked(self) -> ClosedError:
        kind = type(self).__name__
        return ClosedError(
            f"this {kind.lower()} was made in process {self._process}, this is process "
            f"{os.getpid()}: sockets and threads do not survive a fork. Make a {kind} here, after "
            "the fork: in gunicorn's post_fork, the lifespan of an ASGI application, or Celery's "
            "worker_process_init (docs/guides/servers.md)"
        )


_owners: "weakref.WeakSet[InOneProcess]" = weakref.WeakSet()
_owners_marked: list[None] = []  # not empty once the fork handler is registered


def _mark_copies() -> None:
    for owner in list(_owners):
        owner._become_copy()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class Loop(Protocol):
    """The thread of a publisher or subscriber."""

    def stop(self) -> bool:
        """End the thread; return False if it was ended before."""
        ...


def end_with(owner: InOneProcess, *loops: Loop) -> None:
    """Stop `loops` when `owner` is garbage-collected; mark copies of `owner` in forked children."""
    owner._belong_here()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
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
