"""Plots a run: return and publish latency by version; versions and bytes over time."""

# matplotlib leaves its keyword arguments unannotated.
# pyright: reportUnknownMemberType=false

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from .accident import Accident
from .subject import Subject
from .tally import RECENT, Tally

BLUE, ORANGE, GREY = "#2f6fb0", "#d9822b", "#8a8f98"


def save_plot(path: Path, subject: Subject, tally: Tally, accident: Accident | None) -> None:
    """Write the plot as a PNG file."""
    figure = Figure(figsize=(9, 8), dpi=130, layout="constrained")
    upper, lower, over = figure.subplots(3, 1, height_ratios=[3, 2, 2])
    lower.sharex(upper)
    episodes, curve = tally.returns, tally.curve()
    upper.scatter(*_columns(episodes), s=7, color=GREY, alpha=0.35, lw=0, label="one at a time")
    upper.plot(*_columns(curve), color=BLUE, lw=2, label=f"mean of {RECENT} {subject.plural}")
    upper.set_ylabel("return")
    upper.set_ylim(0, 1.25 * subject.highest)  # room for the legend above the highest return
    lower.scatter(*_columns(tally.latencies), s=9, color=ORANGE, alpha=0.7, lw=0)
    lower.set_ylabel("publish latency (ms)")
    lower.set_xlabel("version")
    lower.set_yscale("log")  # the first version takes ten times as long as the rest
    lower.yaxis.set_major_formatter(ScalarFormatter())
    latency = tally.latency()
    if latency is not None:
        lower.axhline(latency.p50, color=ORANGE, lw=1, label=f"median {latency.p50:.1f} ms")
        lower.axhline(latency.p95, color=ORANGE, lw=1, ls=":", label=f"p95 {latency.p95:.1f} ms")
        lower.set_ylim(latency.p50 / 4, 4 * latency.max)
    for axes in (upper, lower):
        _dress(axes, accident)
    _over_time(over, tally)
    upper.set_title(
        f"What {subject.title} learns from one trainer, with {len(tally.workers)} workers: "
        f"{tally.nbytes / 1000:.1f} kB a version over TCP",
        loc="left",
        fontsize=11,
    )
    figure.savefig(path, format="png")


def _over_time(axes: Axes, tally: Tally) -> None:
    seconds, versions, delivered = zip(*tally.course, strict=True)
    axes.plot(seconds, versions, color=BLUE, lw=1.5, label="versions published")
    axes.set_ylabel("versions")
    axes.set_xlabel("seconds")
    bytes_ = axes.twinx()
    megabytes = [nbytes / 1e6 for nbytes in delivered]
    bytes_.plot(seconds, megabytes, color=ORANGE, lw=1.5, label="MB applied by all workers")
    bytes_.set_ylabel("MB")
    bytes_.spines[["top"]].set_visible(False)
    bytes_.legend(frameon=False, fontsize=8, loc="lower right")
    _dress(axes, None)


def _columns(rows: list[tuple[int, float]]) -> tuple[list[float], ...]:
    return [float(x) for x, _ in rows], [float(y) for _, y in rows]


def _dress(axes: Axes, accident: Accident | None) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GREY, alpha=0.2)
    if accident is not None and len(accident.versions) == 2:
        label = f"{accident.victim} dead"
        axes.axvspan(*accident.versions, color=GREY, alpha=0.15, lw=0, label=label)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
