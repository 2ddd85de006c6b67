"""Warnings of which there may be any number: one from time to time, and how many were not told."""

import logging

EVERY_SECONDS = 10.0  # between two warnings of one kind: a log of a day stays readable


class Complaints:
    """Warnings of one kind.

    Args:
        log: Where they go.
        text: What is said, with a %s for the reason.
    """

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log, self._text = log, text
        self._next_at = float("-inf")
        self._untold = 0

    def warn(self, reason: object, now: float) -> None:
        """Say it, unless it was said a moment ago."""
        if now < self._next_at:
            self._untold += 1
            return
        more = f" ({self._untold} times more since the last warning)" if self._untold else ""
        self._log.warning(self._text + "%s", reason, more)
        self._next_at, self._untold = now + EVERY_SECONDS, 0
