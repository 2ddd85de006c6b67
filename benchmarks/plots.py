"""Plot results: time by size, workers and tensors, with a panel for each transport."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import matplotlib as mpl

mpl.use("Agg")  # writes only files, so that no screen is needed
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .cases import COUNTED
from .contender import LIMITS

Point = tuple[float, float, float, float]  # position, median and quartiles
K = TypeVar("K")

Where = Callable[[dict[str, Any]], float]
Series = dict[tuple[str, str], list[Point]]  # by kind and title

TRANSPORTS = {"raw_tcp": "over TCP", "fill_copy": "through shared memory"}  # by limit
LABEL = 0.034  # the height of a line of text, as a share of a panel's height
LEADER = {"arrowstyle": "-", "alpha": 0.4, "linewidth": 0.8, "relpos": (0, 0.5)}
ROOM = 1.06  # between the curves and their labels, as a share of a panel's width


class Style(NamedTuple):
    """The style of the curves of a kind; weightbus and the limits are in front of the peers."""

    line: str
    width: float
    front: int
    colors: tuple[str, ...]


STYLES = {
    "weightbus": Style("-", 2.6, 3, ("#0b3c8c", "#1f77e0", "#0aa5c2", "#5b3fd0")),
    "limit": Style("--", 1.6, 2, ("#000000", "#555555")),
    "peer": Style(
        "-", 1.1, 1, ("#d98c3f", "#b5544d", "#7d9a4a", "#a8789c", "#8c6d4f", "#c9a227", "#6f8f8b")
    ),
}


def draw(comparisons: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the contents of a file of results; return the written files."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = [c for c in comparisons if not c["left_out"]]
    kept = [c for c in kept if c["pause"] == kept[0]["pause"]]  # one pause in a curve
    by_count = [c for c in kept if c["bytes"] == COUNTED]
    sizes = [c for c in kept if c["bytes"] != COUNTED] or kept
    workers = min(c["workers"] for c in sizes)
    largest = max(c["bytes"] for c in sizes if c["workers"] == max(d["workers"] for d in sizes))
    pictures: list[tuple[str, str, str, list[dict[str, Any]], Where]] = [
        (
            "size",
            f"Publish to all applied, {workers} worker",
            "model, MiB",
            [c for c in sizes if c["workers"] == workers],
            lambda c: c["bytes"] / 2**20,
        ),
        (
            "workers",
            f"Publish to all applied, {largest / 2**20:.0f} MiB",
            "workers",
            [c for c in sizes if c["bytes"] == largest],
            lambda c: c["workers"],
        ),
        (
            "tensors",
            f"Publish to all applied, {COUNTED / 2**20:.0f} MiB, one worker",
            "tensors",
            by_count,
            lambda c: c["tensors"],
        ),
    ]
    return [
        _picture(folder / f"performance-{name}.png", title, across, chosen, where)
        for name, title, across, chosen, where in pictures
        if chosen
    ]


def _series(comparisons: list[dict[str, Any]], where: Where, limit: str) -> Series:
    """Return the points of each contender of a transport; a peer's come from its own comparison."""
    series: Series = defaultdict(list)
    for comparison in sorted(comparisons, key=where):
        for result in comparison["results"]:
            if result["limit"] == limit and comparison["peer"] in ("", result["name"]):
                s = result["seconds"]
                point = (where(comparison), *(s[k] * 1e3 for k in ("median", "low", "high")))
                series[result["kind"], result["title"].partition(": ")[2]].append(point)
    return series


def _picture(
    path: Path, title: str, across: str, comparisons: list[dict[str, Any]], where: Where
) -> Path:
    figure, panels = plt.subplots(1, len(LIMITS), figsize=(15, 6.5), sharey=True)
    figure.subplots_adjust(left=0.06, right=0.84, wspace=0.65, bottom=0.09, top=0.88)
    for panel, limit in zip(panels, LIMITS, strict=True):
        panel.set_title(TRANSPORTS[limit])
        panel.set_yscale("log")
        _curves(panel, _series(comparisons, where, limit))
        places = sorted({where(c) for c in comparisons})
        panel.set_xscale("log")
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.set_xticks([], minor=True)
        panel.set_xlabel(across)
        panel.grid(visible=True, alpha=0.3)
    for panel, limit in zip(panels, LIMITS, strict=True):  # now that the scale is known
        _labels(panel, _series(comparisons, where, limit))
    panels[0].set_ylabel("milliseconds (bars: quartiles)")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def _colors(series: Series) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for kind, style in STYLES.items():
        names = [key for key in series if key[0] == kind]
        found |= {key: style.colors[i % len(style.colors)] for i, key in enumerate(names)}
    return found


def _curves(panel: Axes, series: Series) -> None:
    for key, color in _colors(series).items():
        points, style = series[key], STYLES[key[0]]
        middle = [p[1] for p in points]
        bars = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
        panel.errorbar(
            [p[0] for p in points],
            middle,
            yerr=bars,
            color=color,
            marker="o",
            markersize=4,
            capsize=3,
            linestyle=style.line,
            linewidth=style.width,
            elinewidth=1.0,
            zorder=style.front,
        )


def _labels(panel: Axes, series: Series) -> None:
    """Write each curve's name at its end, without overlaps."""
    ends = {key: points[-1] for key, points in series.items()}
    low, high = (math.log(end) for end in panel.get_ylim())
    heights = {key: (math.log(end[1]) - low) / (high - low) for key, end in ends.items()}
    colors = _colors(series)
    for key, height in spread(heights, LABEL).items():
        panel.annotate(
            key[1],
            xy=ends[key][:2],
            xytext=(ROOM, height),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colors[key],
            weight="normal" if key[0] == "peer" else "bold",
            arrowprops={**LEADER, "color": colors[key]},
        )


def spread(heights: dict[K, float], apart: float) -> dict[K, float]:
    """Move heights as little as possible so that all are at least a distance apart, in order."""
    groups: list[tuple[list[K], float]] = []  # labels that touch each other, and their middle
    for key in sorted(heights, key=lambda k: heights[k]):
        group, middle = [key], heights[key]
        while groups and middle - groups[-1][1] < apart * (len(group) + len(groups[-1][0])) / 2:
            below, _ = groups.pop()
            group = [*below, *group]
            middle = sum(heights[k] for k in group) / len(group)
        groups.append((group, middle))
    found: dict[K, float] = {}
    for group, middle in groups:
        half = apart * (len(group) - 1) / 2
        lowest = max(0.0, min(middle - half, 1.0 - 2 * half))  # inside the panel
        found |= {key: lowest + apart * place for place, key in enumerate(group)}
    return found
