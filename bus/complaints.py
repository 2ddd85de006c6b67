"""Warnings of which there may be any number: one from time to time, and how many were not told."""

import logging

from ..codecs.words import printable
from .allowance import Allowance, Rate
from .effects import Notice

EVERY_SECONDS = 10.0  # between two warnings of one kind: a log of a day stays readable

TOLD = Rate(256, 8)  # lines of one kind at once and a second: a day of a flood stays readable
TOLD_OF_ONE = Rate(64, 1)  # of these, of one worker: a quarter, so that it leaves room for others
WORKERS_TOLD = 1024  # that have an allowance; of more workers that of each kind is the bound


class Told:
    """What a log is told of what happens, one line each, and no more than can be read.

    Each kind of event has an allowance, and within all kinds each worker has one: what one worker
    makes happen any number of times leaves the lines of other kinds and of other workers.

    Args:
        log: Where it goes; a record has what it is about as `weightbus`, for structured logs.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, Allowance] = {}
        self._workers: dict[str, Allowance] = {}
        self._more = Complaints(log, "too much happens to tell all of it, such as: %s")

    def tell(self, notice: Notice, now: float) -> None:
        """Say it, unless too much was said lately; words of others are kept to one line."""
        level = logging.WARNING if notice.warning else logging.INFO
        if not self._log.isEnabledFor(level):
            return
        line, about = printable(notice.text), {"kind": notice.kind, "worker": notice.worker}
        kind = self._kinds.get(notice.kind)
        if kind is None:
            kind = self._kinds[notice.kind] = Allowance(TOLD, now)
        worker = self._of(notice.worker, now) if notice.worker else None
        if (worker is None or worker.take(1, now)) and kind.take(1, now):
            self._log.log(level, "%s", line, extra={"weightbus": about})
        else:
            self._more.warn(line, now)

    def _of(self, worker: str, now: float) -> Allowance | None:
        """Return the allowance of one worker; None if there are too many, of whom few say much."""
        found = self._workers.get(worker)
        if found is None and len(self._workers) >= WORKERS_TOLD:
            each = self._workers.items()
            self._workers = {name: spent for name, spent in each if not spent.rested(now)}
        if found is None and len(self._workers) < WORKERS_TOLD:
            found = self._workers[worker] = Allowance(TOLD_OF_ONE, now)
        return found


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

    def warn(self, reason: object, now: float, cause: BaseException | None = None) -> None:
        """Say it, unless it was said a moment ago; with its cause's traceback, if there is one."""
        if now < self._next_at:
            self._untold += 1
            return
        more = f" ({self._untold} times more since the last warning)" if self._untold else ""
        self._log.warning(self._text + "%s", printable(str(reason)), more, exc_info=cause)
        self._next_at, self._untold = now + EVERY_SECONDS, 0
