"""Measure what a relay costs: `python benchmarks/relay.py`.

The first publisher has a worker; the second has a relay with a worker; the third, too, but its
worker copies from the relay's memory. All are on this host: the publishers in this process, the
others in separate processes. All other bytes go over loopback. The program measures, in turns, the
time from `publish` until the worker has applied the version. Then it measures how much more memory
the relay has than an idle one, in models, and how many new pages it touches per version once it has
buffers. A ratio or memory that breaks its bound ends the program with status 1. It takes a minute;
on a busy machine, look at the quartiles. With two cores, three processes that copy at once compete
for them: then the ratio is mostly the ratio of the numbers of copies.
"""

import argparse
import json
import queue
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from rich.console import Console

from weightbus import ClosedError, Publisher, Settings, Subscriber
from weightbus.benchmarks import memory
from weightbus.benchmarks.fleet import ANSWER_SECONDS, START_SECONDS
from weightbus.benchmarks.machine import describe
from weightbus.benchmarks.model import UNITS, Model, Shape
from weightbus.benchmarks.process import Answer, Answers, Process
from weightbus.benchmarks.report import print_machine
from weightbus.python_client.relay import Relay

MODEL = "policy"
SIZE = "200MiB/100"
ROUNDS = 15
WARM = 4  # versions of each way that do not count, since buffers and caches are new
RATIO = (1.6, 1.3)  # must, reach
MODELS_MAX = 3.1  # in a relay: the arriving version, the latest, and one still in sockets
FOREVER = 86_400.0
NETWORK = Settings(shared_memory=False)


Questions = dict[str, Callable[[], Answer]]


def serve_worker(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Apply versions, and record the times."""
    model, applied = Model(Shape.parse(about["size"]), zeros=True), queue.SimpleQueue[float]()
    settings = Settings(shared_memory=about["shared"])
    made = Subscriber(about["above"], {MODEL: model.arrays}, name="w", settings=settings)
    worker = undo.enter_context(made)

    def receive() -> None:
        with suppress(ClosedError):
            while worker.receive(FOREVER):
                applied.put(time.perf_counter())

    questions["joined"] = lambda: {"joined": worker.wait_joined(START_SECONDS)}
    questions["applied"] = lambda: {"at": applied.get(timeout=ANSWER_SECONDS)}
    questions["digest"] = lambda: {"digest": model.digest()}
    threading.Thread(target=receive, daemon=True).start()


def serve_relay(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Run a relay with shared memory, which is the default."""
    made = Relay(about["above"], "tcp://127.0.0.1:0", [MODEL], name="relay")
    relay = undo.enter_context(made)
    questions["address"] = lambda: {"address": relay.address}
    questions["joined"] = lambda: {"joined": relay.wait_joined(START_SECONDS)}
    questions["memory"] = lambda: {
        "bytes": memory.private() + memory.shared(),
        "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
    }


ROLES = {"worker": serve_worker, "relay": serve_relay}


def serve(text: str) -> None:
    """Run a relay or worker until the parent closes our standard input."""
    about, questions = json.loads(text), Questions()
    with ExitStack() as undo:
        ROLES[about["role"]](questions, about, undo)
        Answers(questions).serve()


class Way:
    """A publisher and a worker.

    Args:
        name: Its name in rows.
        relayed: Whether a relay is between them.
        shared: Whether the worker copies from the relay's or publisher's memory.
        size: The size of the model.
        undo: Ends everything.
    """

    def __init__(
        self, name: str, size: str, undo: ExitStack, *, relayed: bool = True, shared: bool = False
    ) -> None:
        self.name, self.seconds = name, list[float]()
        self.model = Model(Shape.parse(size), zeros=False)
        self.publisher = undo.enter_context(Publisher(settings=NETWORK))
        above, self.relay = self.publisher.address, None
        start = partial(self._start, size=size, shared=shared, undo=undo)
        if relayed:
            self.relay = start("relay", above)
            above = self.relay.ask("address", START_SECONDS)["address"]
            self.relay.ask("joined", START_SECONDS)
            self.idle = self.memory()
        self.worker = start("worker", above)
        if not self.worker.ask("joined", START_SECONDS)["joined"]:
            raise TimeoutError(f"{name}: {above} has not accepted the worker in time")

    def _start(self, role: str, above: str, *, size: str, shared: bool, undo: ExitStack) -> Process:
        about = json.dumps({"role": role, "above": above, "size": size, "shared": shared})
        return undo.enter_context(Process(f"{role} of {self.name}", "relay", about))

    def memory(self) -> Answer:
        """Return the relay's memory in bytes, and its page faults so far."""
        assert self.relay is not None
        return self.relay.ask("memory", ANSWER_SECONDS)

    def publish(self) -> float:
        """Return the seconds until the worker has applied another version."""
        self.model.advance()
        begun = time.perf_counter()
        self.publisher.publish(MODEL, self.model.arrays, expect=1)
        return self.worker.ask("applied", ANSWER_SECONDS)["at"] - begun

    def check(self) -> None:
        """Raise an error unless the worker has the bytes that were published last."""
        if self.worker.ask("digest", ANSWER_SECONDS)["digest"] != self.model.digest():
            raise RuntimeError(f"{self.name}: the worker has other bytes than were published")


def quartiles(seconds: list[float]) -> str:
    """Return the median and the quartiles in milliseconds."""
    low, middle, high = (1e3 * each for each in statistics.quantiles(seconds, n=4))
    return f"{middle:7.1f} ms   ({low:.1f} to {high:.1f})"


def measure(size: str, rounds: int, console: Console) -> bool:
    """Measure all ways in turns; return whether every bound was kept."""
    with ExitStack() as undo:
        direct, relayed = Way("direct", size, undo, relayed=False), Way("relay", size, undo)
        ways = [direct, relayed, Way("shared", size, undo, shared=True)]
        ratios, before = list[float](), relayed.idle
        for count in range(WARM + rounds):
            if count == WARM:
                before = relayed.memory()
            took = [way.publish() for way in ways]
            if count < WARM:
                continue
            ratios.append(took[1] / took[0])
            for way, seconds in zip(ways, took, strict=True):
                way.seconds.append(seconds)
        after = relayed.memory()
        for way in ways:
            way.check()
    nbytes = Shape.parse(size).nbytes
    for way in ways:
        console.print(f"{way.name:8}{quartiles(way.seconds)}", highlight=False)
    ratio = statistics.median(relayed.seconds) / statistics.median(direct.seconds)
    low, _, high = statistics.quantiles(ratios, n=4)
    must, reach = RATIO
    console.print(
        f"ratio   {ratio:7.2f}      ({low:.2f} to {high:.2f} within rounds; must <= {must}, "
        f"reach {reach}: {'kept' if ratio <= must else 'MISSED'})",
        highlight=False,
    )
    models = (after["bytes"] - relayed.idle["bytes"]) / nbytes
    fresh = (after["faults"] - before["faults"]) * resource.getpagesize() / rounds / nbytes
    console.print(
        f"memory  {models:7.2f} models over {relayed.idle['bytes'] / UNITS['MiB']:.0f} MiB when "
        f"idle (must <= {MODELS_MAX}: {'kept' if models <= MODELS_MAX else 'MISSED'}); "
        f"touched for the first time: {fresh:.3f} models per version",
        highlight=False,
    )
    return ratio <= must and models <= MODELS_MAX


def main() -> None:
    """Measure, and print a row for each way."""
    parser = argparse.ArgumentParser(description="Measure what a relay costs.")
    parser.add_argument("--size", default=SIZE, help=f"of the model (default: {SIZE})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="versions of each way")
    asked = parser.parse_args()
    console = Console()
    print_machine(describe(), console)
    sys.exit(0 if measure(asked.size, asked.rounds, console) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        serve(sys.argv[1])
    else:
        main()
