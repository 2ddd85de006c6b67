"""What a thousand workers cost a publisher: `python benchmarks/thousand.py [--workers N]`.

Python's publisher and the Rust core's take turns. Each is a process of its own, and so is each
hundred of workers, which hold a small model in numpy arrays. Measured are the seconds until the
last worker is made, and until all have joined; the share of a processor that the publisher takes
while nothing is published; and of some publishes the seconds until all have applied it. To be run
on a quiet machine, after `make -C rust_client driver`.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from weightbus import Subscriber
from weightbus.benchmarks.process import Answers, Process
from weightbus.benchmarks.publishers import spent
from weightbus.bus.limits import Timing
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.tests.conformance.languages import chosen

HERD = 100  # workers of one process
NBYTES = 2**16
IDLE_SECONDS, PUBLISHES = 10.0, 5
SECONDS = 300.0


def herd(address: str, first: int, count: int) -> None:
    """Be some workers, for as long as somebody listens."""
    logging.disable()  # so many on one machine are slow, and each would say what it thinks of that
    with ExitStack() as stack:

        def start() -> dict[str, Any]:
            for at in range(first, first + count):
                worker = Subscriber(
                    address, {"m": {"w": np.zeros(NBYTES, np.uint8)}}, name=f"w{at}"
                )
                stack.enter_context(worker).start()
            return {}

        Answers({"start": start}).serve()


def measure(command: list[str], workers: int, rounds: int) -> dict[str, float]:
    """Return what one publisher takes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        told: dict[str, Any] = {"epoch": 1, "chunk_bytes": CHUNK_BYTES_DEFAULT, "timing": Timing()}
        publisher = ProcessPublisher(command, folder=Path(folder), **told)
        stack.enter_context(closing(publisher))
        herds = [
            Process("a herd", "thousand", publisher.address, str(first), str(HERD))
            for first in range(0, workers, HERD)
        ]
        for each in herds:
            stack.callback(each.stop)
        begun = time.perf_counter()
        for each in herds:
            each.tell("start")
        for each in herds:
            each.answer(SECONDS)
        found = {"made": time.perf_counter() - begun}

        def missing(known: Mapping[str, WorkerStatus]) -> str:
            return "" if len(known) >= workers else f"{len(known)} of {workers} workers are there"

        publisher.wait_until(missing, SECONDS)
        found["joined"] = time.perf_counter() - begun
        before = spent(publisher.pid)
        time.sleep(IDLE_SECONDS)  # what is measured is what happens meanwhile
        found["idle"] = (spent(publisher.pid) - before) / IDLE_SECONDS
        weights = {"w": np.zeros(NBYTES, np.uint8)}
        receipts = [publisher.publish_async("m", weights).result(SECONDS) for _ in range(rounds)]
        found["publish"] = statistics.median(receipt.seconds for receipt in receipts)
    return found


def main() -> None:
    """Measure both kinds of publisher, twice in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000, help=f"a multiple of {HERD}")
    parser.add_argument("--turns", type=int, default=2)
    told = parser.parse_args()
    python = [sys.executable, str(Path(__file__).with_name("publishers.py")), "serve"]
    kinds = {"Python": python, "Rust": chosen("rust")[0].command}
    for _ in range(told.turns):
        for title, command in kinds.items():
            its = measure(command, told.workers, PUBLISHES)
            print(
                f"{title}: {told.workers} workers made in {its['made']:.1f} s, "
                f"joined in {its['joined']:.1f} s; "
                f"{its['idle']:.0%} of a processor while nothing is published; "
                f"published to all in {its['publish'] * 1e3:.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        herd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
