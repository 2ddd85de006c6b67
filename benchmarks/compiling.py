"""What a user of the C++ client pays to compile: `python benchmarks/compiling.py [CHECKOUT ...]`.

The seconds and the peak memory of the compiler, for a file that includes the header and does
nothing, and for the example of the client. In turns; the least of each counts, as all that
disturbs a compiler makes it slower.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3
NEVER = (math.inf, math.inf)
HEADER = "#include <weightbus/weightbus.hpp>\n"
EXAMPLE = Path("cpp_client/examples/worker.cpp")
FLAGS = ("-std=c++17", "-O2", "-c", "-o", os.devnull)
INCLUDES = ("cpp_client/include", "c_client/include")


def main(words: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    table = Table(title="compiling what uses the C++ client, -O2", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("s", "peak MB", "s, example", "peak MB, example"):
        table.add_column(heading, justify="right")
    checkouts = [Path(word).resolve() for word in words] or [ROOT]
    with tempfile.TemporaryDirectory() as folder:
        (alone := Path(folder) / "alone.cpp").write_text(HEADER)
        costs = {checkout: [NEVER, NEVER] for checkout in checkouts}
        for checkout in checkouts * ROUNDS:
            turn = [compiled(checkout, file) for file in (alone, checkout / EXAMPLE)]
            costs[checkout] = [least(*both) for both in zip(costs[checkout], turn, strict=True)]
    for checkout, found in costs.items():
        cells = (cell for seconds, peak in found for cell in (f"{seconds:.2f}", f"{peak:.0f}"))
        table.add_row(str(checkout), *cells)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


def compiled(checkout: Path, file: Path) -> tuple[float, float]:
    """Return the seconds and the MB that the compiler needs for a file."""
    includes = [f"-I{checkout / folder}" for folder in INCLUDES]
    begun = time.perf_counter()
    compiler = subprocess.Popen(  # noqa: S603 - a compiler, and a file of ours
        [os.environ.get("CXX", "c++"), *FLAGS, *includes, str(file)]
    )
    _, status, used = os.wait4(compiler.pid, 0)
    seconds = time.perf_counter() - begun
    compiler.returncode = os.waitstatus_to_exitcode(status)
    if compiler.returncode:
        raise SystemExit(f"{file} of {checkout} does not compile")
    return seconds, used.ru_maxrss / 1e3


def least(some: tuple[float, float], others: tuple[float, float]) -> tuple[float, float]:
    """Return the smaller of each."""
    return min(some[0], others[0]), min(some[1], others[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
