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
        """Spend some; return False, and spend nothing, if there is less."""
        back = (now - self.at) * self.rate.per_second
        self.spent, self.at = max(0.0, self.spent - back), now
        if self.spent + count > self.rate.burst:
            return False
        self.spent += count
        return True

    def give_back(self, count: float) -> None:
        """Have some of it again."""
        self.spent = max(0.0, self.spent - count)

    def rested(self, now: float) -> bool:
        """Return whether all of it is back, so that a new one would be the same."""
        return (now - self.at) * self.rate.per_second >= self.spent
