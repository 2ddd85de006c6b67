"""Calls of the user's code, which have a deadline. (W24)

A call runs in the thread that makes it, and nobody can end it. Once its time is over that is said
for it, in another thread, and whatever it returns later counts for nothing.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ..bus.errors import ApplyError

log = logging.getLogger("weightbus.subscriber")

T = TypeVar("T")


class LateError(Exception):
    """A call has returned after its deadline; `told` is what was said then."""

    def __init__(self, told: ApplyError) -> None:
        super().__init__(str(told))
        self.told = told


@dataclass(eq=False)
class _Call:
    """A call that is under way, and what becomes of it when its time is over."""

    due: float
    give_up: Callable[[], ApplyError]
    told: ApplyError | None = None
    giving_up: threading.Thread | None = None

    def over(self) -> None:
        """Say that its time is over."""
        self.told = self.give_up()


class Calls:
    """The calls of one subscriber.

    Args:
        seconds: How long each may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._turn = threading.RLock()  # files are written by threads of their own, side by side
        self._lock = threading.Lock()
        self._under_way: set[_Call] = set()

    @property
    def under_way(self) -> bool:
        """Whether any of the user's code runs."""
        return bool(self._under_way)

    def make(self, work: Callable[[], T], give_up: Callable[[], ApplyError]) -> T:
        """Call the user's code, which only one thread does at a time.

        Args:
            work: It.
            give_up: Called in another thread if the time is over before it returns; says so.

        Raises:
            LateError: It has returned, or raised, only after that.
            BaseException: What it raised in time, or what is no Exception: it ends a thread.
        """
        with self._turn:
            return self._make(_Call(time.monotonic() + self.seconds, give_up), work)

    def _make(self, call: _Call, work: Callable[[], T]) -> T:
        with self._lock:
            self._under_way.add(call)
        try:
            done = work()
        except Exception as error:
            self._end(call, error)
            raise
        except BaseException:
            with self._lock:
                self._under_way.discard(call)
            if call.giving_up is not None:  # what it puts back is not to be put back twice at once
                call.giving_up.join()
            raise
        self._end(call, "it has returned")
        return done

    def _end(self, call: _Call, how: object) -> None:
        with self._lock:
            self._under_way.discard(call)
        if call.giving_up is not None:
            call.giving_up.join()
            assert call.told is not None  # noqa: S101 - `give_up` does not fail
            log.warning("%s; too late: %r", call.told, how)
            raise LateError(call.told) from (how if isinstance(how, Exception) else None)

    def look(self) -> None:
        """See whose time is over. (For the worker's thread, often; it must not wait.)"""
        if not self._under_way:
            return
        with self._lock:
            now = time.monotonic()
            for call in self._under_way:
                if call.giving_up is None and now >= call.due:
                    thread = threading.Thread(target=call.over, name="weightbus-overdue")
                    thread.daemon = True
                    with suppress(RuntimeError):  # there are too many threads: next time, then
                        thread.start()
                        call.giving_up = thread
