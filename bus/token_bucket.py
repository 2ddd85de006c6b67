"""Token buckets, which limit how many units a peer may use at once and per second."""

from dataclasses import dataclass
from typing import NamedTuple


class Rate(NamedTuple):
    """The units in a full bucket, and the units that are added to it each second."""

    burst: float
    per_second: float


@dataclass(slots=True)
class TokenBucket:
    """Counts the units that one peer may use now; a new bucket is full."""

    rate: Rate
    at: float  # time of the last `take`
    spent: float = 0.0

    def take(self, count: float, now: float) -> bool:
        """Take `count` units; if the bucket has fewer, take none and return False."""
        refilled = (now - self.at) * self.rate.per_second
        self.spent, self.at = max(0.0, self.spent - refilled), now
        if self.spent + count > self.rate.burst:
            return False
        self.spent += count
        return True

    def give_back(self, count: float) -> None:
        """Put `count` units back into the bucket."""
        self.spent = max(0.0, self.spent - count)

    def is_full(self, now: float) -> bool:
        """True if the bucket is full: it then equals a new bucket, so its record can be deleted."""
        return (now - self.at) * self.rate.per_second >= self.spent
