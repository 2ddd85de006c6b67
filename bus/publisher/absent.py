"""Who is not there, and why: those that left in order, and those that were refused.

A publisher knows nothing else of them. It is kept so that a publish to nobody can say whom it does
not reach; the oldest go first.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ..limits import ABSENT_MAX, ABSENT_SECONDS, CROWDED_SECONDS


@dataclass(frozen=True, slots=True)
class Absence:
    """One worker that is not there."""

    models: frozenset[str]
    code: str
    text: str
    at: float


class Absent:
    """The workers that have left one publisher, or that it refuses.

    Attributes:
        crowded: Whom it has turned away unheard, for want of descriptors; empty: nobody.
    """

    def __init__(self) -> None:
        self._known: dict[str, Absence] = {}  # by name, the oldest first
        self.crowded, self._crowded_at = "", float("-inf")

    def note(self, name: str, models: Collection[str], code: str, text: str, now: float) -> bool:
        """Remember why a worker is not there; return whether that is news.

        A worker that is refused asks again and again, and anybody can ask under any number of
        names: a name is news once in a while, and so are only so many names.
        """
        before = self._known.get(name)
        if before is None and len(self._known) >= ABSENT_MAX:
            oldest = next(iter(self._known))
            if now - self._known[oldest].at < ABSENT_SECONDS:
                return False
            del self._known[oldest]
        if before is not None and before.code == code and now - before.at < ABSENT_SECONDS:
            return False
        self._known.pop(name, None)
        self._known[name] = Absence(frozenset(models), code, text, now)
        return True

    def forget(self, name: str) -> None:
        """A worker is there."""
        self._known.pop(name, None)

    def crowd(self, text: str, now: float) -> bool:
        """Remember who was turned away unheard, if anybody was; return whether that is news."""
        news = bool(text) and now - self._crowded_at >= CROWDED_SECONDS
        self.crowded, self._crowded_at = text, now if news else self._crowded_at
        return news

    def of(self, model: str) -> list[str]:
        """Say of every worker that wanted a model why it is not there; and who might have."""
        known = [absence.text for absence in self._known.values() if model in absence.models]
        return [*known, self.crowded] if self.crowded else known
