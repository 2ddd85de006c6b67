"""Calls the user's code, with a deadline for each call. (W24)

A call runs in the thread that makes it, and cannot be stopped. When its deadline passes, another
thread reports the failure, and the result of the call is then ignored.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ...bus.errors import ApplyError

log = logging.getLogger("weightbus.subscriber")

T = TypeVar("T")


class LateError(Exception):
    """Raised when a call returns after its deadline, with `failure`, the error reported then."""

    def __init__(self, failure: ApplyError) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(eq=False)
class _Call:
    """A call in progress: its deadline `due`, and `give_up`, which reports a missed deadline."""

    due: float
    give_up: Callable[[], ApplyError]
    failure: ApplyError | None = None  # the error that `give_up` returned
    giving_up: threading.Thread | None = None  # the thread that calls `give_up`

    def over(self) -> None:
        """Report that the deadline has passed."""
        self.failure = self.give_up()


class Calls:
    """Makes the calls of one subscriber, and watches their deadlines.

    Args:
        seconds: The time limit of each call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # only one call runs at a time, though several threads write files
        self._turn = threading.RLock()
        self._lock = threading.Lock()
        self._under_way: set[_Call] = set()

    @property
    def under_way(self) -> bool:
        """Whether any call is in progress."""
        return bool(self._under_way)

    def make(self, work: Callable[[], T], give_up: Callable[[], ApplyError]) -> T:
        """Call the user's code and return its result; only one thread at a time does so.

        Args:
            work: The user's code.
            give_up: A function that reports the failure and returns the error. Another thread calls
                it if `work` has not returned by the deadline.

        Raises:
            LateError: `work` returned, or raised an Exception, after the deadline.
            BaseException: `work` raised it before the deadline; or, at any time, `work` raised an
                error that is not an Exception.
        """
        with self._turn:
            return self._make(_Call(time.monotonic() + self.seconds, give_up), work)

    def _make(self, call: _Call, work: Callable[[], T]) -> T:
        # Run `work` as the call `call`; see `make`.
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
            if call.giving_up is not None:  # its undo ends before the caller undoes
                call.giving_up.join()
            raise
        self._end(call, "it has returned")
        return done

    def _end(self, call: _Call, how: object) -> None:
        with self._lock:
            self._under_way.discard(call)
        if call.giving_up is not None:
            call.giving_up.join()
            assert call.failure is not None  # noqa: S101 - `give_up` does not fail
            log.warning("%s; too late: %r", call.failure, how)
            raise LateError(call.failure) from (how if isinstance(how, Exception) else None)

    def look(self) -> None:
        """Check the calls' deadlines. The worker's thread does this often: it must not block."""
        if not self._under_way:
            return
        with self._lock:
            now = time.monotonic()
            for call in self._under_way:
                if call.giving_up is None and now >= call.due:
                    thread = threading.Thread(target=call.over, name="weightbus-overdue")
                    thread.daemon = True
                    # no thread can be started: retry at the next check
                    with suppress(RuntimeError):
                        thread.start()
                        call.giving_up = thread
