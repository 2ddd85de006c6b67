"""One side of the bus in a process of its own, told what to do in JSON and telling in JSON lines.

    python tests/faults/bus_process.py '{"role": "worker", "address": "tcp://...", ...}'

A worker applies what comes and tells of each version: number, epoch, checksum of its memory, and
the most memory that the process has ever used. A publisher publishes once for each line that it
reads, a number that fills the model, and tells what became of it.
"""

import json
import os
import sys
import zlib
from typing import Any

import numpy as np

from weightbus import ApplyError, Publisher, PublishError, RefusedError, Settings, Subscriber
from weightbus.tests.client.settling import settled

OPTIONS = (
    "address",
    "data",
    "epoch",
    "shared_memory",
    "state",
    "keys",
)  # of a publisher, passed on as they are


def tell(event: str, **facts: Any) -> None:
    """Print one line for whoever started this process."""
    print(json.dumps({"event": event, **facts}), flush=True)


def memory_peak() -> int:
    """Return the most bytes of memory that this process has used."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def model(nbytes: int, value: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return a model of several tensors, its bytes following from one number."""
    pattern = np.arange(251, dtype=np.uint8) + np.uint8(value)
    half = nbytes // 2
    return {"a": np.resize(pattern, half), "b": np.resize(pattern, nbytes - half)}


def checksum(weights: dict[str, np.ndarray[Any, Any]]) -> int:
    """Return what tells one model from another."""
    return zlib.crc32(weights["b"].data, zlib.crc32(weights["a"].data))


def work(told: dict[str, Any]) -> None:
    """Be a worker until the standard input ends or the parent kills us."""
    weights = {name: np.zeros_like(array) for name, array in model(told["nbytes"], 0).items()}
    timing = Settings(ping=told.get("ping", 1.0), lost_after=told.get("lost_after", 5.0))
    options: Any = {"name": told["name"], "settings": timing, "keys": told.get("keys", "")}
    with Subscriber(told["address"], {"m": weights}, **settled(options)) as worker:
        tell("ready", pid=os.getpid(), memory=memory_peak())
        while True:
            try:
                update = worker.receive(1.0)
            except (ApplyError, RefusedError) as error:
                tell("refused", code=error.code, text=str(error))
                continue
            if update is not None:
                facts = {"version": update.version, "epoch": update.epoch}
                tell("applied", checksum=checksum(weights), memory=memory_peak(), **facts)


def lead(told: dict[str, Any]) -> None:
    """Be a publisher until the standard input ends."""
    timing = Settings(ping=told.get("ping", 1.0), lost_after=told.get("lost_after", 5.0))
    options = {key: told[key] for key in OPTIONS if key in told}
    with Publisher(**settled({**options, "settings": timing})) as publisher:
        tell("ready", address=publisher.address, data=publisher.data_address, pid=os.getpid())
        publisher.wait_for_workers(told.get("workers", 1), 60.0, "m")
        for line in sys.stdin:
            try:
                receipt = publisher.publish("m", model(told["nbytes"], int(line)), timeout=60.0)
            except PublishError as error:
                receipt = error.receipt
            applied = receipt.in_state("applied")
            tell("published", version=receipt.version, epoch=receipt.epoch, applied=applied)


if __name__ == "__main__":
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    {"worker": work, "publisher": lead}[arguments["role"]](arguments)
