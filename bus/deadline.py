"""A deadline that is looked at between the steps of something long."""

import time

from .errors import DeadlineError


class Deadline:
    """A moment, and what to say when it has passed.

    Args:
        at: The moment, on the monotonic clock; infinity: never.
        text: What was not done by then, and what to do about it.
    """

    def __init__(self, at: float, text: str) -> None:
        self._at, self._text = at, text

    def left(self) -> float:
        """Return the seconds until then, 0 if it has passed."""
        return max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raise if it has passed.

        Raises:
            DeadlineError: It has.
        """
        if time.monotonic() >= self._at:
            raise DeadlineError(self._text)
