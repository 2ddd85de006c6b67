"""Write results into `docs/PERFORMANCE.md`: `python benchmarks/page.py BENCH TARGETS`.

The two files are from `bench.py --json` and `targets.py --json`. The program replaces the text
between the page's marks; people write the rest of the page.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weightbus.benchmarks.cases import COUNTED
from weightbus.benchmarks.comparison import after
from weightbus.benchmarks.losses import losses

PAGE = Path(__file__).resolve().parent.parent / "docs" / "PERFORMANCE.md"
SIGNS = {"less": "≤", "more": "≥"}

Results = dict[str, Any]


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = [*headings]
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(bench: Results, _targets: Results) -> str:
    """Return the description of the machine."""
    return ", ".join(f"{name} {value}" for name, value in bench["machine"].items()) + "."


def targets(_bench: Results, targets: Results) -> str:
    """Return the table of all targets."""
    rows = [
        [
            f"`{line['row']}`",
            line["what"],
            str(line["workers"] or ""),
            f"{_spread(line['measured'])} {line['unit']}",
            *(_bound(line, name) for name in ("must", "reach")),
            line["verdict"],
        ]
        for line in targets["lines"]
    ]
    return table(("row", "what", "N", "measured (quartiles)", "must", "reach", "verdict"), rows)


def limits(bench: Results, _targets: Results) -> str:
    """Return the table of the limits and weightbus."""
    rows: list[list[str]] = []
    notes: list[str] = []
    for c in (c for c in _there(bench) if not c["peer"] and c["bytes"] != COUNTED):
        rows += [
            [
                c["shape"] + after(c["pause"]),
                str(c["workers"]),
                r["title"],
                _spread(r["seconds"], 1e3),
                f"{r['gb_per_s']:.2f}",
                _spread(r["ratio"]),
            ]
            for r in c["results"]
        ]
        if c["without"]:
            case = f"{c['shape']} to {c['workers']}{after(c['pause'])}"
            notes.append(f"{case}: {', '.join(c['without'])}")
    shown = table(("model", "workers", "contender", "ms", "GB/s", "x its limit"), rows)
    return shown + ("\n\nLeft out for lack of memory: " + "; ".join(notes) + "." if notes else "")


def peers(bench: Results, _targets: Results) -> str:
    """Return the ratios of peers' times to weightbus's (in parentheses: to resident workers')."""
    sizes = [c for c in _there(bench) if c["bytes"] != COUNTED]
    cases = dict.fromkeys((c["shape"], c["workers"], c["pause"]) for c in sizes)
    ratios: dict[str, dict[tuple[str, int, float], str]] = {}
    for c in sizes:
        for r in (r for r in c["results"] if r["name"] == c["peer"]):
            text = f"{r['over_weightbus']['median']:.2f}"
            if r["over_resident"] is not None:
                text += f" ({r['over_resident']['median']:.2f})"
            ratios.setdefault(r["title"], {})[c["shape"], c["workers"], c["pause"]] = text
    headings = [f"{shape.partition('/')[0]}, {n}{after(pause)}" for shape, n, pause in cases]
    rows = [[title, *(found.get(c, "") for c in cases)] for title, found in ratios.items()]
    lost, resident = losses(bench["comparisons"]), losses(bench["comparisons"], "over_resident")
    told = (
        f"Lost: {lost.count} {lost.text}; with resident workers {resident.count} {resident.text}."
    )
    return f"{table(('peer', *headings), rows)}\n\n{told}"


def tensors(bench: Results, _targets: Results) -> str:
    """Return the table of times by the number of tensors."""
    found: dict[str, dict[int, str]] = {}
    for c in (c for c in _there(bench) if c["bytes"] == COUNTED):
        for r in c["results"]:
            if c["peer"] in ("", r["name"]):
                found.setdefault(r["title"], {})[c["tensors"]] = _number(
                    r["seconds"]["median"] * 1e3
                )
    counts = sorted({count for each in found.values() for count in each})
    rows = [[title, *(each.get(n, "") for n in counts)] for title, each in found.items()]
    return table(("ms, by tensors", *(f"{n:,}" for n in counts)), rows)


PARTS = {each.__name__: each for each in (machine, targets, limits, peers, tensors)}


def written(page: str, bench: Results, targets: Results) -> str:
    """Return the page with all parts replaced.

    Raises:
        ValueError: The page has no marks for a part.
    """
    for name, part in PARTS.items():
        marks = re.compile(rf"(<!-- measured: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text = part(bench, targets)
        places = marks.findall(page)
        if len(places) != 1:
            raise ValueError(f"{len(places)} places are marked <!-- measured: {name} -->, not one")
        page = marks.sub(r"\1" + text.replace("\\", r"\\") + r"\2", page)
    return page


def _there(bench: Results) -> Iterator[Results]:
    return (c for c in bench["comparisons"] if not c["left_out"])


def _spread(spread: dict[str, float], scale: float = 1.0) -> str:
    median, low, high = (_number(spread[k] * scale) for k in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def _bound(line: dict[str, Any], name: str) -> str:
    return "" if line[name] is None else f"{SIGNS[line['better']]} {line[name]:g}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def main(words: list[str]) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", type=Path)
    parser.add_argument("targets", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    told = parser.parse_args(words)
    bench, found = (json.loads(file.read_text()) for file in (told.bench, told.targets))
    told.page.write_text(written(told.page.read_text(), bench, found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
