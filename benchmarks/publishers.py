"""The Rust core's publisher beside Python's: `python benchmarks/publishers.py [--rounds N]`.

Both serve at once, each in a process of its own, and take turns: a version goes over the network
to 1, 2 and 4 workers of the Rust client's driver, which apply it in place. What counts is the time
that the receipt tells, and the processor time of the publisher's process meanwhile. To be run on a
quiet machine, after `make -C rust_client driver`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from weightbus import Publisher, Settings
from weightbus.bus.limits import Timing
from weightbus.bus.publisher.status import WorkerStatus
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT
from weightbus.tests.conformance.driver import Driver, Options
from weightbus.tests.conformance.elsewhere import ProcessPublisher
from weightbus.tests.conformance.languages import chosen

CASES = ((200 * 2**20, 1), (200 * 2**20, 2), (200 * 2**20, 4), (2**18, 4))  # bytes, workers
TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP = 2  # publishes of each, first, that do not count
SECONDS = 60.0

Row = tuple[float, float]  # seconds, and processor seconds


def serve() -> None:
    """Publish in Python what lines of JSON say, as the Rust driver does."""

    def say(event: str, **fields: object) -> None:
        print(json.dumps({"event": event, **fields}), flush=True)

    with Publisher("tcp://127.0.0.1:0", settings=Settings(shared_memory=False)) as publisher:
        address, data = publisher.address, publisher.data_address
        say("bound", address=address, data_address=data, epoch=publisher.epoch)
        file = np.empty(0, np.uint8)  # a trainer has its tensors in memory that is there
        for line in sys.stdin:
            told = json.loads(line)
            if told["do"] == "workers":
                workers = {name: _row(its) for name, its in publisher.workers().items()}
                say("workers", id=told["id"], workers=workers)
                continue
            path = Path(told["file"])
            size = path.stat().st_size
            file = file if len(file) == size else np.empty(size, np.uint8)
            with path.open("rb") as stream:
                stream.readinto(file.data)
            data_at = 8 + int(file[:8].view(np.uint64)[0])
            receipt = publisher.publish(told["model"], {"w": file[data_at:]}, timeout=SECONDS)
            fields = ("model", "epoch", "version", "nbytes", "seconds", "digest")
            its = ("state", "seconds", "detail", "encoding", "nbytes")
            known = {
                w.name: {key: getattr(w, key) for key in its} for w in receipt.workers.values()
            }
            answer = {name: getattr(receipt, name) for name in fields}
            say("receipt", id=told["id"], achieved=True, workers=known, **answer)


def _row(its: WorkerStatus) -> dict[str, object]:
    fields = ("state", "road", "phase", "silent_s", "client", "host", "pid")
    return {"models": its.running, **{name: getattr(its, name) for name in fields}}


def spent(pid: int) -> float:
    """Return the processor time of a process so far, of all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def entrant(
    command: list[str], folder: Path, nbytes: int, workers: int
) -> Generator[ProcessPublisher]:
    """Start a publisher, and its workers, to which it pushes."""
    spec = {"m": {"w": {"dtype": "U8", "shape": [nbytes]}}}
    options = Options(in_place=spec, tensors=False, seconds=600)
    with ExitStack() as stack:
        publisher = stack.enter_context(
            closing(
                ProcessPublisher(
                    command,
                    epoch=1,
                    folder=folder,
                    chunk_bytes=CHUNK_BYTES_DEFAULT,
                    timing=Timing(),
                )
            )
        )
        driver = chosen("rust")[0].command
        for at in range(workers):
            made = Driver(driver, publisher.address, f"w{at}", options, folder)
            stack.enter_context(closing(made))

        def missing(known: Mapping[str, WorkerStatus]) -> str:
            there = [w for w in known.values() if w.road == "pushed"]
            return "" if len(there) == workers else f"{len(there)} of {workers} workers are there"

        publisher.wait_until(missing, SECONDS)
        yield publisher


def measure(nbytes: int, workers: int, rounds: int) -> dict[str, list[Row]]:
    """Publish in turns; return what each publish took."""
    python = [sys.executable, __file__, "serve"]
    chance = np.random.default_rng(1)
    rows: dict[str, list[Row]] = {"Python": [], "Rust": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        each = {
            "Python": stack.enter_context(entrant(python, folder, nbytes, workers)),
            "Rust": stack.enter_context(
                entrant(chosen("rust")[0].command, folder, nbytes, workers)
            ),
        }
        for turn in range(WARM_UP + rounds):
            weights = {"w": chance.integers(0, 256, nbytes, np.uint8)}
            for title, publisher in each.items():
                before = spent(publisher.pid)
                receipt = publisher.publish_async("m", weights).result(SECONDS)
                if turn >= WARM_UP:
                    rows[title].append((receipt.seconds, spent(publisher.pid) - before))
    return rows


def main() -> None:
    """Measure every case, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for nbytes, workers in CASES:
        rows = measure(nbytes, workers, rounds)
        (python, python_cpu), (rust, rust_cpu) = (
            (statistics.median(r[0] for r in its), statistics.fmean(r[1] for r in its))
            for its in rows.values()
        )
        print(
            f"{nbytes / 2**20:g} MiB to {workers}: Python {python * 1e3:.2f} ms "
            f"({python_cpu * 1e3:.0f} ms of a processor, reading the file included), Rust "
            f"{rust * 1e3:.2f} ms ({rust_cpu * 1e3:.0f} ms): {rust / python:.2f} of its time",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        main()
