"""Token buckets: how many units a peer may use at once, and how many a second after that."""

from dataclasses import dataclass
from typing import NamedTuple


class Rate(NamedTuple):
    """The size of a bucket, and the units that flow into it each second."""

    burst: float
    per_second: float


@dataclass(slots=True)
class TokenBucket:
    """The units that one peer may use now; a new bucket is full."""

    rate: Rate
    at: float  # time of the last `take`
    spent: float = 0.0

    def take(self, count: float, now: float) -> bool:
        """Take `count` units; return False, and take none, if the bucket has fewer."""
        refilled = (now - self.at) * self.rate.per_second
        self.spent, self.at = max(0.0, self.spent - refilled), now
        if self.spent + count > self.rate.burst:
            return False
        self.spent += count
        return True

    def give_back(self, count: float) -> None:
        """Put units back."""
        self.spent = max(0.0, self.spent - count)

    def is_full(self, now: float) -> bool:
        """Return whether the bucket equals a new one, so that it can be dropped."""
        return (now - self.at) * self.rate.per_second >= self.spent
