"""How what has a thread or a connection ends: in a with block, by `close()`, or dropped without.

The thread of a publisher or subscriber that is dropped would run on and keep it alive for the other
side: it would be waited for, though nobody can ever call it again. So nothing that the thread holds
may hold its owner, and when that is collected the thread is told to end: it says goodbye and closes
the sockets, and nobody waits for it, since the garbage collector must not.
"""

import logging
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from typing import Protocol, Self

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


class Loop(Protocol):
    """A thread of ours."""

    def stop(self) -> bool:
        """Have it end; return False if somebody has done so before."""
        ...


def end_with(owner: object, loop: Loop) -> None:
    """Have a loop end when its owner is collected."""
    finalizer = weakref.finalize(owner, _end, loop, repr(owner), os.getpid())
    finalizer.atexit = False  # threads end with the process


def _end(loop: Loop, what: str, pid: int) -> None:
    if os.getpid() == pid and loop.stop():  # a forked child has no thread to end
        text = f"{what} was dropped without close(): call it, or use a with block"
        log.warning("%s", text)  # Python shows no ResourceWarning unless it is told to
        warnings.warn(text, ResourceWarning, stacklevel=2)
