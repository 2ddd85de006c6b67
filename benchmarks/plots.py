"""Results as pictures: time over size, over workers, and over the number of tensors."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only; there need not be a screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .cases import COUNTED

Point = tuple[float, float, float, float]  # where, then the median and the quartiles
Where = Callable[[dict[str, Any]], float]
Series = dict[tuple[str, str], list[Point]]  # by kind and title
Style = tuple[str, float]  # of the line, and its width

STYLES: dict[str, Style] = {"limit": ("--", 1.2), "weightbus": ("-", 2.8), "peer": ("-", 1.0)}


def draw(comparisons: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw what a file of results holds: time over size, workers, and tensors; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    there = [c for c in comparisons if not c["left_out"]]
    by_count = [c for c in there if c["bytes"] == COUNTED]
    sizes = [c for c in there if c["bytes"] != COUNTED] or there
    workers = min(c["workers"] for c in sizes)
    largest = max(c["bytes"] for c in sizes if c["workers"] == max(d["workers"] for d in sizes))
    drawn = [
        _picture(
            folder / "performance-size.png",
            f"Publish to all applied, {workers} worker",
            "model, MiB",
            _series([c for c in sizes if c["workers"] == workers], _mebibytes),
            logarithmic=True,
        ),
        _picture(
            folder / "performance-workers.png",
            f"Publish to all applied, {largest / 2**20:.0f} MiB",
            "workers",
            _series([c for c in sizes if c["bytes"] == largest], lambda c: c["workers"]),
            logarithmic=False,
        ),
    ]
    if by_count:
        drawn.append(
            _picture(
                folder / "performance-tensors.png",
                f"Publish to all applied, {COUNTED / 2**20:.0f} MiB, one worker",
                "tensors",
                _series(by_count, lambda c: c["tensors"]),
                logarithmic=True,
            )
        )
    return drawn


def _mebibytes(comparison: dict[str, Any]) -> float:
    return comparison["bytes"] / 2**20


def _series(comparisons: list[dict[str, Any]], where: Where) -> Series:
    """Return the points of each contender; a peer's are from the comparison that was its own."""
    series: Series = defaultdict(list)
    for comparison in sorted(comparisons, key=where):
        for result in comparison["results"]:
            if comparison["peer"] in ("", result["name"]):
                s = result["seconds"]
                point = (where(comparison), *(s[k] * 1e3 for k in ("median", "low", "high")))
                series[result["kind"], result["title"]].append(point)
    return series


def _picture(path: Path, title: str, across: str, series: Series, *, logarithmic: bool) -> Path:
    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    axes.set_prop_cycle(color=mpl.colormaps["tab20"].colors)  # type: ignore[attr-defined]
    for (kind, name), points in series.items():
        _line(axes, name, points, STYLES[kind])
    axes.set_yscale("log")
    if logarithmic:
        axes.set_xscale("log")
    else:
        axes.set_xticks(sorted({p[0] for points in series.values() for p in points}))
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel("milliseconds (bars: quartiles)")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _line(axes: Axes, name: str, points: list[Point], style: Style) -> None:
    line, width = style
    middle = [p[1] for p in points]
    bars = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
    axes.errorbar(
        [p[0] for p in points],
        middle,
        yerr=bars,
        label=name,
        marker="o",
        markersize=4,
        capsize=3,
        linestyle=line,
        linewidth=width,
    )
