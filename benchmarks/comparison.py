"""Comparing contenders: all alive together, taking turns, round after round.

Times drift on a shared machine, and by more than contenders differ. So each round holds every
contender against the limit measured in that same round, and what is reported is the median of
those ratios beside the median of the times.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from . import contender, memory
from .fleet import START_SECONDS
from .model import Shape
from .process import Process

WARM_UP = 2  # rounds that are not counted: first versions touch fresh memory on both sides
PUBLISH_SECONDS = 120.0
PROCESS_BYTES = 150 * 2**20  # what a process takes before any model, with torch or without
COPIES = 2  # of the model in each process, for the estimate of what fits


@dataclass(frozen=True, slots=True)
class Plan:
    """One comparison: a model, a number of workers, and how often.

    Attributes:
        shape, workers: What is published, and to how many.
        rounds: Turns that each contender gets and that count.
        burst: Publishes in one turn.
    """

    shape: Shape
    workers: int
    rounds: int
    burst: int

    def bytes_needed(self, contenders: int) -> int:
        """Return about how much memory it takes."""
        each = COPIES * self.shape.nbytes + PROCESS_BYTES
        return round(contenders * (1 + self.workers) * each)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise some values, at least one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass
class Result:
    """What one contender did in one comparison.

    Attributes:
        name, title, kind: The contender.
        first: Seconds of its very first publish.
        rounds: Seconds of every publish that counts, by round.
        seconds: Their spread.
        limit: What it is held against.
        ratio: Of its median in a round to that of the limit in the same round.
    """

    name: str
    title: str
    kind: str
    limit: str
    first: float = 0.0
    rounds: list[list[float]] = field(default_factory=list[list[float]])
    seconds: Spread = Spread(0.0, 0.0, 0.0)
    ratio: Spread = Spread(0.0, 0.0, 0.0)

    def summarise(self, limit: "Result") -> None:
        """Compute the spreads once all rounds are there."""
        self.seconds = Spread.of([seconds for burst in self.rounds for seconds in burst])
        self.ratio = Spread.of(
            [
                statistics.median(mine) / statistics.median(its)
                for mine, its in zip(self.rounds, limit.rounds, strict=True)
            ]
        )


@dataclass
class Comparison:
    """All results of one plan; none, and why, if it was left out."""

    plan: Plan
    results: list[Result] = field(default_factory=list[Result])
    left_out: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return what a file of results holds of it."""
        plan = self.plan
        return {
            "shape": plan.shape.text,
            "bytes": plan.shape.nbytes,
            "tensors": plan.shape.tensors,
            "workers": plan.workers,
            "left_out": self.left_out,
            "results": [
                {
                    "name": r.name,
                    "title": r.title,
                    "kind": r.kind,
                    "limit": r.limit,
                    "correct": True,  # or there would be no result: each round was checked
                    "first": r.first,
                    "rounds": r.rounds,
                    "seconds": vars_of(r.seconds),
                    "ratio": vars_of(r.ratio),
                    "gb_per_s": plan.shape.nbytes * plan.workers / r.seconds.median / 1e9,
                }
                for r in self.results
            ],
        }


def vars_of(spread: Spread) -> dict[str, float]:
    """Return a spread as JSON has it."""
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def compare(plan: Plan, names: Sequence[str], say: Callable[[str], None]) -> Comparison:
    """Run one comparison.

    Raises:
        ProcessError: A contender failed, or its workers held other bytes than were published.
    """
    needed, there = plan.bytes_needed(len(names)), memory.available()
    if needed > there:
        why = f"needs about {needed / 2**30:.0f} GiB of memory, {there / 2**30:.0f} are free"
        return Comparison(plan, left_out=why)
    with ExitStack() as stack:
        hosts = {
            name: stack.enter_context(
                Process(f"{name} publisher", "host", name, plan.shape.text, str(plan.workers))
            )
            for name in names
        }
        results = {name: _introduced(name, host) for name, host in hosts.items()}
        for number in range(-WARM_UP, plan.rounds):
            say(f"{plan.shape.text}, {plan.workers} workers: round {number + 1} of {plan.rounds}")
            for name in _turns(names, number):
                answer = hosts[name].ask(f"publish {plan.burst}", PUBLISH_SECONDS * plan.burst)
                if number == -WARM_UP:
                    results[name].first = answer["seconds"][0]
                elif number >= 0:
                    results[name].rounds.append(answer["seconds"])
    for result in results.values():
        result.summarise(results[result.limit])
    return Comparison(plan, list(results.values()))


def _introduced(name: str, host: Process) -> Result:
    answer = host.answer(START_SECONDS + 10)
    return Result(name, answer["title"], answer["kind"], contender.load(name).LIMIT)


def _turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: another one starts each time, as none may always follow one."""
    at = number % len(names)
    return [*names[at:], *names[:at]]
