"""Compare contenders, whose processes all exist at once and take turns in each round.

On a shared machine, times drift by more than contenders differ. So each round compares every
contender with the limit that was measured in the same round. The results are the median of these
ratios and the median of the times.

Limits and weightbus are compared first. Then each peer has its own comparison with the limit and
weightbus over its transport, because peers whose processes exist at once affect each other.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from . import contender, memory
from .contender import LIMITS, RESIDENT, RIVALS
from .fleet import START_SECONDS
from .model import Shape
from .process import Process
from .trainer import COMPUTED_BYTES

WARM_UP = 2  # rounds that do not count: the first versions touch new memory on both sides
PUBLISH_SECONDS = 120.0
PROCESS_BYTES = 150 * 2**20  # memory of a process without a model
COPIES = 2  # copies of the model in each process, to estimate the memory


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of one comparison.

    Attributes:
        shape, workers: The size of the model, and the number of workers.
        rounds: The number of turns of each contender that count.
        burst: The number of publishes in one turn.
        pause: Seconds for which a trainer computes before each publish.
    """

    shape: Shape
    workers: int
    rounds: int
    burst: int
    pause: float = 0.0

    def bytes_needed(self, contenders: int) -> int:
        """Return an estimate of the memory that the comparison needs."""
        each = COPIES * self.shape.nbytes + PROCESS_BYTES
        computed = COMPUTED_BYTES if self.pause else 0
        return round(contenders * ((1 + self.workers) * each + computed))


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass
class Result:
    """The result of one contender in one comparison.

    Attributes:
        name, title, kind: The contender.
        limit: The limit that it is compared with.
        first: Seconds of its very first publish; 0 if that was in an earlier comparison.
        rounds: Seconds of every publish that counts, by round.
        cpu: Processor seconds of the publisher's process for the same.
    """

    name: str
    title: str
    kind: str
    limit: str
    first: float = 0.0
    rounds: list[list[float]] = field(default_factory=list[list[float]])
    cpu: list[list[float]] = field(default_factory=list[list[float]])

    @property
    def seconds(self) -> Spread:
        """The spread of all publishes."""
        return Spread.of([seconds for burst in self.rounds for seconds in burst])

    def over(self, other: "Result") -> Spread:
        """Return the spread of the ratios to another result, round by round."""
        return over(self.rounds, other.rounds)


def after(pause: float) -> str:
    """Return the pause before a publish as text for tables; "" without a pause."""
    return f", after {pause * 1e3:g} ms" if pause else ""


def over(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Spread:
    """Return the spread of the ratios of medians, round by round."""
    return Spread.of(
        [
            statistics.median(mine) / statistics.median(its)
            for mine, its in zip(some, others, strict=True)
        ]
    )


@dataclass
class Comparison:
    """The results of one plan, or the reason why it was left out.

    Attributes:
        peer: The peer of the comparison; empty if it has only limits and weightbus.
        left_out: Why there are no results.
        without: Contenders that were left out for lack of memory.
    """

    plan: Plan
    results: dict[str, Result] = field(default_factory=dict[str, Result])
    peer: str = ""
    left_out: str = ""
    without: list[str] = field(default_factory=list[str])

    def over_limit(self, result: Result) -> Spread:
        """Return the spread of a contender's ratios to its limit."""
        return result.over(self.results[result.limit])

    def over_rival(self, result: Result, rivals: Mapping[str, str] = RIVALS) -> Spread | None:
        """Return the spread of a peer's ratios to weightbus over its transport, if measured."""
        rival = self.results.get(rivals.get(result.limit, ""))
        return None if rival is None or result.kind != "peer" else result.over(rival)

    def as_json(self) -> dict[str, Any]:
        """Return what a file of results holds of it."""
        plan = self.plan
        return {
            "shape": plan.shape.text,
            "bytes": plan.shape.nbytes,
            "tensors": plan.shape.tensors,
            "workers": plan.workers,
            "pause": plan.pause,
            "peer": self.peer,
            "left_out": self.left_out,
            "without": self.without,
            "results": [self._as_json(result) for result in self.results.values()],
        }

    def _as_json(self, r: Result) -> dict[str, Any]:
        rival, resident = self.over_rival(r), self.over_rival(r, RESIDENT)
        return {
            "name": r.name,
            "title": r.title,
            "kind": r.kind,
            "limit": r.limit,
            "correct": True,  # or there would be no result: each round was checked
            "first": r.first,
            "rounds": r.rounds,
            "cpu": r.cpu,
            "seconds": asdict(r.seconds),
            "ratio": asdict(self.over_limit(r)),
            "over_weightbus": None if rival is None else asdict(rival),
            "over_resident": None if resident is None else asdict(resident),
            "gb_per_s": self.plan.shape.nbytes * self.plan.workers / r.seconds.median / 1e9,
        }


def compare(
    plan: Plan, names: Sequence[str], say: Callable[[str], None], peers: Sequence[str] = ()
) -> list[Comparison]:
    """Compare contenders, then each peer with those of them that it is held against.

    Raises:
        ProcessError: A contender failed, or its workers held other bytes than were published.
    """
    free = memory.available()
    held_against = (*LIMITS, *RIVALS.values(), *RESIDENT.values())
    without: list[str] = []
    if plan.bytes_needed(len(names) + bool(peers)) > free:  # those at least that ratios refer to
        without = [name for name in names if name not in held_against]
        names = [name for name in names if name in held_against]
    needed = plan.bytes_needed(len(names) + bool(peers))
    if needed > free:
        why = f"needs about {needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} are free"
        return [Comparison(plan, left_out=why)]
    with ExitStack() as stack:
        hosts = {name: stack.enter_context(host(name, plan)) for name in names}
        titles = {name: introduced(name, each) for name, each in hosts.items()}
        comparisons = [Comparison(plan, played(plan, hosts, titles, say), without=without)]
        for peer in peers:
            transport = contender.load(peer).LIMIT
            beside = {
                name: each
                for name, each in hosts.items()
                if name in held_against and titles[name].limit == transport
            }
            with host(peer, plan) as guest:
                titles[peer] = introduced(peer, guest)
                results = played(plan, {**beside, peer: guest}, titles, say)
                comparisons.append(Comparison(plan, results, peer))
    return comparisons


def host(name: str, plan: Plan, environment: dict[str, str] | None = None) -> Process:
    """Start the publisher process of a contender, which starts the workers."""
    arguments = [name, plan.shape.text, str(plan.workers)]
    if plan.pause:  # else a checkout that knows no pause can be held against this one, too
        arguments.append(str(plan.pause))
    return Process(f"{name} publisher", "host", *arguments, environment=environment)


def introduced(name: str, host: Process) -> Result:
    """Wait until a contender is ready; return a result without numbers."""
    answer = host.answer(START_SECONDS + 10)
    return Result(name, answer["title"], answer["kind"], contender.load(name).LIMIT)


def played(
    plan: Plan, hosts: dict[str, Process], empty: dict[str, Result], say: Callable[[str], None]
) -> dict[str, Result]:
    """Let contenders take turns; return their results."""
    results = {name: replace(empty[name], rounds=[], cpu=[]) for name in hosts}
    names = list(hosts)
    for number in range(-WARM_UP, plan.rounds):
        say(
            f"{plan.shape.text}, {plan.workers} workers, {names[-1]}: "
            f"round {number + 1} of {plan.rounds}"
        )
        for name in _turns(names, number):
            seconds = (PUBLISH_SECONDS + plan.pause) * plan.burst
            answer = hosts[name].ask(f"publish {plan.burst}", seconds)
            if number >= 0:
                results[name].rounds.append(answer["seconds"])
                results[name].cpu.append(answer["cpu"])
            elif not empty[name].first:
                empty[name].first = results[name].first = answer["seconds"][0]
    return results


def _turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: another one starts each time, as none may always follow one."""
    at = number % len(names)
    return [*names[at:], *names[:at]]
