"""Writes log lines at a bounded rate: events of peers, and warnings that repeat."""

import logging

from ..codecs.words import printable
from .effects import Notice
from .token_bucket import Rate, TokenBucket

EVERY_SECONDS = 10.0  # seconds between two warnings of one kind

KIND_RATE = Rate(256, 8)  # log lines on one kind of event
WORKER_RATE = Rate(64, 1)  # log lines on one worker; a quarter of a kind's, to leave some to others
WORKER_BUCKETS_MAX = 1024  # workers with a bucket; further workers only use the kind's bucket


class EventLog:
    """Writes events to a log, one line each, at a bounded rate.

    Each kind of event has a token bucket, and each worker has a bucket for all kinds. So the events
    that one worker causes cannot hide other kinds of events, or events of other workers.

    Args:
        log: The log to write to. For structured logs, the attribute `weightbus` of each record has
            the kind and the worker.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, TokenBucket] = {}
        self._workers: dict[str, TokenBucket] = {}
        self._suppressed = RateLimitedWarning(log, "too many events to log each, such as: %s")

    def write(self, notice: Notice, now: float) -> None:
        """Log an event as one escaped line; if a bucket is empty, only count the event."""
        level = logging.WARNING if notice.warning else logging.INFO
        if not self._log.isEnabledFor(level):
            return
        line, about = printable(notice.text), {"kind": notice.kind, "worker": notice.worker}
        kind = self._kinds.get(notice.kind)
        if kind is None:
            kind = self._kinds[notice.kind] = TokenBucket(KIND_RATE, now)
        worker = self._bucket_of(notice.worker, now) if notice.worker else None
        if (worker is None or worker.take(1, now)) and kind.take(1, now):
            self._log.log(level, "%s", line, extra={"weightbus": about})
        else:
            self._suppressed.warn(line, now)

    def _bucket_of(self, worker: str, now: float) -> TokenBucket | None:
        """Return a worker's bucket; None if too many other workers have a bucket in use."""
        found = self._workers.get(worker)
        if found is None and len(self._workers) >= WORKER_BUCKETS_MAX:
            buckets = self._workers.items()
            self._workers = {name: bucket for name, bucket in buckets if not bucket.is_full(now)}
        if found is None and len(self._workers) < WORKER_BUCKETS_MAX:
            found = self._workers[worker] = TokenBucket(WORKER_RATE, now)
        return found


class RateLimitedWarning:
    """A warning that is logged at most once in `EVERY_SECONDS`, with a count of suppressed ones.

    Args:
        log: The log to write to.
        text: The warning's text, with a %s for the reason.
    """

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log, self._text = log, text
        self._next_at = float("-inf")
        self._suppressed = 0

    def warn(self, reason: object, now: float, cause: BaseException | None = None) -> None:
        """Log the warning, with the traceback of `cause`, if any; if it is too early, count it."""
        if now < self._next_at:
            self._suppressed += 1
            return
        count = self._suppressed
        more = f" ({count} times more since the last warning)" if count else ""
        self._log.warning(self._text + "%s", printable(str(reason)), more, exc_info=cause)
        self._next_at, self._suppressed = now + EVERY_SECONDS, 0
