"""Prints the results of a run as tables."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .report import Report


def summary(report: Report) -> RenderableType:
    """Return the closing tables."""
    verdict = (
        Text("the policy improved, and every worker runs the last version", "bold green")
        if not report.faults
        else Text("\n".join(report.faults), "bold red")
    )
    return Padding(Group(_workers(report), "", _overall(report), "", verdict), (1, 2))


def _workers(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker", style="bold")
    table.add_column("state")
    for title in ("version", "lag", "applied", "skipped", "played", "mean return"):
        table.add_column(title, justify="right")
    for name, w in report.workers.items():
        table.add_row(
            name,
            Text(w.state, "green" if w.state == "live" else "red"),
            str(w.version),
            str(w.lag),
            str(w.applied),
            str(w.skipped),
            str(w.episodes),
            "-" if w.mean_return is None else f"{w.mean_return:.3g}",
        )
    return table


def _overall(report: Report) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    if report.first_return is not None and report.last_return is not None:
        grid.add_row(
            "mean return", f"{report.first_return:.3g} at first, {report.last_return:.3g} at last"
        )
    if report.agreed:
        told = ", ".join(f"{name} in {count}" for name, count in report.agreed.items())
        grid.add_row("same answers", f"to the same questions, with the same version: {told}")
    grid.add_row(
        "published",
        f"{report.versions} versions of {report.nbytes / 1e3:.1f} kB in {report.seconds:.1f} s, "
        f"{report.delivered / 1e6:.1f} MB applied",
    )
    if (ms := report.publish_ms) is not None:
        grid.add_row(
            "until all had it", f"p50 {ms.p50:.1f} ms, p95 {ms.p95:.1f} ms, max {ms.max:.1f} ms"
        )
    if (a := report.accident) is not None and a.noticed_s is not None and a.back_s is not None:
        grid.add_row(
            "accident",
            f"{a.victim} killed, found lost after {a.noticed_s:.1f} s; started again, back on the "
            f"latest version after {a.back_s:.1f} s, past {a.missed} it missed",
        )
    return grid
