"""Measure what keys cost, beside the same in the clear: `python benchmarks/sealing.py`.

Two publishers take turns, one of which has keys; each has workers of its own, in processes of their
own, that copy what comes over the network into numpy arrays. What is reported is the ratio of the
medians, against bounds; a ratio above its bound ends with status 1. Run it on a quiet machine.

    python benchmarks/sealing.py --opening python,node

measures instead how long clients take to open sealed chunks in their place, with the CRC-32C of the
plain bytes, beside what their library takes for AES-256-GCM alone. A driver answers `opening BYTES`
with one line of JSON: `bytes`, `open_s` and `aes_s`, the seconds of the best of some rounds.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
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

from weightbus import Publisher, Settings, Subscriber
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.report import print_machine
from weightbus.bus.trust.keys import WorkerKeys, generate
from weightbus.codecs.sealing import KEY_BYTES, TAG_BYTES, Opening, ciphers, seal
from weightbus.tests.conformance.languages import Language, chosen

LARGE, SMALL = 200 * 2**20, 2**18
SECONDS = 60.0
CHUNK, OPENINGS = 2**20, 5  # bytes, and rounds of which the best counts
WORKERS = (1, 2, 4, 8)
Pair = tuple[float, float]  # in the clear, and sealed
BOUNDS = {"pushed": 1.35, "fetched": 2.0, "small": 1.5, "further worker": 1.1}


def work(address: str, name: str, nbytes: int, keys: str | None, told: Connection) -> None:
    """Be a worker until the other end hangs up."""
    own = WorkerKeys.read(keys, name) if keys else None
    here = {"w": np.zeros(nbytes, np.uint8)}
    with Subscriber(
        address, {"m": here}, name=name, settings=Settings(shared_memory=False), keys=own
    ) as worker:
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
        publisher = stack.enter_context(
            Publisher(settings=Settings(shared_memory=False), keys=keys)
        )
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


def opening(language: Language, nbytes: int) -> dict[str, float]:
    """Return how long a client takes to open so much."""
    if not language.folder:
        return opening_here(nbytes)
    language.build()
    command = [*language.command, "opening", str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)  # noqa: S603 - a driver of ours
    told: dict[str, float] = json.loads(done.stdout)
    return told


def opening_here(nbytes: int) -> dict[str, float]:
    """Return how long Python takes: as a worker opens what it receives, and AES alone."""
    key, nonce, text = bytes(KEY_BYTES), bytes(12), np.ones(CHUNK, np.uint8)
    sealed = ciphers()[0](key).encrypt(nonce, text, b"")
    chunks = [np.empty(CHUNK, np.uint8) for _ in range(0, nbytes, CHUNK)]
    best = {"open_s": SECONDS, "aes_s": SECONDS}
    for _ in range(OPENINGS):
        for chunk in chunks:
            chunk[:] = np.frombuffer(sealed[:-TAG_BYTES], np.uint8)
        begun = time.perf_counter()
        for chunk in chunks:
            assert Opening(key, nonce, b"", sealed[-TAG_BYTES:]).opens(chunk, chunk) is not None
        opened = time.perf_counter()
        for _ in chunks:
            ciphers()[0](key).decrypt(nonce, sealed, b"")
        done = time.perf_counter()
        best["open_s"] = min(best["open_s"], opened - begun)
        best["aes_s"] = min(best["aes_s"], done - opened)
    return {"bytes": len(chunks) * CHUNK, **best}


def show_opening(languages: list[Language], nbytes: int, console: Console) -> int:
    """Measure what opening costs some clients."""
    table = Table("client", "opened, ms", "GB/s", "AES alone, ms", "GB/s", "ratio")
    for language in languages:
        told = opening(language, nbytes)
        pairs = [
            (told[name] * 1000, told["bytes"] / told[name] / 1e9) for name in ("open_s", "aes_s")
        ]
        cells = [f"{cell:.1f}" for pair in pairs for cell in pair]
        table.add_row(language.title, *cells, f"{told['open_s'] / told['aes_s']:.2f}")
    console.print(table)
    return 0


def main(words: list[str]) -> int:
    """Measure, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=LARGE, help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--opening", metavar="LANGUAGES", help="measure what opening costs these")
    told = parser.parse_args(words)
    console = Console()
    print_machine(describe(), console)
    if told.opening is not None:
        return show_opening(chosen(told.opening), told.large, console)
    console.print(f"AES-256-GCM and CRC-32C of a chunk: {aes():.1f} GB/s")
    rows: dict[str, Pair] = {}
    found = turns(told.large, 1, told.rounds, fetched=True)
    rows |= {what: found[what] for what in ("pushed", "fetched")}
    rows["small"] = turns(SMALL // 2, 1, 20 * told.rounds)["pushed"]
    costs = {n: turns(told.large // 4, n, told.rounds)["pushed, processor"] for n in WORKERS}
    plain, sealed = (np.polyfit(WORKERS, cost, 1)[0] for cost in zip(*costs.values(), strict=True))
    rows["further worker"] = float(plain), float(sealed)
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
