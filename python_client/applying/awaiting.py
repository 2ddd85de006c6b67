"""Runs blocking calls in threads for coroutines; a cancelled call ends early and loses no result.

Each call has its own thread: a call that waits for hours would occupy one of the few threads that
all code shares in the event loop's executor.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

# seconds to wait until a cancelled call ends: its copy must be complete, but a hook may hang
CANCEL_SECONDS = 10.0


class CancelToken:
    """Ends a thread's wait when its caller is cancelled: `token()` then returns True.

    Args:
        wake: A function that makes the waiting thread call the token.
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
    cancel: Callable[[], object] | None = None,
    keep: "Callable[[Future[T]], object] | None" = None,
) -> T:
    """Run `work` in a new thread with this task's context, and return its result.

    Args:
        work: The function to call.
        name: The thread's name.
        cancel: Called when this task is cancelled; makes `work` end soon. The task then waits until
            `work` has ended, but at most CANCEL_SECONDS.
        keep: Called with the future of a cancelled call, once `work` has ended.
    """
    loop, ended, future = asyncio.get_running_loop(), asyncio.Event(), Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also SystemExit: the awaiting task raises it
            future.set_exception(error)
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(ended.set)

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    try:
        await ended.wait()
    except asyncio.CancelledError:
        if cancel is not None:
            cancel()
        await _wait_cancelled(ended)
        if keep is not None:
            future.add_done_callback(keep)
        raise
    return future.result()


async def _wait_cancelled(ended: asyncio.Event) -> None:
    """Wait for `ended`, even if this task is cancelled again; at most CANCEL_SECONDS."""
    deadline = asyncio.get_running_loop().time() + CANCEL_SECONDS
    while not ended.is_set() and asyncio.get_running_loop().time() < deadline:
        with suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout_at(deadline):
                await ended.wait()
