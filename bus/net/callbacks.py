"""Calls the user's `on_worker` callbacks with events of workers, each in a thread of its own.

The publisher's thread only appends to a bounded queue, so a callback that is slow, hangs or raises
affects nothing else. If a callback is too slow, the oldest events are dropped, and the next event
has the number of dropped events.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..limits import EVENTS_MAX
from ..publisher.status import WorkerStatus

log = logging.getLogger("weightbus.publisher")

CLOSE_SECONDS = 1.0  # seconds that `close` waits for a callback to process queued events

EventKind = Literal["joined", "lost", "back", "stuck", "left", "refused", "failed"]
EVENT_KINDS = get_args(EventKind)


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A change of a worker.

    Attributes:
        kind: What happened. `joined`. `lost`: the worker's process ended, or its connection closed
            and no other opened, or the worker became silent. `stuck`: the worker answers, but makes
            no progress. `back`: the worker answers or makes progress again. `left`: the worker sent
            goodbye. `refused`: the publisher rejected the worker's hello (reported once a minute
            while the worker retries). `failed`: the worker could not apply a version that a publish
            waits for; `text` says why.
        worker: The worker's name.
        text: What happened and why, as text for people.
        status: The worker's entry in `workers()` at that moment; None if there was none.
        missed: How many events before this one were dropped because the callback was too slow.
            `workers()` has the current state.
    """

    __module__ = "weightbus.types"

    kind: EventKind
    worker: str
    text: str
    status: WorkerStatus | None
    missed: int = 0


Callback = Callable[[WorkerEvent], object]


class EventCallback:
    """One callback, with its queue of events."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._events: deque[WorkerEvent] = deque()
        self._missed = 0
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="weightbus-events", daemon=True)
        self._thread.start()

    def tell(self, event: WorkerEvent) -> None:
        """Queue an event, without blocking; after `end`, ignore the event."""
        with self._changed:
            if self._ended:
                return
            if len(self._events) >= EVENTS_MAX:
                self._events.popleft()
                self._missed += 1
            self._events.append(event)
            self._changed.notify()

    def end(self) -> None:
        """Accept no more events; queued events are still delivered."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Wait until all events are delivered, at most `timeout` seconds.

        A callback that calls this returns at once.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _next(self) -> WorkerEvent | None:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._ended)
            if not self._events:
                return None
            event, missed = self._events.popleft(), self._missed
            self._missed = 0
        return replace(event, missed=missed) if missed else event

    def _run(self) -> None:
        while (event := self._next()) is not None:
            try:
                self._callback(event)
            except BaseException:  # SystemExit, too: the thread goes on, as more events may follow
                log.exception("a callback of on_worker raised at: %s", event.text)
