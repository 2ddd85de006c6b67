"""Deadlines: one that is looked at between the steps of something long, and one for an answer."""

import time
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol, TypeVar

from .errors import ClosedError, DeadlineError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ANSWER_SECONDS = 5.0  # beyond its deadline, what a call allows the background thread to answer


class Deadline:
    """A moment, and what to say when it has passed.

    Args:
        at: The moment, on the monotonic clock; infinity: never.
        text: What was not done by then, and what to do about it.
        about: What it is about, by the names that `text` has for that.
    """

    def __init__(self, at: float, text: str, **about: object) -> None:
        self._at, self._text, self._about = at, text, about

    def left(self) -> float:
        """Return the seconds until then, 0 if it has passed."""
        return max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raise if it has passed.

        Raises:
            DeadlineError: It has.
        """
        if time.monotonic() >= self._at:
            raise DeadlineError(self._text.format(**self._about) if self._about else self._text)


class Answer(Protocol[T_co]):
    """A future, or what is like one to whoever waits."""

    def result(self, timeout: float, /) -> T_co:
        """Wait for it."""
        ...

    def done(self) -> bool:
        """Return whether it is here."""
        ...


def result_of(future: Answer[T], timeout: float) -> T:
    """Wait for the publisher's thread, which answers in time unless something is badly wrong."""
    try:
        return future.result(timeout)
    except FutureTimeout:
        if future.done():
            raise
        raise ClosedError(
            f"the publisher's thread has not answered for {timeout:.0f} s; it may be starved of "
            "processor time, or held up by a debugger"
        ) from None
