"""Results as tables for a person."""

from typing import Any

from rich.console import Console
from rich.table import Table

from .comparison import Comparison, Result, Spread
from .costs import summary


def print_machine(machine: dict[str, str], console: Console) -> None:
    """Print what the numbers were measured on."""
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print one comparison, or why there is none."""
    plan = comparison.plan
    of = f"{plan.shape.label} in {plan.shape.tensors} tensors to {plan.workers} worker(s)"
    if comparison.left_out:
        console.print(f"{of}: left out, {comparison.left_out}")
        return
    table = Table(title=f"{of}, {plan.rounds} rounds of {plan.burst}", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("ms (quartiles)", "x its limit (quartiles)", "GB/s", "first, ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in comparison.results:
        table.add_row(*_row(result, plan.shape.nbytes * plan.workers))
    console.print(table)


def _row(result: Result, nbytes: int) -> list[str]:
    return [
        result.title,
        _spread(result.seconds, 1e3),
        _spread(result.ratio, 1.0),
        f"{nbytes / result.seconds.median / 1e9:.2f}",
        _number(result.first * 1e3),
    ]


def _spread(spread: Spread, scale: float) -> str:
    low, high = _number(spread.low * scale), _number(spread.high * scale)
    return f"{_number(spread.median * scale)} ({low}-{high})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def print_costs(costs: dict[str, Any], console: Console) -> None:
    """Print what a publish costs besides time."""
    table = Table(
        title=f"weightbus, {costs['road']}, {costs['shape'].partition('/')[0]} to one worker",
        title_justify="left",
        show_header=False,
    )
    for name, text in summary(costs):
        table.add_row(name, text)
    console.print(table)
