"""Calls the user's code, with a deadline for each call. (W24)

A call runs in the thread that makes it, and cannot be stopped. If its deadline passes, another
thread reports the failure, and the result of the call is ignored.
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


class OverdueError(Exception):
    """Raised when a call ends after its deadline. `failure`: the error that was reported then."""

    def __init__(self, failure: ApplyError) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(eq=False)
class _Call:
    """A call in progress: its `deadline`, and a function that reports that this has passed."""

    deadline: float
    report_overdue: Callable[[], ApplyError]
    failure: ApplyError | None = None  # the error that `report_overdue` returned
    reporter: threading.Thread | None = None  # the thread that calls `report_overdue`

    def report(self) -> None:
        """Report that the deadline has passed."""
        self.failure = self.report_overdue()


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

    def make(self, work: Callable[[], T], report_overdue: Callable[[], ApplyError]) -> T:
        """Call the user's code and return its result; only one thread at a time does so.

        Args:
            work: The user's code.
            report_overdue: A function that reports the failure and returns the error. Another
                thread calls it if `work` has not returned by the deadline.

        Raises:
            OverdueError: `work` returned, or raised an Exception, after the deadline.
            BaseException: `work` raised an Exception before the deadline, or, at any time, an
                exception of another class, such as SystemExit.
        """
        with self._turn:
            return self._make(_Call(time.monotonic() + self.seconds, report_overdue), work)

    def _make(self, call: _Call, work: Callable[[], T]) -> T:
        with self._lock:
            self._under_way.add(call)
        try:
            result = work()
        except Exception as error:
            self._end(call, error)
            raise
        except BaseException:
            with self._lock:
                self._under_way.discard(call)
            if call.reporter is not None:  # both undo the apply: this thread after the reporter
                call.reporter.join()
            raise
        self._end(call, "it has returned")
        return result

    def _end(self, call: _Call, how: object) -> None:
        with self._lock:
            self._under_way.discard(call)
        if call.reporter is not None:
            call.reporter.join()
            assert call.failure is not None  # noqa: S101 - `report_overdue` does not fail
            log.warning("%s; too late: %r", call.failure, how)
            raise OverdueError(call.failure) from (how if isinstance(how, Exception) else None)

    def look(self) -> None:
        """Check the calls' deadlines. The worker's thread does this often: it must not block."""
        if not self._under_way:
            return
        with self._lock:
            now = time.monotonic()
            for call in self._under_way:
                if call.reporter is None and now >= call.deadline:
                    thread = threading.Thread(target=call.report, name="weightbus-overdue")
                    thread.daemon = True
                    # no thread can be started: retry at the next check
                    with suppress(RuntimeError):
                        thread.start()
                        call.reporter = thread
