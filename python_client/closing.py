"""How what has a thread or a connection ends: in a with block, by `close()`, or dropped without.

The thread of a publisher or subscriber that is dropped would run on and keep it alive for the other
side: it would be waited for, though nobody can ever call it again. So nothing that the thread holds
may hold its owner, and when that is collected the thread is told to end: it says goodbye and closes
the sockets, and nobody waits for it, since the garbage collector must not.

A forked child has a copy of the owner and none of its threads. The copy is marked as the child
begins, so each call of it can say so at the price of reading an attribute.
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
    """What is closed at the end of a with block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End it."""


class AsyncClosable(Closable):
    """What may be closed in a coroutine as well."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close_awaitable()

    @abstractmethod
    async def close_awaitable(self) -> None:
        """End it, and let the event loop go on meanwhile."""


class InOneProcess(AsyncClosable):
    """What works only in the process that made it; see `end_with`."""

    _process = 0  # that made it
    _inherited = False  # this is the copy that a forked child has

    def _belong_here(self) -> None:
        self._process = os.getpid()
        if not _owners_marked:
            _owners_marked.append(None)
            os.register_at_fork(after_in_child=_mark_copies)
        _owners.add(self)

    def _become_copy(self) -> None:
        """Refuse every call from now on; other threads may have held any lock, so take none."""
        self._inherited = True

    def _check_process(self) -> None:
        """Check that this process has made it.

        Raises:
            ClosedError: A process that was forked has not.
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
_owners_marked: list[None] = []  # once the interpreter has been asked to


def _mark_copies() -> None:
    for owner in list(_owners):
        owner._become_copy()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class Loop(Protocol):
    """A thread of ours."""

    def stop(self) -> bool:
        """Have it end; return False if somebody has done so before."""
        ...


def end_with(owner: InOneProcess, loop: Loop) -> None:
    """Have a loop end when its owner is collected; forked children get marked copies of it."""
    owner._belong_here()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    finalizer = weakref.finalize(owner, _end, loop, repr(owner), os.getpid())
    finalizer.atexit = False  # threads end with the process


def _end(loop: Loop, what: str, pid: int) -> None:
    if os.getpid() == pid and loop.stop():  # a forked child has no thread to end
        text = f"{what} was dropped without close(): call it, or use a with block"
        log.warning("%s", text)  # Python shows no ResourceWarning unless it is told to
        warnings.warn(text, ResourceWarning, stacklevel=2)
