"""Which of two publishers is the later one, where their clocks disagree.

Epochs order publishers by when they started. They begin as wall-clock time, which may be wrong;
what cannot be is a duration, measured at one place. A publisher tells workers its age, and a worker
tells other publishers how old the one is by now whose weights it runs. One that is younger than
that started later, whatever the clocks say, and may take a later epoch. Both ages are measured
before they travel, so a delay only makes the proof harder to give.

An outdated publisher cannot prove the same of a newer one: it is older than that ever was.

A worker may say anything. So its word moves an epoch upwards only, no further than the clocks of
hosts can explain, and ever less often.
"""

import math

from .limits import EPOCH_CLOCK_MAX, EPOCH_LEAP_MAX_MS, EPOCHS_KEPT, INTEGER_MAX
from .messages import Hello

DRIFT = 1.001  # a second of one host in those of another: clocks are off by a tenth of that


class Ages:
    """How old the publishers are whose weights run at a worker, or may yet be applied there."""

    def __init__(self) -> None:
        self._since: dict[
            int, float
        ] = {}  # by epoch, when its publisher had started, at the latest

    def heard(self, epoch: int, age_ms: int, applied: int, now: float) -> None:
        """The publisher of an epoch says its age; weights of the epoch `applied` run here."""
        since = min(now - age_ms / 1000, self._since.get(epoch, now))
        kept = sorted(e for e in self._since if e >= applied)[: EPOCHS_KEPT - 1]
        self._since = {e: self._since[e] for e in kept} | {epoch: since}

    def of(self, epoch: int, now: float) -> int:
        """Return for how many milliseconds, at least, the publisher of an epoch has run."""
        return min(INTEGER_MAX, round((now - self._since.get(epoch, now)) * 1000))


def epoch_above(hello: Hello, age: float | None, started_ms: float) -> int | None:
    """Return the epoch that a publisher may take in place of a worker's; None: it may take none.

    It is higher by as much as is proven of the time between the starts of the two. So it lies where
    the first one's clock would have put it, and two successors of one publisher are in order.

    A worker's word moves it no further ahead of this publisher's own clock than clocks are wrong.
    At that bound successors are still in order, as the bound of each is as much later as its start;
    and each can take an epoch above that of the one before, or this word would shut it out.

    Args:
        hello: What a worker says that runs weights of a later epoch than the publisher's.
        age: Seconds since the publisher started; None: its epoch was chosen, and is final.
        started_ms: When the publisher started by its own clock, in milliseconds since 1970.
    """
    if age is None:
        return None
    later_by_ms = hello.age_ms - math.ceil(age * DRIFT * 1000)
    latest = min(math.floor(started_ms) + EPOCH_LEAP_MAX_MS, EPOCH_CLOCK_MAX)
    epoch = min(hello.epoch + later_by_ms, latest)
    return epoch if later_by_ms > 0 and epoch > hello.epoch else None  # P3


def contradiction(hello: Hello) -> str:
    """Say how a hello contradicts itself; empty: it does not."""
    for model, running in hello.models.items():
        if running is not None and running.epoch > hello.epoch:
            return (
                f"it runs version {running.version} of {model}, of epoch {running.epoch}, and says "
                f"that the latest epoch it applied from is {hello.epoch}: the worker must give the "
                "greatest epoch of all that it has applied"
            )
    return ""
