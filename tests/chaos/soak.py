"""Publish for hours: `python tests/chaos/soak.py`, or with `--small 20000 --large 200` in minutes.

A publisher with keys in a process of its own; one worker that stays, and a crowd that joins and
leaves all the time, in another. After a warm-up of a tenth, neither process may hold more memory,
descriptors, threads or segments in the end than it did then. Memory is what it is in the median of
a tenth of the run, private and shared: a process holds more for a moment while a version is new.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightbus import Publisher, PublishError, Settings, Subscriber
from weightbus.bus.trust.keys import WorkerKeys, generate
from weightbus.tests.chaos.leaks import Held, held, in_shared_memory
from weightbus.tests.client.settling import settled

SMALL_BYTES, LARGE_BYTES = 4096, 50 * 2**20
MORE = 0.01  # of memory, at most, after the warm-up
LOOKS = 100  # at what processes hold, in the course of a run
WARM = 0.1  # of a run, before the first look that counts
STAYS_SECONDS = 0.3  # for which a worker of the crowd stays
WAIT_SECONDS = 60.0
# What is freed goes back to the kernel: else glibc keeps what Python's table of names leaves behind
# whenever it is built anew, a megabyte each time.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Look:
    """What both processes held at a moment."""

    publisher: Held
    workers: Held


def lead(folder: str, shared: str) -> None:
    """Be the publisher: publish as many times as each line says, so many bytes, and say when."""
    with Publisher(keys=folder, settings=Settings(shared_memory=shared == "shared")) as publisher:
        print(json.dumps({"address": publisher.address}), flush=True)
        content: dict[str, Any] = {}
        for line in sys.stdin:
            model, nbytes, count, workers = line.split()
            if model not in content:
                content[model] = {"w": np.zeros(int(nbytes), np.uint8)}
                publisher.wait_for_workers(int(workers), WAIT_SECONDS, model)
            missed = 0
            for number in range(int(count)):
                content[model]["w"][:] = number % 251
                try:
                    publisher.publish(model, content[model], timeout=WAIT_SECONDS)
                except PublishError as error:
                    missed += 1
                    print(error, file=sys.stderr)
            print(json.dumps({"missed": missed}), flush=True)


def crowd(address: str, keys: str, model: str, nbytes: str, shared: str) -> None:
    """Be a worker that stays, and others that come and go; each line asks how many there were."""
    joined, over = itertools.count(), threading.Event()
    target = {"w": np.zeros(int(nbytes), np.uint8)}
    options: dict[str, Any] = {"keys": WorkerKeys.read(keys), "shared_memory": shared == "shared"}

    def come_and_go() -> None:
        own = {"w": np.zeros(int(nbytes), np.uint8)}
        while not over.is_set():
            name = f"guest{next(joined)}"
            with Subscriber(address, {model: own}, name=name, **settled(options)).start() as guest:
                assert guest.wait_for_version(model, timeout=WAIT_SECONDS) is not None
                over.wait(STAYS_SECONDS)

    with Subscriber(address, {model: target}, name="stays", **settled(options)).start() as stays:
        guests = threading.Thread(target=come_and_go)
        guests.start()
        for _ in sys.stdin:
            if not guests.is_alive():
                raise SystemExit("the crowd has ended by itself")
            print(json.dumps({"version": stays.version(model)}), flush=True)
        over.set()
        guests.join(WAIT_SECONDS)
    print(json.dumps({"joined": next(joined)}), flush=True)


class Told:
    """One of our two processes."""

    def __init__(self, undo: ExitStack, *words: str) -> None:
        self.process = undo.enter_context(
            subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, __file__, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **GIVING_BACK},
            )
        )
        undo.callback(self.process.kill)

    def ask(self, line: str = "") -> dict[str, Any]:
        """Tell it something, if there is anything to tell; return what it says."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a process has ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> dict[str, Any]:
        """Let it end; return its last words, if it has any."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        words = self.process.stdout.read()
        if self.process.wait(WAIT_SECONDS):
            raise SystemExit(f"a process has ended with status {self.process.returncode}")
        found: dict[str, Any] = json.loads(words or "{}")
        return found

    def holds(self) -> Held:
        """Look at what it holds; memory that it shares with others counts, too."""
        found = held(self.process.pid)
        with open(f"/proc/{self.process.pid}/status") as status:
            shared = next(line for line in status if line.startswith("RssShmem"))
        memory = found.memory + int(shared.split()[1]) * 1024
        return Held(found.descriptors, found.segments, found.threads, memory)


def soak(model: str, nbytes: int, count: int, shared: str) -> Iterator[str]:
    """Publish so many times; print what came of it, and yield what must not be."""
    before, begun = in_shared_memory(), time.monotonic()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        generate(folder / "keys", {"*": "worker"})
        own = str(folder / "keys" / "workers" / "+.json")
        publisher = Told(undo, "lead", str(folder / "keys"), shared)
        address = publisher.ask()["address"]
        workers = Told(undo, "crowd", address, own, model, str(nbytes), shared)
        looks, missed, version = list[Look](), 0, 0
        for look in range(LOOKS):
            share = count * (look + 1) // LOOKS - count * look // LOOKS
            missed += publisher.ask(f"{model} {nbytes} {share} 1")["missed"]
            version = workers.ask("?")["version"]
            looks.append(Look(publisher.holds(), workers.holds()))
        joined = workers.end()["joined"]
        publisher.end()
    took = time.monotonic() - begun
    print(
        f"{model}, {shared} memory: {count:,} publishes of {nbytes:,} bytes in {took:.0f} s, "
        f"{missed} missed; {joined:,} workers came and went"
    )
    if missed:
        yield f"{missed} publishes were missed"
    if version != count:
        yield f"the worker that stays runs version {version}"
    for who in ("publisher", "workers"):
        yield from growth(who, [getattr(look, who) for look in looks])
    if left := in_shared_memory() - before:
        yield f"in shared memory is left: {left}"


def growth(who: str, looks: Sequence[Held]) -> Iterator[str]:
    """Print how what a process holds has grown after the warm-up; yield where it must not."""
    tenth = max(1, round(WARM * len(looks)))
    first, last = looks[tenth : 2 * tenth], looks[-tenth:]
    for fact in ("memory", "descriptors", "segments", "threads"):
        then = statistics.median(getattr(look, fact) for look in first)
        # A guest may be joining or leaving in any moment: the least of many looks tells what stays.
        least = min(getattr(look, fact) for look in looks[tenth : len(looks) // 2])
        now = statistics.median(getattr(look, fact) for look in last)
        unit, digits = (MIB, 2) if fact == "memory" else (1, 0)
        print(
            f"  {who}: {fact} {then / unit:.{digits}f} -> {now / unit:.{digits}f}"
            + (f" ({100 * (now / then - 1):+.2f} %)" if fact == "memory" else "")
        )
        if fact == "memory" and now > (1 + MORE) * then:
            yield f"{who}: memory has grown by {100 * (now / then - 1):.2f} %"
        if (
            fact != "memory"
            and min(getattr(look, fact) for look in looks[len(looks) // 2 :]) > least
        ):
            yield f"{who}: {fact} have grown from {least} to {now:.0f}"


def main(words: Sequence[str]) -> int:
    """Run what is asked for; return the exit status."""
    if words and words[0] in ("lead", "crowd"):
        roles: dict[str, Callable[..., None]] = {"lead": lead, "crowd": crowd}
        roles[words[0]](*words[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=200_000, help="publishes of 4 KiB")
    parser.add_argument("--large", type=int, default=2_000, help="publishes of 50 MiB")
    parser.add_argument("--shared", action="store_true", help="over shared memory, too")
    options = parser.parse_args(words)
    bad = list[str]()
    for transport in ("no", "shared") if options.shared else ("no",):
        for model, nbytes, count in (
            ("small", SMALL_BYTES, options.small),
            ("large", LARGE_BYTES, options.large),
        ):
            bad += soak(model, nbytes, count, transport) if count else ()
    print("\n".join(bad) or "nothing has grown, nothing is left")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
