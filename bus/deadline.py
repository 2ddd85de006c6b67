"""Limits the time that work in steps, or a wait for the publisher's thread, may take."""

import time
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol, TypeVar

from .errors import ClosedError, DeadlineError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ANSWER_SECONDS = 5.0  # seconds that the thread has to answer after a call's deadline


class Deadline:
    """A time limit, and the text of the error that is raised after the limit.

    Args:
        at: The limit, as a time of the monotonic clock; infinity: no limit.
        text: A format string that says what was not done in time, and what to do about it.
        about: The values for the fields of `text`.
    """

    def __init__(self, at: float, text: str, **about: object) -> None:
        self._at, self._text, self._about = at, text, about

    def left(self) -> float:
        """Return the seconds that are left; 0 if the deadline has passed."""
        return max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raise an error if the deadline has passed.

        Raises:
            DeadlineError: The deadline has passed.
        """
        if time.monotonic() >= self._at:
            raise DeadlineError(self._text.format(**self._about) if self._about else self._text)


class FutureLike(Protocol[T_co]):
    """A future, or another object with these two methods of futures."""

    def result(self, timeout: float, /) -> T_co:
        """Wait at most `timeout` seconds for the result, and return it."""
        ...

    def done(self) -> bool:
        """Return whether the result is available."""
        ...


def result_of(future: FutureLike[T], timeout: float) -> T:
    """Wait for an answer of the publisher's thread, and return the answer.

    Raises:
        ClosedError: No answer came within `timeout` seconds.
    """
    try:
        return future.result(timeout)
    except FutureTimeout:
        if future.done():
            raise
        raise ClosedError(
            f"the publisher's thread has not answered for {timeout:.0f} s; it may be starved of "
            "processor time, or held up by a debugger"
        ) from None
