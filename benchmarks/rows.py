"""Measuring the rows of the table of targets: each function yields the lines of one row."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

from .bus import ROADS
from .cases import plan
from .comparison import Comparison, Plan, Result, Spread, compare, host, introduced, over, played
from .contender import missing
from .goals import GOALS, PEERS_SHARED, PEERS_TCP, Goal, Line
from .model import Shape
from .process import Process, ProcessError
from .stopped import middle, tail

MEASURE_SECONDS = 300.0
PEERS = {*PEERS_TCP, *PEERS_SHARED}
MEBIBYTE = 2**20

MODEL, SMALL = Shape.parse("200MiB/100"), Shape.parse("256KiB/20")
MANY, ONE = Shape.parse("10000KiB/10000"), Shape.parse("10000KiB/1")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. The targets are for what stands here; tests take less.

    Attributes:
        model, small: The models.
        many, one: Models of the same bytes, in many tensors and in one.
        workers: Of the numbers of workers in the table, those to measure.
        rounds: Rounds of each comparison; None: as many as the benchmark takes.
        starts: Fresh processes, where a row is about what happens once in each.
        crowd: Workers whose cost is held against that of one.
        others: Workers beside a stopped one.
        seconds: For which it is stopped: it is lost after 5 and hung up on after 30.
    """

    model: Shape = MODEL
    small: Shape = SMALL
    many: Shape = MANY
    one: Shape = ONE
    workers: tuple[int, ...] = (1, 2, 4)
    rounds: int | None = None
    starts: int = 5
    crowd: int = 8
    others: int = 3
    seconds: float = 60.0


def compared(rows: set[str], scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the lines that are ratios between contenders, one comparison after the other."""
    chosen = [g for g in GOALS if g.row in rows and g.workers in scale.workers]
    cases = dict.fromkeys((goal.shape, goal.workers) for goal in chosen)
    for shape, workers in cases:
        goals = [g for g in chosen if (g.shape, g.workers) == (shape, workers)]
        yield from _compared(goals, getattr(scale, shape), workers, scale.rounds, say)


def _compared(
    goals: list[Goal], shape: Shape, workers: int, rounds: int | None, say: Say
) -> Iterator[Line]:
    names = {name for goal in goals for name in (goal.mine, goal.other)}
    base = sorted(names - PEERS | {"raw_tcp", "fill_copy"})
    peers = sorted(name for name in names & PEERS if not missing(name))
    comparisons = compare(plan(shape, workers, rounds), base, say, peers)
    if why := comparisons[0].left_out:
        raise ProcessError(f"{shape.text} to {workers} workers cannot be measured: {why}")
    for goal in goals:
        measured = _measured(goal, comparisons)
        if measured is not None:
            bounds = (goal.must, goal.reach, goal.better)
            yield Line(goal.row, goal.what, workers, measured, *bounds)


def _measured(goal: Goal, comparisons: list[Comparison]) -> Spread | None:
    """Return the ratio, from the comparison that was the peer's own if it is about one."""
    peer = next((name for name in (goal.mine, goal.other) if name in PEERS), "")
    for each in comparisons:
        if each.peer == peer and each.results:
            return each.results[goal.mine].over(each.results[goal.other])
    return None


def cpu(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the publisher's processor time for many workers over that for one."""
    name, rounds = "weightbus_shared", scale.rounds
    few, many = (plan(scale.model, workers, rounds) for workers in (1, scale.crowd))
    results = _duel({"one": (name, few), "crowd": (name, many)}, say)
    measured = over(results["crowd"].cpu, results["one"].cpu)
    what = f"publisher's CPU per publish, {scale.crowd} workers over 1, shared"
    yield Line("cpu", what, scale.crowd, measured, 1.1, 1.02)


def many(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the time of many tensors over that of one, on either road."""
    shapes = {"many": scale.many, "one": scale.one}
    for name in ("weightbus_receive", "weightbus_shared"):
        sides = {key: (name, plan(shape, 1, scale.rounds)) for key, shape in shapes.items()}
        results = _duel(sides, say)
        what = f"{scale.many.tensors} tensors over one, {name}"
        yield Line("many", what, 1, results["many"].over(results["one"]), 1.5, 1.15)


def _duel(sides: dict[str, tuple[str, Plan]], say: Say) -> dict[str, Result]:
    """Let the same contender take turns with itself in other circumstances."""
    with ExitStack() as stack:
        hosts = {k: stack.enter_context(host(name, each)) for k, (name, each) in sides.items()}
        empty = {k: introduced(sides[k][0], each) for k, each in hosts.items()}
        (_, first), *_ = sides.values()
        return played(first, hosts, empty, say)


def costs(rows: set[str], scale: Scale, say: Say) -> Iterator[Line]:
    """Yield what a publish costs besides time, over several fresh publishers and workers."""
    for road in ROADS:
        runs: list[dict[str, Any]] = []
        for start in range(scale.starts):
            say(f"costs, {road}: start {start + 1} of {scale.starts}")
            with Process("costs", "costs", scale.model.text, road) as process:
                runs.append(process.answer(MEASURE_SECONDS))
        yield from (line for line in _costs(road, runs) if line.row in rows)


def _costs(road: str, runs: list[dict[str, Any]]) -> Iterator[Line]:
    first = Spread.of([run["version_seconds"][0] / run["version_seconds"][-1] for run in runs])
    yield Line("first", f"first publish over the tenth, {road}", 1, first, 1.5, 1.1)
    returned = _ratios(runs, "async_seconds", "publisher_memcpy_seconds")
    yield Line("async", f"publish_async returns, over a memcpy, {road}", 1, returned, 1.5, 1.1)
    seen = _ratios(runs, "seen_seconds", "seen_memcpy_seconds")
    yield Line("pause", f"worker's pause over a memcpy, {road}", 1, seen, 1.3, 1.1)
    for what, side, models in (
        ("publisher's extra memory beyond a model", "publisher", 1),
        (
            ("worker's extra memory beyond a model", "worker", 1)
            if road == "network"
            else ("worker's extra memory, its own pages", "worker_private", 0)
        ),
    ):
        extra = [run["extra_bytes"]["last"][side] - models * run["bytes"] for run in runs]
        spread = Spread.of([nbytes / MEBIBYTE for nbytes in extra])
        yield Line("memory", f"{what}, {road}", 1, spread, 64, 16, unit="MiB")


def _ratios(runs: list[dict[str, Any]], some: str, others: str) -> Spread:
    return Spread.of([a / b for run in runs for a, b in zip(run[some], run[others], strict=True)])


def stopped(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield what a stopped worker costs the others, on either road."""
    for shape, road in product((scale.small, scale.model), ROADS):
        say(f"a stopped worker, {shape.text}, {road}: {scale.seconds:.0f} s")
        arguments = (shape.text, road, str(scale.others), str(scale.seconds))
        with Process("stopped", "stopped", *arguments) as process:
            times = process.answer(scale.seconds + MEASURE_SECONDS)
        what = f"beside a stopped worker, {shape.label}, {road}"
        yield Line("stopped", f"others' p50 {what}", scale.others, middle(times), 1.05, 1.01)
        yield Line("stopped", f"others' p99 {what}", scale.others, tail(times), 1.25, 1.05)


ROWS = (
    *dict.fromkeys(goal.row for goal in GOALS),
    *("cpu", "many", "first", "async", "pause", "memory", "stopped"),
)


def measure(rows: set[str], scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the lines of these rows."""
    yield from compared(rows, scale, say)
    if "cpu" in rows:
        yield from cpu(scale, say)
    if "many" in rows:
        yield from many(scale, say)
    if rows & {"first", "async", "pause", "memory"}:
        yield from costs(rows, scale, say)
    if "stopped" in rows:
        yield from stopped(scale, say)
