"""Frames a second of a collector of two processes, ours beside TorchRL's own scheme.

`python benchmarks/frames.py` alternates `MultiProcessWeightSyncScheme` of weightbus and of TorchRL
in a `MultiSyncCollector`, whose processes live through a run, and prints the medians and what ours
has of theirs:

    small        a policy of one weight, never updated: what guards each forward pass costs
    small, 20ms  an update is asked for every 20 ms
    8 MB, 20ms   the same, of a policy of 8 MB

With TorchRL's scheme a frame may see a part of an update. `tests/training/torchrl_tearing.py`
counts those.
"""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

SECONDS = 4.0  # of one measurement
WARM_UP_BATCHES = 3
LIMIT_SECONDS = 180.0
PAUSE = 0.02  # between two updates that are asked for
FRAMES = 40  # in a batch of one worker
OURS, THEIRS = "weightbus.torchrl", "torchrl.weight_update"
CASES = {"small": (False, False), "small, 20ms": (False, True), "8 MB, 20ms": (True, True)}


def measure(module: str, case: str, seconds: float) -> dict[str, float]:
    """Return the frames and the updates of one run, and what they took."""
    import torch

    from weightbus.tests.training.torchrl_parts import Echo, collectors, fill, policy
    from weightbus.tests.training.torchrl_tearing import Watching, watched

    torch.set_num_threads(1)
    large, updating = CASES[case]
    trained = watched() if large else policy(1.0)
    scheme = importlib.import_module(module).MultiProcessWeightSyncScheme()
    kind: Any = Watching if large else Echo
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector: Any = collectors.MultiSyncCollector(
            [partial(kind, 0), partial(kind, 1)],
            policy=trained,
            frames_per_batch=2 * FRAMES,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
        )
    batches = iter(collector)
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    updates, ended = 0, threading.Event()

    def update() -> None:
        nonlocal updates
        value = 1.0
        while not ended.wait(PAUSE):
            value += 1.0
            collector.update_policy_weights_(fill(trained, value))
            updates += 1

    thread = threading.Thread(target=update, name="updating")
    if updating:
        thread.start()
    began, frames, took = time.perf_counter(), 0, 0.0
    while took < seconds:
        frames += next(batches).numel()
        took = time.perf_counter() - began
    ended.set()
    if updating:
        thread.join()
    collector.shutdown(timeout=20.0)
    scheme.shutdown()
    return {"frames": frames / took, "updates": updates / took}


def _alone(module: str, case: str, seconds: float) -> dict[str, float]:
    words = ["--module", module, "--case", case, "--seconds", str(seconds)]
    done = subprocess.run(  # noqa: S603 - this very script
        [sys.executable, "-m", "weightbus.benchmarks.frames", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(words: Sequence[str]) -> int:
    """Measure, and print a line of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="can be repeated; else all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one measurement")
    parser.add_argument("--module", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.module:
        print(json.dumps(measure(asked.module, asked.case[0], asked.seconds)), flush=True)
        return 0
    for case in asked.case or CASES:
        found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
        for number in range(asked.rounds):
            for module in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                found[module].append(_alone(module, case, asked.seconds))
        ours, theirs = (
            {what: statistics.median(each[what] for each in found[module]) for what in each_of}
            for module, each_of in ((OURS, found[OURS][0]), (THEIRS, found[THEIRS][0]))
        )
        pairs = zip(found[OURS], found[THEIRS], strict=True)
        ratio = statistics.median(a["frames"] / b["frames"] for a, b in pairs)
        print(
            f"{case:12} {ours['frames']:6.0f} of {theirs['frames']:6.0f} frames/s, {ratio:.2f}; "
            f"updates/s {ours['updates']:.1f} and {theirs['updates']:.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
