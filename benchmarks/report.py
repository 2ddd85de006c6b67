"""Print results as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .against import Held
from .comparison import Comparison, Plan, Result, Spread, after
from .contender import RESIDENT, RIVALS, load
from .costs import summary
from .losses import Losses


def print_machine(machine: dict[str, str], console: Console) -> None:
    """Print the description of the machine."""
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)


def print_left_out(missing: dict[str, list[str]], console: Console) -> None:
    """Print the contenders that cannot run here, and the packages or programs that they lack."""
    for name, needs in missing.items():
        if needs:
            console.print(f"left out: {name}, which needs {', '.join(needs)}", highlight=False)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print one comparison, or the reason why it was left out."""
    plan = comparison.plan
    if comparison.left_out:
        console.print(f"{_what(plan)}: left out, {comparison.left_out}")
        return
    table = _table(f"{_what(plan)}, {plan.rounds} rounds of {plan.burst}", "GB/s", "first, ms")
    for result in comparison.results.values():
        table.add_row(*_row(comparison, result), *_rest(result, plan))
    console.print(table)
    if comparison.without:
        console.print(f"left out for lack of memory: {', '.join(comparison.without)}")


def print_peers(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print the peers of one plan, each from its comparison with the limits and weightbus."""
    if not comparisons:
        return
    plan = comparisons[0].plan
    table = _table(f"{_what(plan)}: peers", "x weightbus", "x resident", "GB/s", "first, ms")
    for comparison in comparisons:
        result = comparison.results[comparison.peer]
        rivals = (comparison.over_rival(result, each) for each in (RIVALS, RESIDENT))
        ahead = ("" if rival is None else _spread(rival, 1.0) for rival in rivals)
        table.add_row(*_row(comparison, result), *ahead, *_rest(result, plan))
    console.print(table)


def print_held(held: Held, bound: float, console: Console) -> None:
    """Print the ratio of this checkout's time to another checkout's."""
    r, verdict = held.ratio, "SLOWER" if held.ratio.low > bound else "kept"
    console.print(
        f"{held.row:6} {held.name:28} {held.workers} worker(s)  {r.median:.3f} ({r.low:.3f}-"
        f"{r.high:.3f}) of the other's time, lower quartile <= {bound:g}: {verdict}",
        highlight=False,
    )


def print_losses(found: Losses, with_what: str, console: Console) -> None:
    """Print the cases in which a peer was faster than weightbus on its transport."""
    title = f"lost, {with_what}: {found.count} {found.text}; {len(found.lost)} of all measured"
    console.print(title, highlight=False)
    if not found.lost:
        return
    table = Table()
    for heading in ("model", "workers", "peer"):
        table.add_column(heading, no_wrap=True)
    table.add_column("x weightbus", justify="right", no_wrap=True)
    for case in found.lost:
        shape, workers, peer, pause = case
        ratio = Spread(**found.ratios[case])
        table.add_row(
            shape + after(pause), str(workers), load(peer).create().title, _spread(ratio, 1.0)
        )
    console.print(table)


def _what(plan: Plan) -> str:
    what = f"{plan.shape.label} in {plan.shape.tensors} tensors to {plan.workers} worker(s)"
    return what + after(plan.pause)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("ms (quartiles)", "x its limit", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _row(comparison: Comparison, result: Result) -> list[str]:
    over = comparison.over_limit(result)
    return [result.title, _spread(result.seconds, 1e3), _spread(over, 1.0)]


def _rest(result: Result, plan: Plan) -> list[str]:
    nbytes = plan.shape.nbytes * plan.workers
    return [f"{nbytes / result.seconds.median / 1e9:.2f}", _number(result.first * 1e3)]


def _spread(spread: Spread, scale: float) -> str:
    low, high = _number(spread.low * scale), _number(spread.high * scale)
    return f"{_number(spread.median * scale)} ({low}-{high})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def print_costs(costs: dict[str, Any], console: Console) -> None:
    """Print what a publish costs besides time."""
    table = Table(
        title=f"weightbus, {costs['transport']}, {costs['shape'].partition('/')[0]} to one worker",
        title_justify="left",
        show_header=False,
    )
    for name, text in summary(costs):
        table.add_row(name, text)
    console.print(table)
