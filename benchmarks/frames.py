"""Compare the frames per second of collectors with weightbus's scheme and with TorchRL's scheme.

`python benchmarks/frames.py` makes one `MultiSyncCollector` with `MultiProcessWeightSyncScheme` of
weightbus and one with TorchRL's, each with two processes. They collect in turns, for a slice of
time each. The program prints the medians over all slices, and over the ratios of neighbouring
slices:

    small        a policy of one weight without updates: the cost of the lock of each forward pass
    small, 20ms  an update is requested every 20 ms
    8 MB, 20ms   the same, with a policy of 8 MB

Both collectors are in one run, since the speed of a shared machine drifts by more within a minute
than the schemes differ. The collector that waits for its turn collects nothing.

With TorchRL's scheme a frame may see a part of an update. `tests/training/torchrl_tearing.py`
counts those.
"""

# TorchRL has no stubs.
# pyright: reportMissingTypeStubs=false

import argparse
import importlib
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

SECONDS = 1.0  # of one slice
WARM_UP_BATCHES = 3
PAUSE = 0.02  # seconds between two requested updates
FRAMES = 40  # in a batch of one worker
OURS, THEIRS = "weightbus.torchrl", "torchrl.weight_update"
CASES = {"small": (False, False), "small, 20ms": (False, True), "8 MB, 20ms": (True, True)}

Pair = tuple[tuple[float, float], tuple[float, float]]  # ours and theirs: frames/s, updates/s


class Collecting:
    """A collector with the scheme of a module."""

    def __init__(self, module: str, case: str) -> None:
        from weightbus.tests.training.torchrl_parts import Echo, collectors, policy
        from weightbus.tests.training.torchrl_tearing import Watching, watched

        large, self._updating = CASES[case]
        self._trained = watched() if large else policy(1.0)
        self._scheme = importlib.import_module(module).MultiProcessWeightSyncScheme()
        kind: Any = Watching if large else Echo
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._collector: Any = collectors.MultiSyncCollector(
                [partial(kind, 0), partial(kind, 1)],
                policy=self._trained,
                frames_per_batch=2 * FRAMES,
                total_frames=-1,
                weight_sync_schemes={"policy": self._scheme},
            )
        self._batches = iter(self._collector)
        self._value, self._updates = 1.0, 0
        for _ in range(WARM_UP_BATCHES):
            next(self._batches)

    def measure(self, seconds: float) -> tuple[float, float]:
        """Collect for some seconds; return the frames and the updates per second."""
        ended = threading.Event()
        thread = threading.Thread(target=self._update, args=(ended,), name="updating")
        updates = self._updates
        if self._updating:
            thread.start()
        began, frames, took = time.perf_counter(), 0, 0.0
        while took < seconds:
            frames += next(self._batches).numel()
            took = time.perf_counter() - began
        ended.set()
        if self._updating:
            thread.join()
        return frames / took, (self._updates - updates) / took

    def _update(self, ended: threading.Event) -> None:
        from weightbus.tests.training.torchrl_parts import fill

        while not ended.wait(PAUSE):
            self._value += 1.0
            self._collector.update_policy_weights_(fill(self._trained, self._value))
            self._updates += 1

    def close(self) -> None:
        """End the collector's processes."""
        self._collector.shutdown(timeout=20.0)
        self._scheme.shutdown()


def compare(case: str, starts: int, rounds: int, seconds: float) -> str:
    """Let both collectors collect in turns; return the line of a case."""
    pairs: list[Pair] = []
    medians: list[float] = []  # of the ratios of each start
    for start in range(starts):
        # new processes for each start: a process keeps its memory layout
        ours, theirs = Collecting(OURS, case), Collecting(THEIRS, case)
        try:
            found = [_pair(ours, theirs, seconds, start + number) for number in range(rounds)]
        finally:
            ours.close()
            theirs.close()
        medians.append(statistics.median(mine[0] / other[0] for mine, other in found))
        pairs += found
    frames = [statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
    updates = [statistics.median(pair[side][1] for pair in pairs) for side in (0, 1)]
    ratio = statistics.median(mine[0] / other[0] for mine, other in pairs)
    return (
        f"{case:12} {frames[0]:6.0f} of {frames[1]:6.0f} frames/s, {ratio:.2f} "
        f"(starts: {min(medians):.2f} to {max(medians):.2f}); "
        f"updates/s {updates[0]:.1f} and {updates[1]:.1f}"
    )


def _pair(ours: Collecting, theirs: Collecting, seconds: float, number: int) -> Pair:
    if number % 2:
        mine = ours.measure(seconds)
        return mine, theirs.measure(seconds)
    other = theirs.measure(seconds)
    return ours.measure(seconds), other


def main(words: Sequence[str]) -> int:
    """Measure, and print a line of each case."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="can be repeated; else all")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of slices")
    parser.add_argument("--starts", type=int, default=5, help="of the collectors")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one slice")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the collectors' processes
    for case in asked.case or CASES:
        print(compare(case, asked.starts, asked.rounds, asked.seconds), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
