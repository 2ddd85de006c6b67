"""Compare encodings of what changed between two versions: `python benchmarks/deltas.py`.

A small encoder is fine-tuned for a few steps, which takes two minutes (`--keep` names a folder for
the versions, and the next run has them). On the same pairs of versions: patches with classes and
without, and what has been published, each with all that a receiver needs but names and shapes. Then
changes of one unit at uniform positions, beside what information theory asks for; and nanoseconds
for each element of the model, for which the machine must be quiet. Bytes are exact. A bound that is
broken ends with status 1.
"""

import argparse
import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from weightbus.benchmarks.finetuning import CHAINS, Bytes, versions
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.report import print_machine
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT, digest_of
from weightbus.codecs.delta import kernels
from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.delta.numpy_kernels import keys
from weightbus.codecs.delta.patch import Patch
from weightbus.codecs.layout import Layout

mpl.use("Agg")  # files only; there need not be a screen
import matplotlib.pyplot as plt

UNIFORM = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)  # densities
UNIFORM_ELEMENTS = 2**23
UNIFORM_BOUND = 1.05  # times H(p)/p + 1
AHEAD_BOUND = 1.25  # of each published encoding, by class
FLAT_BOUND, CLASS_BOUND, DENSE_BOUND, FROM_BF16_BOUND = 11.5, 8.0, 6.5, 6.2
DENSE = 0.03  # from here on it is the third of these

# Where it is not installed, what needs it is left out.
ZSTD: Any = importlib.import_module("zstandard") if importlib.util.find_spec("zstandard") else None

Pairs = dict[str, tuple[Layout, Bytes, Bytes]]


def published(base: Bytes, target: Bytes) -> dict[str, int]:
    """Return the bytes of what has been published, for one pair of versions in bfloat16.

    Gaps beyond the width of their type are told by as many of its largest value as fit.
    """
    old, new = base.view("<u2"), target.view("<u2")
    at = np.flatnonzero(old != new)
    gaps = np.diff(at, prepend=-1) - 1
    steps = keys(new[at]) - keys(old[at])
    zigzag = 2 * (np.abs(steps) - 1) + (steps < 0)
    plain = {"int32 + value": 4 * at.size + 2 * at.size}
    if ZSTD is None:
        return plain
    return {
        **plain,
        "u16 gap + value, zstd": _zstd(_escaped(gaps, "<u2")) + _zstd(new[at]),
        "XOR, zstd": _zstd(old ^ new),
        "u8 gap + step, zstd": _zstd(_escaped(gaps, "u1")) + _zstd(_escaped(zigzag, "u1")),
    }


def _escaped(values: NDArray[np.int64], dtype: str) -> NDArray[np.unsignedinteger]:
    """Return numbers in a narrow type; its largest value says that there is more to come."""
    most = int(np.iinfo(dtype).max)
    more = values // most
    out = np.full(values.size + int(more.sum()), most, dtype)
    out[np.cumsum(more + 1) - 1] = values % most
    return out


def _zstd(data: NDArray[np.generic]) -> int:
    return len(ZSTD.ZstdCompressor(level=1).compress(data.tobytes()))


def changes(base: Bytes, target: Bytes) -> int:
    """Return how many elements of 16 bits differ."""
    return int(np.count_nonzero(base.view("<u2") != target.view("<u2")))


def made(folder: Path) -> Pairs:
    """Return pairs of versions from fine-tuning, by what they show."""
    pairs: Pairs = {}
    for chain in CHAINS:
        layout, steps = versions(chain, folder)
        for first, last in chain.pairs:
            apart = f", {last - first} versions" if last - first > 1 else ""
            pairs[chain.name + apart] = layout, steps[first], steps[last]
    return pairs


def uniform(density: float) -> tuple[Layout, Bytes, Bytes]:
    """Return two versions that differ by steps of one unit at uniform positions."""
    rng = np.random.default_rng(0)
    wide = rng.normal(0, 0.02, UNIFORM_ELEMENTS).astype(np.float32)
    base = (wide.view("<u4") >> 16).astype("<u2")
    target = base ^ (rng.random(base.size) < density).astype("<u2")
    return Layout.plan([("w", "BF16", base.shape)]), base.view("u1"), target.view("u1")


def entropy(p: float) -> float:
    """Return the bits that a changed element needs at least: its position, and a sign."""
    return float(-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p + 1


def compare(pairs: Pairs, console: Console) -> tuple[dict[str, list[tuple[float, float]]], bool]:
    """Show bits for each changed element; return them by density, and whether a bound is broken."""
    points: dict[str, list[tuple[float, float]]] = {}
    table, missed = Table("versions", "changed"), False
    for number, (name, (layout, base, target)) in enumerate(pairs.items()):
        changed = changes(base, target)
        sizes = {
            "class": len(encode(layout, base, target)),
            "flat": len(encode(layout, base, target, classes=False)),
            **published(base, target),
        }
        p, bits = 2 * changed / base.size, {k: 8 * v / changed for k, v in sizes.items()}
        for encoding, each in bits.items():
            points.setdefault(encoding, []).append((p, each))
            if not number:
                table.add_column(encoding)
        shown = [f"{each:.2f} ({16 / p / each:.0f}x)" for each in bits.values()]
        table.add_row(name, f"{p:.2%}", *shown)
        bound = DENSE_BOUND if p > DENSE else FROM_BF16_BOUND if "bf16" in name else CLASS_BOUND
        missed |= bits["class"] > bound or (p <= DENSE and bits["flat"] > FLAT_BOUND)
        missed |= AHEAD_BOUND * bits["class"] > min(map(float, list(bits.values())[2:]))
    console.print("Bits for each changed element (in brackets: times fewer bytes than all of them)")
    console.print(table)
    return points, missed


def compare_uniform(console: Console) -> tuple[list[tuple[float, float, float]], bool]:
    """Show what changes at uniform positions cost beside their entropy."""
    rows: list[tuple[float, float, float]] = []
    table, missed = Table("uniform positions", "entropy", "flat", "more"), False
    for density in UNIFORM:
        layout, base, target = uniform(density)
        changed = changes(base, target)
        p = changed / UNIFORM_ELEMENTS
        least, bits = entropy(p), 8 * len(encode(layout, base, target, classes=False)) / changed
        rows.append((p, least, bits))
        table.add_row(f"{p:.2%}", f"{least:.3f}", f"{bits:.3f}", f"{bits / least - 1:.2%}")
        missed |= bits > UNIFORM_BOUND * least
    console.print(table)
    return rows, missed


def speed(pairs: Pairs, rounds: int, console: Console) -> None:
    """Show nanoseconds for each element of the model, the best of some rounds, on one core."""
    table = Table("ns an element", "by", "encode", "with check", "decode + patch", "+ copy, digest")
    for name in list(pairs)[:2]:
        for built in (True, False) if kernels.BUILT else (False,):
            for classes in (False, True):
                times = _times(*pairs[name], built=built, classes=classes, rounds=rounds)
                kind = f"{name}, {'class' if classes else 'flat'}"
                shown = [f"{each:.2f}" for each in times]
                table.add_row(kind, "C" if built else "numpy", *shown)
    console.print(table)


def _times(
    layout: Layout, base: Bytes, target: Bytes, *, built: bool, classes: bool, rounds: int
) -> list[float]:
    was, kernels.BUILT = kernels.BUILT, built
    first, last = (digest_of(layout.id, data, CHUNK_BYTES_DEFAULT) for data in (base, target))

    def encoded(check: bool) -> bytes:
        return encode(layout, base, target, digests=(first, last), classes=classes, check=check)

    patch, out = Patch(layout, encoded(check=True)), base.copy()

    def decode() -> None:
        for part in patch.parts:
            part.put(part.decode(base), out[part.block.begin : part.block.end])

    works: list[Callable[[], object]] = [
        lambda: encoded(check=False),
        lambda: encoded(check=True),
        decode,
        lambda: patch.apply(base, out, base_digest=first),
    ]
    try:
        return [min(_seconds(work) for _ in range(rounds)) / base.size * 2e9 for work in works]
    finally:
        kernels.BUILT = was


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def draw(
    path: Path,
    points: dict[str, list[tuple[float, float]]],
    rows: list[tuple[float, float, float]],
) -> None:
    """Draw bits for each changed element over density."""
    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    for name, each in points.items():
        axes.plot(*zip(*each, strict=True), "o", label=name, markersize=7)
    densities, least, flat = zip(*rows, strict=True)
    axes.plot(densities, least, "--", color="black", label="uniform: entropy")
    axes.plot(densities, flat, "-", color="grey", label="uniform: flat")
    axes.set_xscale("log")
    axes.set_title("Patches of a fine-tuned encoder in bfloat16")
    axes.set_xlabel("elements that change")
    axes.set_ylabel("bits for each changed element")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(words: list[str]) -> int:
    """Measure, show, draw, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--keep", type=Path, help="folder for the versions; else they are made anew"
    )
    parser.add_argument("--plot", type=Path, help="file for a plot")
    parser.add_argument("--rounds", type=int, default=7, help="0: measure no time")
    told = parser.parse_args(words)
    console = Console(width=140)
    print_machine(describe(), console)
    with tempfile.TemporaryDirectory(prefix="weightbus-deltas-") as folder:
        keep: Path = told.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        pairs = made(keep)
    points, missed = compare(pairs, console)
    rows, missed_uniform = compare_uniform(console)
    if told.rounds:
        speed(pairs, told.rounds, console)
    if told.plot:
        draw(told.plot, points, rows)
    return 1 if missed or missed_uniform else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
