"""Coverage-guided fuzzing of all that takes bytes of others (`fuzzing.py`).

    python tests/fuzzing/fuzz.py --runs 1000000              all targets, on all cores
    python tests/fuzzing/fuzz.py --target zmtp --runs 1000   one of them
    python tests/fuzzing/fuzz.py --target zmtp --case FILE   a case that was found

It needs atheris, which `make fuzz` installs. What is found is left in a file, whose name is said:
an exception that is not documented, a case of more than ten seconds, one that takes over 2 GiB.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

SECONDS, MIB = 10, 2048  # that a case may take
BYTES = 4096  # of a case
SHARES = {  # of a hundred cases: more of those that cost little
    "messages": 23,
    "zmtp": 20,
    "layouts": 16,
    "patches": 14,
    "worker": 6,
    "patched_worker": 4,
    "publisher": 4,
    "checkpoints": 4,
    "indexes": 3,
    "segments": 4,
    "state_folders": 2,
}


def fuzz(name: str, runs: int, corpus: Path) -> None:
    """Run cases of one target in this process, which ends with it."""
    atheris: Any = import_module("atheris")

    with atheris.instrument_imports(include=["weightbus"]):
        from weightbus.tests.fuzzing import fuzzing
    for number, seed in enumerate(fuzzing.seeds(name)):
        (corpus / f"{number}").write_bytes(seed)
    flags = (
        *(f"-runs={runs}", f"-timeout={SECONDS}", f"-rss_limit_mb={MIB}", f"-max_len={BYTES}"),
        *(f"-artifact_prefix=fuzz-{name}-", "-print_final_stats=1", str(corpus)),
    )
    atheris.Setup([sys.argv[0], *flags], fuzzing.TARGETS[name])
    atheris.Fuzz()


def start(name: str, runs: int) -> str:
    """Run cases of one target in a process of its own; return what is wrong, if anything is."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--target", name, "--runs", str(runs)]
        done = subprocess.run(  # noqa: S603 - our own script
            [*command, "--corpus", folder], capture_output=True, text=True, check=False
        )
    print(f"{name}: {runs} cases, {time.monotonic() - begun:.0f} s", flush=True)
    return "" if done.returncode == 0 else f"{name}:\n{(done.stdout + done.stderr)[-4000:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; return 1 if something was found."""
    parser = argparse.ArgumentParser(description="Fuzz all that takes bytes of others.")
    parser.add_argument("--runs", type=int, default=100_000, help="how many cases, in all")
    parser.add_argument("--target", choices=SHARES, help="this one alone")
    parser.add_argument("--case", type=Path, help="run this case of the target, and no other")
    parser.add_argument("--corpus", type=Path, help="fuzz in this process, and begin here")
    options = parser.parse_args(arguments)
    if options.case is not None:
        from weightbus.tests.fuzzing import fuzzing

        fuzzing.TARGETS[options.target](options.case.read_bytes())
        return 0
    if options.corpus is not None:
        fuzz(options.target, options.runs, options.corpus)
    shares = {options.target: 100} if options.target else SHARES
    runs = {name: -(-options.runs * share // 100) for name, share in shares.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [text for text in pool.map(start, runs, runs.values()) if text]
    print("\n".join(found) or f"{sum(runs.values())} cases, and nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
