"""Measure the rows of the table of targets; each function yields the lines of one row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

from . import pauses
from .bus import TRANSPORTS
from .cases import plan
from .comparison import Plan, Result, Spread, compare, host, introduced, over, played
from .contender import missing
from .goals import GOALS, PEERS_SHARED, PEERS_TCP, Goal, Line
from .losses import Against, losses
from .model import Shape
from .process import Process, ProcessError
from .stopped import middle, tail

MEASURE_SECONDS = 300.0
KINDS = ("2 MiB", "4 KiB", "2 MiB, huge pages", "4 KiB, huge pages")  # of `forward.py`
PEERS = {*PEERS_TCP, *PEERS_SHARED}
MEBIBYTE = 2**20

MODEL, SMALL = Shape.parse("200MiB/100"), Shape.parse("256KiB/20")
MANY, ONE = Shape.parse("10000KiB/10000"), Shape.parse("10000KiB/1")

MANY_BOUNDS = (
    ("weightbus_receive", 1.5, 1.2),
    ("weightbus_shared", 2.9, 2.0),
    ("weightbus_resident_both", 1.5, 1.15),
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to measure. The targets are for the defaults; tests measure less.

    Attributes:
        model, small: The models.
        many, one: Models of the same bytes, in many tensors and in one.
        workers: The numbers of workers to measure, of those in the table.
        rounds: The rounds of each comparison; None: the benchmark's default.
        starts: The number of new processes for rows about what happens once in each process.
        crowd: The number of workers whose cost is compared with the cost of one.
        horde: The number of workers by which the publisher's cost of a small model is divided.
        kinds: The kinds of a resident model's memory.
        others: The number of workers in addition to a stopped one.
        seconds: How long it is stopped: it is lost after 5 s and disconnected after 30 s.
        bench: Comparisons of `bench.py --json`, which are not measured again.
        must_alone: Measure only lines with a bound that must be kept.
    """

    model: Shape = MODEL
    small: Shape = SMALL
    many: Shape = MANY
    one: Shape = ONE
    workers: tuple[int, ...] = (1, 2, 4)
    rounds: int | None = None
    starts: int = 5
    crowd: int = 8
    horde: int = 64
    kinds: tuple[str, ...] = KINDS
    others: int = 3
    seconds: float = 60.0
    bench: Sequence[dict[str, Any]] = ()
    must_alone: bool = False

    def known(self, shape: Shape, workers: int) -> list[dict[str, Any]]:
        """Return the earlier comparisons of a case."""
        case = shape.text, workers, 0.0
        return [c for c in self.bench if (c["shape"], c["workers"], c["pause"]) == case]


def compared(rows: set[str], scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the lines that are ratios between contenders, one comparison after the other."""
    chosen = [g for g in GOALS if g.row in rows and g.workers in scale.workers]
    chosen = [g for g in chosen if g.must is not None or not scale.must_alone]
    cases = dict.fromkeys((goal.shape, goal.workers) for goal in chosen)
    for shape, workers in cases:
        goals = [g for g in chosen if (g.shape, g.workers) == (shape, workers)]
        known = scale.known(getattr(scale, shape), workers)
        yield from _lines(goals, known or _compared(goals, shape, workers, scale, say))


def _compared(
    goals: list[Goal], shape: str, workers: int, scale: Scale, say: Say
) -> list[dict[str, Any]]:
    names = {name for goal in goals for name in (goal.mine, goal.other)}
    base = sorted(names - PEERS | {"raw_tcp", "fill_copy"})
    peers = sorted(name for name in names & PEERS if not missing(name))
    planned = plan(getattr(scale, shape), workers, scale.rounds)
    comparisons = compare(planned, base, say, peers)
    if why := comparisons[0].left_out:
        raise ProcessError(f"{planned.shape.text} to {workers} workers cannot be measured: {why}")
    return [each.as_json() for each in comparisons]


def _lines(goals: list[Goal], comparisons: list[dict[str, Any]]) -> Iterator[Line]:
    """Yield the lines of the comparisons; a peer's line is from the peer's own comparison."""
    by_peer = {c["peer"]: {r["name"]: r["rounds"] for r in c["results"]} for c in comparisons}
    for goal in goals:
        peer = next((name for name in (goal.mine, goal.other) if name in PEERS), "")
        rounds = by_peer.get(peer, {})
        if goal.mine in rounds and goal.other in rounds:
            measured = over(rounds[goal.mine], rounds[goal.other])
            bounds = goal.must, goal.reach, goal.better
            yield Line(goal.row, goal.what, goal.workers, measured, *bounds)


def cpu(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the publisher's processor time for many workers over that for one."""
    name, rounds = "weightbus_shared", scale.rounds
    few, many = (plan(scale.model, workers, rounds) for workers in (1, scale.crowd))
    results = _duel({"one": (name, few), "crowd": (name, many)}, say)
    measured = over(results["crowd"].cpu, results["one"].cpu)
    what = f"publisher's CPU per publish, {scale.crowd} workers over 1, shared"
    yield Line("cpu", what, scale.crowd, measured, 1.06, 1.02)


def crowd(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the publisher's processor time for each of many workers, in milliseconds."""
    for transport in TRANSPORTS:
        say(f"{scale.small.text} to {scale.horde} workers, {transport}")
        rounds = plan(scale.small, scale.horde, scale.rounds).rounds
        arguments = scale.small.text, transport, str(scale.horde), str(rounds)
        with Process("crowd", "crowd", *arguments) as process:
            found = process.answer(MEASURE_SECONDS)
        measured = Spread.of([seconds / scale.horde * 1e3 for seconds in found["cpu"]])
        what = f"publisher's CPU for each worker, {scale.small.label}, {transport}"
        yield Line("crowd", what, scale.horde, measured, 0.12, 0.06, unit="ms")


def resident_pause(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the cost of a version for a reader of a resident model."""
    say("a resident worker's pause")
    rounds = plan(scale.model, 1, scale.rounds).rounds
    with Process("pauses", "pauses", scale.model.text, str(rounds)) as process:
        measured = Spread.of(pauses.ratios(process.answer(MEASURE_SECONDS)))
    what = "worker's pause and first read over a memcpy, resident"
    yield Line("resident", what, 1, measured, 0.3, 0.1)


def forwards(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the ratio of a forward pass of a resident model to one of an ordinary model."""
    for kind in scale.kinds:
        say(f"a forward pass, resident, {kind}")
        rounds = plan(scale.model, 1, scale.rounds).rounds
        with Process("forward", "forward", kind, str(rounds)) as process:
            found = process.answer(MEASURE_SECONDS)
        passes = zip(found["resident"], found["ordinary"], strict=True)
        measured = Spread.of([mine / other for mine, other in passes])
        what = f"a resident model's forward pass over an ordinary one's, {kind}"
        yield Line("forward", what, 0, measured, 1.02, 1.0)


def lost(scale: Scale) -> Iterator[Line]:
    """Yield how many comparisons with peers are lost, if there are results."""
    kinds: tuple[tuple[Against, str, float | None], ...] = (
        ("over_weightbus", "copying", 8),
        ("over_resident", "with resident workers", None),
    )
    for against, how, must in kinds:
        found = losses(scale.bench, against)
        measured = Spread.of([float(found.count)])
        yield Line("lost", f"{how}, {found.text}", 0, measured, must, 0, unit="lost")


def many(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the time of many tensors over that of one, over either transport."""
    shapes = {"many": scale.many, "one": scale.one}
    for name, must, reach in MANY_BOUNDS:
        sides = {key: (name, plan(shape, 1, scale.rounds)) for key, shape in shapes.items()}
        results = _duel(sides, say)
        what = f"{scale.many.tensors} tensors over one, {name}"
        yield Line("many", what, 1, results["many"].over(results["one"]), must, reach)


def _duel(sides: dict[str, tuple[str, Plan]], say: Say) -> dict[str, Result]:
    """Compare a contender with itself under other conditions, in turns."""
    with ExitStack() as stack:
        hosts = {k: stack.enter_context(host(name, each)) for k, (name, each) in sides.items()}
        empty = {k: introduced(sides[k][0], each) for k, each in hosts.items()}
        (_, first), *_ = sides.values()
        return played(first, hosts, empty, say)


def costs(rows: set[str], scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the memory and pauses of a publish, over several new publishers and workers."""
    for transport in TRANSPORTS:
        runs: list[dict[str, Any]] = []
        for start in range(scale.starts):
            say(f"costs, {transport}: start {start + 1} of {scale.starts}")
            with Process("costs", "costs", scale.model.text, transport) as process:
                runs.append(process.answer(MEASURE_SECONDS))
        yield from (line for line in _costs(transport, runs) if line.row in rows)


def _costs(transport: str, runs: list[dict[str, Any]]) -> Iterator[Line]:
    first = Spread.of([run["version_seconds"][0] / run["version_seconds"][-1] for run in runs])
    yield Line("first", f"first publish over the tenth, {transport}", 1, first, 1.5, 1.1)
    returned = _ratios(runs, "async_seconds", "publisher_memcpy_seconds")
    yield Line("async", f"publish_async returns, over a memcpy, {transport}", 1, returned, 1.5, 1.1)
    seen = _ratios(runs, "seen_seconds", "seen_memcpy_seconds")
    yield Line("pause", f"worker's pause over a memcpy, {transport}", 1, seen, 1.3, 1.1)
    for what, side, models in (
        ("publisher's extra memory beyond a model", "publisher", 1),
        (
            ("worker's extra memory beyond a model", "worker", 1)
            if transport == "network"
            else ("worker's extra memory, its own pages", "worker_private", 0)
        ),
    ):
        extra = [run["extra_bytes"]["last"][side] - models * run["bytes"] for run in runs]
        spread = Spread.of([nbytes / MEBIBYTE for nbytes in extra])
        yield Line("memory", f"{what}, {transport}", 1, spread, 64, 16, unit="MiB")


def _ratios(runs: list[dict[str, Any]], some: str, others: str) -> Spread:
    return Spread.of([a / b for run in runs for a, b in zip(run[some], run[others], strict=True)])


def stopped(scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the cost of a stopped worker for the others, over each transport."""
    for shape, transport in product((scale.small, scale.model), TRANSPORTS):
        say(f"a stopped worker, {shape.text}, {transport}: {scale.seconds:.0f} s")
        arguments = (shape.text, transport, str(scale.others), str(scale.seconds))
        with Process("stopped", "stopped", *arguments) as process:
            times = process.answer(scale.seconds + MEASURE_SECONDS)
        what = f"beside a stopped worker, {shape.label}, {transport}"
        yield Line("stopped", f"others' p50 {what}", scale.others, middle(times), 1.05, 1.01)
        yield Line("stopped", f"others' p99 {what}", scale.others, tail(times), 1.25, 1.05)


ROWS = (
    *dict.fromkeys(goal.row for goal in GOALS),
    *("cpu", "crowd", "many", "resident", "forward", "lost"),
    *("first", "async", "pause", "memory", "stopped"),
)
MUST = {*ROWS} - {"ray", "first", "async", "pause", "memory", "stopped"}


def measure(rows: set[str], scale: Scale, say: Say) -> Iterator[Line]:
    """Yield the lines of these rows."""
    yield from compared(rows, scale, say)
    if "cpu" in rows:
        yield from cpu(scale, say)
    for row, measured in (
        ("crowd", crowd),
        ("many", many),
        ("resident", resident_pause),
        ("forward", forwards),
    ):
        if row in rows:
            yield from measured(scale, say)
    if "lost" in rows and scale.bench:
        yield from lost(scale)
    if rows & {"first", "async", "pause", "memory"}:
        yield from costs(rows, scale, say)
    if "stopped" in rows:
        yield from stopped(scale, say)
