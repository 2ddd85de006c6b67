"""Measure what keys cost, beside the same in the clear: `python benchmarks/sealing.py`.

Two publishers take turns, one of which has keys; each has workers of its own, in processes of their
own, that copy what comes over the network into numpy arrays. What is reported is the ratio of the
medians, against bounds; a ratio above its bound ends with status 1. Run it on a quiet machine.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weightbus import Publisher, Subscriber
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.report import print_machine
from weightbus.bus.trust.keys import WorkerKeys, generate
from weightbus.codecs.sealing import KEY_BYTES, seal

LARGE, SMALL = 200 * 2**20, 2**18
SECONDS = 60.0
WORKERS = (1, 2, 4, 8)
Pair = tuple[float, float]  # in the clear, and sealed
BOUNDS = {"pushed": 1.35, "fetched": 2.0, "small": 1.5, "further worker": 1.1}


def work(address: str, name: str, nbytes: int, keys: str | None, told: Connection) -> None:
    """Be a worker until the other end hangs up."""
    own = WorkerKeys.read(keys, name) if keys else None
    here = {"w": np.zeros(nbytes, np.uint8)}
    with Subscriber(address, {"m": here}, name=name, shared_memory=False, keys=own) as worker:
        worker.start()
        with contextlib.suppress(EOFError):
            told.recv()


@dataclass
class Side:
    """A publisher and its workers."""

    publisher: Publisher
    times: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def publish(self, what: str, weights: dict[str, Any], workers: list[str] | None = None) -> None:
        """Publish once, and note how long that took, and how much of it our processor worked."""
        begun, worked = time.perf_counter(), time.process_time()
        self.publisher.publish("m", weights, timeout=SECONDS, workers=workers)
        self.times.setdefault(what, []).append(time.perf_counter() - begun)
        self.times.setdefault(f"{what}, processor", []).append(time.process_time() - worked)

    def median(self, what: str) -> float:
        """Return the median of what was measured, without the first, which warms up."""
        return median(self.times[what][1:])


@contextlib.contextmanager
def side(sealed: bool, nbytes: int, workers: int) -> Generator[Side]:
    """Have a publisher and workers."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        keys = stack.enter_context(tempfile.TemporaryDirectory()) if sealed else None
        if keys:
            generate(Path(keys), dict.fromkeys((f"w{n}" for n in range(workers)), "worker"))
        publisher = stack.enter_context(Publisher(shared_memory=False, keys=keys))
        for number in range(workers):
            here, there = context.Pipe()
            stack.callback(here.close)
            told = (publisher.address, f"w{number}", nbytes, keys, there)
            process = context.Process(target=work, args=told)
            process.start()
            stack.callback(process.join, SECONDS)
            stack.callback(here.send, None)
        publisher.wait_for_workers(workers, SECONDS, "m")
        yield Side(publisher)


def turns(nbytes: int, workers: int, rounds: int, *, fetched: bool = False) -> dict[str, Pair]:
    """Return the medians of both sides, in the clear first, by what was measured."""
    weights = {"w": np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)}
    with side(False, nbytes, workers) as plain, side(True, nbytes, workers) as sealed:
        for number in range(rounds + 3):
            weights["w"][:8] = number % 256
            for each in (plain, sealed):
                each.publish("warming up" if number < 2 else "pushed", weights)
                if fetched:
                    each.publish("fetched", weights, ["w0"])
        measured = [what for what in plain.times if what.partition(",")[0] != "warming up"]
        return {what: (plain.median(what), sealed.median(what)) for what in measured}


def aes() -> float:
    """Return how many GB of a chunk are sealed in a second, its checksum included."""
    plain, to = np.ones(2**20, np.uint8), np.zeros(2**20, np.uint8)
    best = min(_timed(plain, to) for _ in range(50))
    return plain.nbytes / best / 1e9


def _timed(plain: Any, to: Any) -> float:
    begun = time.perf_counter()
    seal(bytes(KEY_BYTES), bytes(12), b"", plain, to)
    return time.perf_counter() - begun


def main(words: list[str]) -> int:
    """Measure, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=LARGE, help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    told = parser.parse_args(words)
    console = Console()
    print_machine(describe(), console)
    console.print(f"AES-256-GCM and CRC-32C of a chunk: {aes():.1f} GB/s")
    rows: dict[str, Pair] = {}
    found = turns(told.large, 1, told.rounds, fetched=True)
    rows |= {what: found[what] for what in ("pushed", "fetched")}
    rows["small"] = turns(SMALL // 2, 1, 20 * told.rounds)["pushed"]
    costs = {n: turns(told.large // 4, n, told.rounds)["pushed, processor"] for n in WORKERS}
    first, last = costs[WORKERS[0]], costs[WORKERS[-1]]
    more = WORKERS[-1] - WORKERS[0]
    rows["further worker"] = (last[0] - first[0]) / more, (last[1] - first[1]) / more
    table = Table("what", "plain, ms", "sealed, ms", "ratio", "must")
    for what, (plain, sealed) in rows.items():
        ratio, must = sealed / plain, BOUNDS[what]
        shown = (f"{plain * 1000:.2f}", f"{sealed * 1000:.2f}", f"{ratio:.2f}", f"<= {must}")
        table.add_row(what, *shown)
    console.print(table)
    return int(any(sealed / plain > BOUNDS[what] for what, (plain, sealed) in rows.items()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
