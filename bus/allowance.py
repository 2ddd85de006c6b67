"""How much of something a peer may do at once, and how fast it may go on doing it."""

from dataclasses import dataclass
from typing import NamedTuple


class Rate(NamedTuple):
    """So much at once, and so much a second after that."""

    burst: float
    per_second: float


@dataclass(slots=True)
class Allowance:
    """What one peer has left; it begins with all that it may do at once."""

    rate: Rate
    at: float  # when it was looked at last
    spent: float = 0.0

    def take(self, count: float, now: float) -> bool:
        """Spend some; return False if that was more than there was."""
        back = (now - self.at) * self.rate.per_second
        self.spent, self.at = max(0.0, self.spent - back) + count, now
        if self.spent <= self.rate.burst:
            return True
        self.spent = self.rate.burst  # so that it recovers as soon as it stops
        return False

    def rested(self, now: float) -> bool:
        """Return whether all of it is back, so that a new one would be the same."""
        return (now - self.at) * self.rate.per_second >= self.spent
