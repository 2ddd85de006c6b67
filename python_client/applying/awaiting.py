"""Runs blocking calls in threads for coroutines; a cancelled call ends early and loses no result.

Each call has its own thread. The event loop's executor has few threads for all users, so a call
that waits for hours would block other users there.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

# seconds to wait for a cancelled call: its copy must end, but a hook may hang
OUTLAST_SECONDS = 10.0


class CancelToken:
    """Makes a waiting thread stop when its caller is cancelled: `token()` then returns True.

    Args:
        wake: A function that makes the thread check the token.
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
    """Run `work` in a new thread with this task's context, and return its result.

    Args:
        work: The function to call.
        name: The thread's name.
        cut: Called when this task is cancelled; makes `work` end soon. The task then waits until
            `work` has ended.
        keep: Called with the future of a cancelled call, once `work` has ended.
    """
    loop, over, future = asyncio.get_running_loop(), asyncio.Event(), Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also SystemExit: the awaiting task raises it
            future.set_exception(error)
        with suppress(RuntimeError):  # the event loop is closed
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
    """Wait for `over`, even if this task is cancelled again."""
    deadline = asyncio.get_running_loop().time() + OUTLAST_SECONDS
    while not over.is_set() and asyncio.get_running_loop().time() < deadline:
        with suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout_at(deadline):
                await over.wait()
