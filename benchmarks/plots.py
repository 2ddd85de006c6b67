"""Results as pictures: time over size, and time over workers."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only; there need not be a screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Point = tuple[float, float, float, float]  # where, then the median and the quartiles
Where = Callable[[dict[str, Any]], float]
Series = dict[str, list[Point]]


def draw(comparisons: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw both pictures from what a file of results holds; return the files."""
    there = [c for c in comparisons if not c["left_out"]]
    workers = min(c["workers"] for c in there)
    largest = max(c["bytes"] for c in there if c["workers"] == max(d["workers"] for d in there))
    by_size = [c for c in there if c["workers"] == workers]
    by_workers = [c for c in there if c["bytes"] == largest]
    return [
        _picture(
            folder / "performance-size.png",
            f"Publish to all applied, {workers} worker",
            "model, MiB",
            _series(by_size, lambda c: c["bytes"] / 2**20, 1e3),
            logarithmic=True,
        ),
        _picture(
            folder / "performance-workers.png",
            f"Publish to all applied, {largest / 2**20:.0f} MiB",
            "workers",
            _series(by_workers, lambda c: c["workers"], 1e3),
            logarithmic=False,
        ),
    ]


def _series(comparisons: list[dict[str, Any]], where: Where, scale: float) -> Series:
    series: Series = defaultdict(list)
    for comparison in sorted(comparisons, key=where):
        for result in comparison["results"]:
            s = result["seconds"]
            point = (where(comparison), s["median"] * scale, s["low"] * scale, s["high"] * scale)
            series[result["title"]].append(point)
    return series


def _picture(path: Path, title: str, across: str, series: Series, *, logarithmic: bool) -> Path:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in series.items():
        _line(axes, name, points)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.set_xticks([p[0] for p in next(iter(series.values()))])
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel("milliseconds (bars: quartiles)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _line(axes: Axes, name: str, points: list[Point]) -> None:
    middle = [p[1] for p in points]
    bars = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
    axes.errorbar([p[0] for p in points], middle, yerr=bars, label=name, marker="o", capsize=3)
