"""Decides which of two publishers started later, even if their clocks disagree.

Epochs order publishers by their start. A publisher's first epoch is the wall-clock time of its
start, which may be wrong. But a duration that one host measures is right. So a publisher sends
workers its age, and a worker sends other publishers the present age of the publisher whose weights
it runs. A publisher that is younger than this age started later, even if its clock differs, and may
move to a later epoch. Each age is measured before it is sent. So a delay can hide that a publisher
started later, but never prove it falsely.

An outdated publisher is older, so it cannot move to a later epoch in this way.

A worker may send any value. So a hello can raise an epoch only by as much as wrong clocks can
explain, and the pause before the next raise is longer each time.
"""

import math

from ..codecs.protocol_limits import INTEGER_MAX
from .limits import EPOCHS_KEPT
from .messages import Hello
from .protocol_limits import EPOCH_CLOCK_MAX, EPOCH_LEAP_MAX_MS

DRIFT = 1.001  # greatest ratio of two clocks' speeds: ten times the error of real clocks


class Ages:
    """The ages of the publishers whose weights a worker runs, or may still apply."""

    def __init__(self) -> None:
        self._started_by: dict[
            int, float
        ] = {}  # by epoch, the latest possible time of its publisher's start

    def record(self, epoch: int, age_ms: int, applied: int, now: float) -> None:
        """Record the age of an epoch's publisher.

        `applied` is the epoch of the version that the worker runs; older epochs are forgotten.
        """
        since = min(now - age_ms / 1000, self._started_by.get(epoch, now))
        kept = sorted(e for e in self._started_by if e >= applied)[: EPOCHS_KEPT - 1]
        self._started_by = {e: self._started_by[e] for e in kept} | {epoch: since}

    def of(self, epoch: int, now: float) -> int:
        """Return the least possible age, in milliseconds, of the publisher of an epoch."""
        return min(INTEGER_MAX, round((now - self._started_by.get(epoch, now)) * 1000))


def epoch_above(hello: Hello, age: float | None, started_ms: float) -> int | None:
    """Return the later epoch to which a hello allows a publisher to move; None if there is none.

    The new epoch is the hello's epoch plus the proven time between the starts of the two
    publishers. This is the epoch that the other publisher's clock would have given, so two
    successors of one publisher are in order.

    The new epoch is at most `EPOCH_LEAP_MAX_MS` after this publisher's start by its own clock,
    since clocks are not more wrong than that. At this bound successors are still in order, since a
    later start has a later bound. So no hello can prevent a successor from a later epoch.

    Args:
        hello: The hello of a worker that runs weights of a later epoch than the publisher's.
        age: Seconds since the publisher started; None: its user chose the epoch, so it is final.
        started_ms: When the publisher started, by its own clock, in milliseconds since 1970.
    """
    if age is None:
        return None
    later_by_ms = hello.age_ms - math.ceil(age * DRIFT * 1000)
    latest = min(math.floor(started_ms) + EPOCH_LEAP_MAX_MS, EPOCH_CLOCK_MAX)
    epoch = min(hello.epoch + later_by_ms, latest)
    return epoch if later_by_ms > 0 and epoch > hello.epoch else None  # P3


def contradiction(hello: Hello) -> str:
    """Return an error text if a hello contradicts itself; else an empty string."""
    for model, running in hello.models.items():
        if running is not None and running.epoch > hello.epoch:
            return (
                f"it runs version {running.version} of {model}, of epoch {running.epoch}, and says "
                f"that the latest epoch it applied from is {hello.epoch}: the worker must give the "
                "greatest epoch of all that it has applied"
            )
    return ""
