"""Measure how long a patch takes to apply, and to make: `python benchmarks/patching.py`.

The weights are drawn, and an element changes by one unit with a probability that halves from one
exponent to the next, as in fine-tuning. What is reported is nanoseconds for each element of the
model on one core, the best of some rounds: for decoding and patching alone, and with the digest of
the target; all drivers find that. Making one counts the scan of both versions, and decoding what
was made to compare. A bound that is broken ends with status 1. Run it on a quiet machine. C and
C++ have the Rust client inside.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from weightbus.benchmarks.clients import built
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.report import print_machine
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT, digest_of
from weightbus.codecs.delta import kernels
from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.delta.patch import Patch
from weightbus.codecs.layout import Layout
from weightbus.tests.conformance.languages import Language, chosen

LANGUAGES = "rust,go,node"
DRIVER_SECONDS = 300.0
BOUND_AT = 0.01  # of all elements
ENCODING_BOUND = 4.0  # where it is native
BOUNDS = {  # by who decodes: flat, and class
    "C": (0.6, 2.0),
    "rust": (0.6, 2.0),
    "go": (None, 4.0),
    "node": (None, 10.0),
    "numpy": (None, 15.0),
}
KINDS = {"flat": False, "class": True}  # of patches, and whether they have classes
Bytes = NDArray[np.uint8]


def versions(elements: int, density: float) -> tuple[Layout, Bytes, Bytes]:
    """Return two versions in bfloat16 of which so many elements differ by one unit."""
    rng = np.random.default_rng(0)
    base = (rng.normal(0, 0.02, elements).astype(np.float32).view("<u4") >> 16).astype("<u2")
    likely = np.exp2(112.0 - ((base >> 7) & 255))
    low, high, rate = 0.0, 1e6, 0.0
    for _ in range(60):  # find the rate that gives this density
        rate = (low + high) / 2
        low, high = (rate, high) if np.minimum(rate * likely, 1).mean() < density else (low, rate)
    target = base ^ (rng.random(elements) < rate * likely).astype("<u2")
    layout = Layout.plan([("w", "BF16", (elements,))])
    return layout, base.view(np.uint8), target.view(np.uint8)


def here(layout: Layout, base: Bytes, patch: bytes, rounds: int) -> dict[str, float]:
    """Return the seconds of this process."""
    digest = digest_of(layout.id, base, CHUNK_BYTES_DEFAULT)
    blocks: list[float] = []
    whole: list[float] = []
    for _ in range(rounds):
        data = base.copy()
        begun = time.perf_counter()
        for part in Patch(layout, patch).parts:
            part.put(part.decode(data), data[part.block.begin : part.block.end])
        blocks.append(time.perf_counter() - begun)
        data[:] = base
        begun = time.perf_counter()
        Patch(layout, patch).apply(data, data, base_digest=digest)
        whole.append(time.perf_counter() - begun)
    return {"blocks": min(blocks), "digest": min(whole)}


def there(language: Language, folder: Path, rounds: int) -> dict[str, float]:
    """Return the seconds of a client's driver."""
    done = subprocess.run(  # noqa: S603 - a driver of ours
        [*language.command, "patching", str(folder), str(rounds)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=DRIVER_SECONDS,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def times(
    layout: Layout, base: Bytes, patch: bytes, languages: list[Language], rounds: int
) -> dict[str, dict[str, float]]:
    """Return the seconds of everybody."""
    found: dict[str, dict[str, float]] = {}
    was = kernels.BUILT
    for name, helper in {"C": True, "numpy": False}.items():
        if helper <= was:
            kernels.BUILT = helper
            found[name] = here(layout, base, patch, rounds)
    kernels.BUILT = was
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "layout").write_bytes(layout.header)
        (Path(folder) / "base").write_bytes(base.tobytes())
        (Path(folder) / "patch").write_bytes(patch)
        for language in languages:
            found[language.key] = there(language, Path(folder), rounds)
    return found


def encoding_here(layout: Layout, base: Bytes, target: Bytes, rounds: int) -> dict[str, float]:
    """Return the seconds in which this process makes patches, flat and by class."""
    digests = (
        digest_of(layout.id, base, CHUNK_BYTES_DEFAULT),
        digest_of(layout.id, target, CHUNK_BYTES_DEFAULT),
    )
    found: dict[str, float] = {}
    for kind, classes in KINDS.items():
        best = math.inf
        for _ in range(rounds):
            begun = time.perf_counter()
            encode(layout, base, target, digests=digests, classes=classes)
            best = min(best, time.perf_counter() - begun)
        found[kind] = best
    return found


def encoding_of_core(
    core: Language, layout: Layout, base: Bytes, target: Bytes, rounds: int
) -> dict[str, float]:
    """Return the seconds in which the Rust core makes patches; they have the bytes of ours."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "layout").write_bytes(layout.header)
        (folder / "base").write_bytes(base.tobytes())
        (folder / "target").write_bytes(target.tobytes())
        done = subprocess.run(  # noqa: S603 - a driver of ours
            [*core.command, "encoding", name, str(rounds)],
            stdout=subprocess.PIPE,
            check=True,
            timeout=DRIVER_SECONDS,
        )
        for kind, classes in KINDS.items():
            if (folder / kind).read_bytes() != encode(layout, base, target, classes=classes):
                raise AssertionError(f"the core makes another patch, {kind}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure_encoding(
    elements: int, density: float, languages: list[Language], rounds: int, console: Console
) -> bool:
    """Show what making patches of one density costs; return whether a bound is broken."""
    layout, base, target = versions(elements, density)
    found = {"C": encoding_here(layout, base, target, rounds)} if kernels.BUILT else {}
    for core in (each for each in languages if each.key == "rust"):
        found[core.key] = encoding_of_core(core, layout, base, target, rounds)
    title = f"{density:.1%} of {elements} elements: made, decoded and compared, ns an element"
    table = Table(title=title, title_justify="left")
    for heading in ("", *KINDS, "must"):
        table.add_column(heading, justify="right")
    missed = False
    for name, seconds in found.items():
        costs = [seconds[kind] / elements * 1e9 for kind in KINDS]
        bound = ENCODING_BOUND if density == BOUND_AT else None
        shown = "" if bound is None else f"{bound}"
        table.add_row(name, *(f"{cost:.2f}" for cost in costs), shown)
        missed |= bound is not None and max(costs) > bound
    console.print(table)
    return missed


def measure(
    elements: int, density: float, languages: list[Language], rounds: int, console: Console
) -> bool:
    """Show what patches of one density cost; return whether a bound is broken."""
    layout, base, target = versions(elements, density)
    changes = np.count_nonzero(base.view("<u2") != target.view("<u2"))
    title = f"{density:.1%} of {elements} elements, ns an element"
    table = Table(title=title, title_justify="left")
    for heading in ("", "", "bits a change", "decode + patch", "+ digest", "must"):
        table.add_column(heading, justify="right")
    missed = False
    for classes in (False, True):
        patch = encode(layout, base, target, classes=classes)
        kind, bits = "class" if classes else "flat", f"{8 * len(patch) / changes:.2f}"
        for name, seconds in times(layout, base, patch, languages, rounds).items():
            blocks, digest = (seconds[key] / elements * 1e9 for key in ("blocks", "digest"))
            bound = BOUNDS[name][classes] if density == BOUND_AT else None
            shown = "" if bound is None else f"{bound}"
            table.add_row(kind, name, bits, f"{blocks:.2f}", f"{digest:.2f}", shown)
            missed |= bound is not None and blocks > bound
    console.print(table)
    return missed


def main(words: list[str]) -> int:
    """Measure, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", default=LANGUAGES, help=f"some of {LANGUAGES}")
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--densities", default="0.001,0.01,0.05")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-build", action="store_true", help="take the drivers that are there")
    told = parser.parse_args(words)
    console = Console(width=120)
    languages = built(chosen(told.languages), console, build=not told.no_build)
    print_machine(describe(), console)
    missed = False
    for density in map(float, told.densities.split(",")):
        missed |= measure(told.elements, density, languages, told.rounds, console)
        missed |= measure_encoding(told.elements, density, languages, told.rounds, console)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
