"""Records the last 15 minutes of a publisher: its publishes, and how far its workers were behind.

The history is in the publisher's process, so a page that is opened later shows the past, too.
Time is divided into moments of `MOMENT_SECONDS`. Each moment has a few numbers for each model, so
its size does not depend on the number of workers and publishes.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...bus.receipt import Receipt
from ...codecs.words import printable
from .view import Standing, View

MOMENT_SECONDS = 5.0
MOMENTS_MAX = 180  # 15 minutes
MODELS_MAX = 64  # the most models; a new one then replaces the model changed longest ago
TEXT_MAX = 200  # characters of the reason why a publish reached too few workers


class Moment(msgspec.Struct, array_like=True):
    """The data of one model in one interval of `MOMENT_SECONDS`, encoded as a list of its fields.

    Attributes:
        at: The index of the moment: the monotonic time, divided by `MOMENT_SECONDS`.
        version: The latest version in this moment.
        publishes: The number of publishes that ended.
        short: The number of these publishes that reached fewer workers than required.
        applied_s: Seconds from publish to apply on the slowest worker; 0: no worker applied.
        late: The largest number of workers that were not up to date at the same time.
        bad: The largest number of workers that were lost, stuck or failed at the same time.
        lag: The largest number of versions that a worker was behind; lost workers do not count.
        lag_s: Seconds since the publish of the first version that the worker farthest behind
            lacked.
        who: The name of the worker farthest behind.
        changed: The history's change count when this moment last changed.
    """

    at: int
    version: int = 0
    publishes: int = 0
    short: int = 0
    applied_s: float = 0.0
    late: int = 0
    bad: int = 0
    lag: int = 0
    lag_s: float = 0.0
    who: str = ""
    changed: int = 0


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A publish that reached fewer workers than required."""

    model: str
    text: str  # the reason
    at: float  # when the publish ended, in seconds on the monotonic clock


class History:
    """The moments of all models, by model id. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: OrderedDict[str, deque[Moment]] = OrderedDict()
        self._short: dict[str, Shortfall] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """The change count, which increases with each change of the history."""
        return self._changes

    def published(self, receipt: Receipt, shortfall: str, now: float) -> None:
        """Record a publish that ended. `shortfall` is why it failed, or empty if it succeeded."""
        took = [w.seconds for w in receipt.workers.values() if w.state == "applied" and w.seconds]
        with self._lock:
            self._changes += 1
            moment = self._moment(receipt.model, now)
            moment.version = max(moment.version, receipt.version)
            moment.publishes += 1
            _applied(moment, took)
            if shortfall:
                moment.short += 1
                text = printable(" ".join(shortfall.split()), TEXT_MAX)
                self._short[receipt.model] = Shortfall(receipt.model, text, now)

    def looked(self, view: View, standings: Sequence[Standing], now: float) -> None:
        """Record the state of all workers."""
        by_model: dict[str, list[Standing]] = {}
        for standing in standings:
            by_model.setdefault(standing.model, []).append(standing)
        with self._lock:
            self._changes += 1
            for name, (row, age) in view.models(now).items():
                of_model = by_model.get(name, [])
                _note(self._moment(name, now), row.version, of_model)
                took = [s.took_s for s in of_model if s.version == row.version and s.lag == 0]
                # The apply times of the latest version count in the moment of its publish.
                moments = self._models[name] if age is not None else ()
                for moment in (m for m in moments if m.at == moment_index(now - (age or 0.0))):
                    if _applied(moment, took):
                        moment.changed = self._changes

    def moments(self, after_change: int, now: float) -> tuple[int, dict[str, list[Moment]]]:
        """Return the change count and, by model, the moments that changed after `after_change`."""
        with self._lock:
            found = {
                name: [msgspec.structs.replace(m) for m in moments]
                for name, moments in self._recent(now, after_change).items()
            }
            return self._changes, found

    def short(self, now: float) -> list[tuple[Shortfall, int]]:
        """Return, for each model, the last publish that fell short and the number of those."""
        with self._lock:
            counts = {
                name: sum(moment.short for moment in moments)
                for name, moments in self._recent(now, 0).items()
            }
            return [(self._short[name], count) for name, count in counts.items() if count]

    def _recent(self, now: float, after_change: int) -> dict[str, list[Moment]]:
        """Return, by model, the moments that are not too old and changed after `after_change`."""
        first = moment_index(now) - MOMENTS_MAX + 1
        return {
            name: recent
            for name, moments in self._models.items()
            if (recent := [m for m in moments if m.changed > after_change and m.at >= first])
        }

    def _moment(self, model: str, now: float) -> Moment:
        """Return a model's current moment, and mark it as changed."""
        moments = self._models.setdefault(model, deque(maxlen=MOMENTS_MAX))
        self._models.move_to_end(model)
        while len(self._models) > MODELS_MAX:
            oldest, _ = self._models.popitem(last=False)
            self._short.pop(oldest, None)
        if not moments or moments[-1].at < moment_index(now):
            moments.append(Moment(moment_index(now), moments[-1].version if moments else 0))
        moments[-1].changed = self._changes
        return moments[-1]


def moment_index(now: float) -> int:
    """Return the index of the moment that contains the monotonic time `now`."""
    return int(now // MOMENT_SECONDS)


def _note(moment: Moment, version: int, standings: Sequence[Standing]) -> None:
    late = [s for s in standings if s.verdict != "current"]
    moment.version = max(moment.version, version)
    moment.late = max(moment.late, len(late))
    moment.bad = max(moment.bad, sum(s.verdict != "behind" for s in late))
    worst = max((s for s in late if s.verdict != "lost"), key=lambda s: s.lag, default=None)
    if worst is not None and worst.lag > moment.lag:
        moment.lag, moment.lag_s, moment.who = worst.lag, worst.lag_s or 0.0, worst.worker


def _applied(moment: Moment, took: Sequence[float]) -> bool:
    """Record the seconds that workers took to apply; return whether their maximum has risen."""
    before, moment.applied_s = moment.applied_s, max([moment.applied_s, *took])
    return moment.applied_s > before
