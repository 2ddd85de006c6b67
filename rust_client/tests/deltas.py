"""Patches that a driver makes, beside Python's: deltas.py DRIVER.

Between versions of any dtypes, as many elements as may change, both make the very same bytes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.dtypes import DTYPES
from weightbus.codecs.layout import Layout

SEED, ROUNDS = 0, 60
SECONDS = 60.0
BLOCK = 2**18  # elements
Bytes = NDArray[np.uint8]


def drawn(rng: np.random.Generator) -> tuple[Layout, Bytes, Bytes]:
    """Return a layout and two versions of it."""
    names = rng.choice(sorted(DTYPES), rng.integers(1, 6))
    specs = [
        (f"t{at}", str(name), (int(2 ** rng.uniform(0, 14)) * 8,)) for at, name in enumerate(names)
    ]
    if rng.random() < 0.3:  # several blocks, and perhaps groups
        specs.append(("large", "BF16", (int(rng.uniform(0.5, 18) * BLOCK),)))
    layout = Layout.plan(specs)
    base = rng.integers(0, 256, layout.nbytes, np.uint8)
    for spec in layout.tensors:
        if spec.dtype in ("BF16", "F16"):  # weights, as they are; any bits elsewhere
            values = rng.normal(0, 0.02, spec.nbytes // 2).astype("<f4")
            short = values.view("<u4") >> 16 if spec.dtype == "BF16" else values.astype("<f2")
            base[spec.begin : spec.end] = short.astype("<u2").view(np.uint8)
    target = base.copy()
    for spec in layout.tensors:
        change(rng, target[spec.begin : spec.end], max(DTYPES[spec.dtype].bits // 8, 1))
    return layout, base, target


def change(rng: np.random.Generator, data: Bytes, width: int) -> None:
    """Change some elements: a few, or up to all of them; by a little, or to anything."""
    elements = data[: data.size // width * width].reshape(-1, width)
    if rng.random() < 0.1 or not elements.size:
        return
    where = rng.random(len(elements)) < 10 ** rng.uniform(-5, 0.2)
    if rng.random() < 0.5 and width == 2:
        span = int(2 ** rng.uniform(0, 12))
        steps = rng.integers(-span, span + 1, where.sum()).astype("<i2")
        values = elements[where].view("<i2").ravel() + steps
        elements[where] = values.astype("<i2").view(np.uint8).reshape(-1, 2)
    else:
        elements[where] = rng.integers(0, 256, (where.sum(), width), np.uint8)


def main(driver: str) -> int:
    """Compare them; say what differs."""
    rng = np.random.default_rng(SEED)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for round_ in range(ROUNDS):
            layout, base, target = drawn(rng)
            (folder / "layout").write_bytes(layout.header)
            (folder / "base").write_bytes(base.tobytes())
            (folder / "target").write_bytes(target.tobytes())
            command = [driver, "encoding", name]
            subprocess.run(command, check=True, timeout=SECONDS)  # noqa: S603
            for kind in ("flat", "class"):
                made = (folder / kind).read_bytes()
                wanted = encode(layout, base, target, classes=kind == "class")
                if made != wanted:
                    wrong += 1
                    text = f"{len(made)} bytes, Python's has {len(wanted)}: {layout!r}"
                    print(f"round {round_}, {kind}: a patch of {text}", file=sys.stderr)
    print(f"{2 * ROUNDS - wrong} of {2 * ROUNDS} patches have Python's bytes")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
