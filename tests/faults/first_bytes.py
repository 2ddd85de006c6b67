"""Say to a publisher what no worker says (`strangers.py`), a hundred thousand times.

    make first-bytes                                        over tcp and ipc, with and without keys
    python tests/faults/first_bytes.py --count 2000 --over ipc --keys
    python tests/faults/first_bytes.py --first 4000 --count 500 --batch 1      which case it was

Every case is a connection of its own, to the control port or to the data port, from one of many
addresses of this host. After each batch the publisher publishes to an honest worker, and has no
worker that it did not have before. If it has ended, or somebody has joined, that is told with the
number of the batch's first case, and the next batch has a new publisher. The status is 1 then.
"""

import argparse
import contextlib
import itertools
import random
import selectors
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from weightbus.benchmarks.flooded import Language, Setup
from weightbus.benchmarks.victim import EndedError, Victim, keys_for_all
from weightbus.bus.net.endpoints import host_and_port, ipc_path
from weightbus.tests.faults.strangers import Case, case

PARALLEL = 96  # connections at once
ANSWER_SECONDS = 0.03  # until the next step is said though nothing was heard
STAY_SECONDS = 0.15  # that a connection stays which has said everything
WRITE_SECONDS = 1.0  # that a step may take
HOSTS = 500  # addresses: of one host a publisher takes but a few newcomers a second
READ_BYTES = 2**16
BATCH = 500

Over = Literal["tcp", "ipc"]
Ending = Literal["close", "reset", "half", "stay"]
ENDINGS: tuple[Ending, ...] = ("close", "reset", "half", "stay")
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER


class Fault(NamedTuple):
    """What went wrong in a batch."""

    numbers: range
    kinds: str
    what: str


@dataclass
class Result:
    """What came of some cases.

    Attributes:
        count: How many there were.
        answered: To how many the publisher said anything.
        faults: What went wrong.
    """

    count: int = 0
    answered: int = 0
    faults: list[Fault] = field(default_factory=list[Fault])


class Stranger:
    """A connection that says a case.

    Args:
        steps: What it says.
        endpoint: Where.
        rng: Draws from where, and how it ends.
    """

    def __init__(self, steps: Sequence[bytes], endpoint: str, rng: random.Random) -> None:
        path = ipc_path(endpoint)
        self.socket = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self.socket.setblocking(False)
        self._steps, self._left = list(steps), memoryview(b"")
        self._ending = rng.choice(ENDINGS)
        self.answered = False
        self._heard = True  # an answer to the last step, or none was awaited
        self.due = time.monotonic() + WRITE_SECONDS
        with contextlib.suppress(BlockingIOError):
            if path:
                self.socket.connect(path)
            else:
                one = rng.random() < 0.1  # many from one host, too
                host = 1 if one else rng.randrange(2, HOSTS)
                self.socket.bind((f"127.9.{host // 250}.{1 + host % 250}", 0))
                self.socket.connect(host_and_port(endpoint))

    def serve(self, now: float) -> int:
        """Do what can be done; return what to wait for, 0 if it is over."""
        try:
            if not self._read():
                return 0
            if not self._left and not self._steps:
                return selectors.EVENT_READ if now < self.due else 0
            if not self._left:
                if not self._heard and now < self.due:
                    return selectors.EVENT_READ
                self._left, self.due = memoryview(self._steps.pop(0)), now + WRITE_SECONDS
            return self._write(now)
        except OSError:  # it was hung up on
            return 0

    def _read(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            if not self.socket.recv(READ_BYTES):
                return False
            self.answered = self._heard = True
        return True

    def _write(self, now: float) -> int:
        with contextlib.suppress(BlockingIOError):
            self._left = self._left[self.socket.send(self._left) :]
        if self._left:
            return selectors.EVENT_READ | selectors.EVENT_WRITE if now < self.due else 0
        self._heard, self.due = False, now + ANSWER_SECONDS
        if self._steps:
            return selectors.EVENT_READ
        match self._ending:
            case "close":
                return 0
            case "reset":
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                return 0
            case "half":
                self.socket.shutdown(socket.SHUT_WR)
            case "stay":
                pass
        self.due = now + STAY_SECONDS
        return selectors.EVENT_READ


def say_all(cases: Iterator[tuple[Case, str, random.Random]]) -> int:
    """Have strangers say cases, each to an endpoint; return how many had any answer."""
    answered = 0
    with selectors.DefaultSelector() as selector:
        while True:
            free = PARALLEL - len(selector.get_map())
            for each, endpoint, rng in itertools.islice(cases, free):
                try:
                    made = Stranger(each.steps, endpoint, rng)
                except OSError:  # nobody listens there any more
                    continue
                selector.register(made.socket, selectors.EVENT_WRITE, made)
            if not selector.get_map():
                return answered
            ready = {key.fd for key, _ in selector.select(ANSWER_SECONDS / 3)}
            now = time.monotonic()
            for key in list(selector.get_map().values()):
                stranger: Stranger = key.data
                if key.fd not in ready and now < stranger.due:
                    continue
                events = stranger.serve(now)
                if not events:
                    answered += stranger.answered
                    selector.unregister(stranger.socket)
                    stranger.socket.close()
                elif events != key.events:
                    selector.modify(stranger.socket, events, stranger)


def run(setup: Setup, *, seed: int, first: int, count: int, batch: int = BATCH) -> Result:
    """Say so many cases to publishers; keys are those of the environment."""
    result = Result()
    end, at = first + count, first
    while at < end:
        with Victim(setup) as victim:
            fine = True
            while fine and at < end:
                some = range(at, min(end, at + batch))
                fine, at = _batch(victim, seed, some, result), some.stop
    return result


def _batch(victim: Victim, seed: int, numbers: range, result: Result) -> bool:
    """Say some cases; return whether the publisher is as before."""
    kinds: Counter[str] = Counter()

    def cases() -> Iterator[tuple[Case, str, random.Random]]:
        for number in numbers:
            each, rng = case(seed, number), random.Random(f"{seed}:{number}")
            kinds[each.kind] += 1
            yield each, victim.addresses[rng.choice(("control", "data"))], rng

    result.answered += say_all(cases())
    result.count += len(numbers)
    try:
        victim.publishes()
        workers = victim.check()["joined"]
    except EndedError as error:
        what = f"the publisher has ended: {error}"
    else:
        joined = sorted(set(workers) - set(victim.workers))
        if not joined:
            return True
        what = f"joined: {', '.join(joined)}"
    told = ", ".join(kinds) if len(kinds) <= 3 else f"{len(kinds)} kinds"
    result.faults.append(Fault(numbers, told, what))
    return False


def setup_of(language: Language, over: Over, folder: str) -> Setup:
    """Return a publisher that listens over tcp, or over ipc in a folder."""
    address = "tcp://127.0.0.1:0" if over == "tcp" else f"ipc://{folder}/control"
    return Setup(language, shape="64KiB/4", workers=1, address=address, pause=0.2)


def _again(numbers: range) -> str:
    """Return the options that say these cases again."""
    return f"--first {numbers.start} --count {len(numbers)}"


def main(words: list[str]) -> int:
    """Say it all; return 1 if a publisher has ended, or somebody has joined."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="cases in all")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=BATCH, help="cases between two looks")
    parser.add_argument("--publisher", choices=("python", "rust"), default="python")
    parser.add_argument("--over", choices=("tcp", "ipc"), action="append", help="else over both")
    parser.add_argument("--keys", action=argparse.BooleanOptionalAction, help="else both ways")
    given = parser.parse_args(words)
    ways = list(
        itertools.product(
            given.over or ("tcp", "ipc"), (False, True) if given.keys is None else (given.keys,)
        )
    )
    faults = 0
    for number, (over, keyed) in enumerate(ways):
        share = given.count // len(ways) + (number < given.count % len(ways))
        began = time.monotonic()
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wbs"))
            if keyed:
                stack.enter_context(keys_for_all())
            setup = setup_of(given.publisher, over, str(Path(folder)))
            result = run(setup, seed=given.seed, first=given.first, count=share, batch=given.batch)
        faults += len(result.faults)
        print(
            f"{given.publisher}, {over}, {'with' if keyed else 'without'} keys: "
            f"{result.count} cases, {result.answered} answered, {len(result.faults)} faults, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        for fault in result.faults:
            print(f"  {_again(fault.numbers)}: {fault.kinds}: {fault.what}")
    print(f"{faults} faults in {given.count} cases")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
