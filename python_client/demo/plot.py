"""The plot of a run: the return and the publish latency, over the version."""

# matplotlib leaves its keyword arguments unannotated.
# pyright: reportUnknownMemberType=false

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from .accident import Accident
from .policy import RETURN_MAX
from .tally import RECENT, Tally

BLUE, ORANGE, GREY = "#2f6fb0", "#d9822b", "#8a8f98"


def save_plot(path: Path, tally: Tally, accident: Accident | None) -> None:
    """Write the plot as a PNG file."""
    figure = Figure(figsize=(9, 6), dpi=130, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    episodes, curve = tally.returns, tally.curve()
    upper.scatter(*_columns(episodes), s=7, color=GREY, alpha=0.35, lw=0, label="one episode")
    upper.plot(*_columns(curve), color=BLUE, lw=2, label=f"mean of {RECENT} episodes")
    upper.set_ylabel("return")
    upper.set_ylim(0, 1.25 * RETURN_MAX)  # room for the legend above the best
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
    upper.set_title(
        f"CartPole learned by one trainer, played by {len(tally.workers)} workers: "
        f"{tally.nbytes / 1000:.1f} kB a version over TCP",
        loc="left",
        fontsize=11,
    )
    figure.savefig(path, format="png")


def _columns(rows: list[tuple[int, int]] | list[tuple[int, float]]) -> tuple[list[float], ...]:
    return [float(x) for x, _ in rows], [float(y) for _, y in rows]


def _dress(axes: Axes, accident: Accident | None) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GREY, alpha=0.2)
    if accident is not None and len(accident.versions) == 2:
        label = f"{accident.victim} dead"
        axes.axvspan(*accident.versions, color=GREY, alpha=0.15, lw=0, label=label)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
