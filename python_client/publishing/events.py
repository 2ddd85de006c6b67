"""Calls a user's function for the events of a publisher's or relay's workers."""

import os
from collections.abc import Callable

from ...bus.deadline import ANSWER_SECONDS, result_of
from ...bus.net.callbacks import EventCallback, WorkerEvent
from ...bus.net.publisher_loop import PublisherLoop
from .. import checks


def call_for_events(
    loop: PublisherLoop, callback: Callable[[WorkerEvent], object]
) -> Callable[[], None]:
    """Call `callback` for each worker and each change of one; return a function to end the calls.

    Raises:
        ClosedError: The loop has ended.
        TypeError: The callback is a coroutine function.
    """
    checks.hook(callback, "callback")
    listener, process = EventCallback(callback), os.getpid()
    try:
        result_of(loop.listen(listener), ANSWER_SECONDS)
    except BaseException:
        listener.end()
        raise

    def end() -> None:
        if os.getpid() == process:  # a forked child must not end the parent's calls
            loop.unlisten(listener)

    return end
