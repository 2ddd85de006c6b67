"""Awaiting in a coroutine what waits in a thread: cut short when cancelled, and nothing is lost.

Each call has a thread of its own. The event loop's executor has a few for everybody, and one that
waits there for hours would keep others out.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

OUTLAST_SECONDS = 10.0  # that a cancelled call is waited for: a copy has to end, a hook may hang


class CancelToken:
    """Has a thread stop waiting: its caller was cancelled.

    Args:
        wake: Has the thread look at the token.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake, self._cancelled = wake, False

    def __call__(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        self._cancelled = True
        self._wake()


async def in_thread(
    work: Callable[[], T],
    name: str,
    cut: Callable[[], object] | None = None,
    keep: "Callable[[Future[T]], object] | None" = None,
) -> T:
    """Do something in a thread of its own, with this task's context.

    Args:
        work: It.
        name: What the thread is called.
        cut: Called when the task is cancelled, so that `work` ends soon; that is waited for.
        keep: Takes what came of it nevertheless.
    """
    loop, over, future = asyncio.get_running_loop(), asyncio.Event(), Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also what would end a thread: it is for who awaits
            future.set_exception(error)
        with suppress(RuntimeError):  # the event loop is closed by now
            loop.call_soon_threadsafe(over.set)

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    try:
        await over.wait()
    except asyncio.CancelledError:
        if cut is not None:
            cut()
        await _outlast(over)
        if keep is not None:
            future.add_done_callback(keep)
        raise
    return future.result()


async def _outlast(over: asyncio.Event) -> None:
    """Wait for something, though this task is cancelled, and though it were once more."""
    deadline = asyncio.get_running_loop().time() + OUTLAST_SECONDS
    while not over.is_set() and asyncio.get_running_loop().time() < deadline:
        with suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout_at(deadline):
                await over.wait()
