"""Measure the memory of a publish on both sides, and the pauses of trainer and worker.

Run as `python -m weightbus.benchmarks.costs SHAPE TRANSPORT`: a fresh publisher process with one
worker, so that the counted memory has nothing else. Prints one line of JSON.
"""

import statistics
import sys
import time
from typing import Any

from . import memory
from .bus import MODEL, Bus, Transport, transport_of
from .fleet import START_SECONDS
from .model import Model, Shape
from .process import Answers, Process
from .shelf import shelf

VERSIONS = 10
ASYNC_ROUNDS = 7


def measure(shape: Shape, transport: Transport) -> dict[str, Any]:
    """Publish ten versions to one worker, and return all measurements."""
    model = Model(shape, zeros=False)
    with shelf(shape.nbytes) as file, Process("watcher", "watcher", file, shape.text) as watcher:
        bus = Bus("weightbus", "weightbus_receive", transport, file)
        bus.start(1, model)
        try:
            return {
                "shape": shape.text,
                "transport": transport,
                "bytes": shape.nbytes,
                **_versions(bus, model),
                **_pauses(bus),
                **_seen(bus, model, watcher),
                **_returns(bus, model),
            }
        finally:
            bus.stop()


def _versions(bus: Bus, model: Model) -> dict[str, Any]:
    """Publish all versions; measure the memory of the first and of the last."""
    bus.fleet.ask("memory")  # this resets the peak
    pid = bus.fleet.processes[0].pid
    memory.reset_peak()
    seconds: list[float] = []
    extra: dict[str, dict[str, float]] = {}
    with memory.PrivatePeak(pid) as worker_private:
        for version in range(1, VERSIONS + 1):
            model.advance()
            seconds.append(bus.publish_once())
            if version in (1, VERSIONS):
                (worker,) = bus.fleet.ask("memory")
                extra["first" if version == 1 else "last"] = {
                    "publisher": memory.peak() - bus.resident_before,
                    "worker": worker["peak"] - worker["before"],
                    "worker_private": worker_private.nbytes - worker["private_before"],
                }
    bus.check()
    return {"version_seconds": seconds, "extra_bytes": extra}


def _pauses(bus: Bus) -> dict[str, Any]:
    """Return the times of the worker's applies, and of plain copies of the same tensors."""
    (applies,) = bus.fleet.ask("pauses")
    copies = [bus.fleet.ask("memcpy")[0]["seconds"] for _ in range(VERSIONS)]
    return {"apply_seconds": applies["pauses"][1:], "worker_memcpy_seconds": copies[1:]}


def _seen(bus: Bus, model: Model, watcher: Process) -> dict[str, Any]:
    """Measure how long the worker's tensors change, in turns with plain copies to them."""
    seen: list[float] = []
    copies: list[float] = []
    for _ in range(ASYNC_ROUNDS):
        watcher.ask("arm", START_SECONDS)
        model.advance()
        bus.publish_once()
        seen.append(watcher.ask("seen", START_SECONDS)["seconds"])
        copies.append(bus.fleet.ask("memcpy")[0]["seconds"])
    return {"seen_seconds": seen[1:], "seen_memcpy_seconds": copies[1:]}


def _returns(bus: Bus, model: Model) -> dict[str, Any]:
    """Measure how long `publish_async` takes, in turns with a plain copy of the model."""
    scratch, tensors = Model(model.shape, zeros=True), model.tensors
    returned: list[float] = []
    copied: list[float] = []
    for _ in range(ASYNC_ROUNDS):
        model.advance()
        before = time.perf_counter()
        future = bus.publisher.publish_async(MODEL, tensors)
        returned.append(time.perf_counter() - before)
        future.result(START_SECONDS)
        before = time.perf_counter()
        model.copy_to(scratch)
        copied.append(time.perf_counter() - before)
    bus.check()
    return {"async_seconds": returned[1:], "publisher_memcpy_seconds": copied[1:]}


def summary(costs: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the table."""
    seconds, extra = costs["version_seconds"], costs["extra_bytes"]
    applies, copies = costs["apply_seconds"], costs["worker_memcpy_seconds"]
    seen, beside = costs["seen_seconds"], costs["seen_memcpy_seconds"]
    returned, copied = costs["async_seconds"], costs["publisher_memcpy_seconds"]

    def memory_of(side: str) -> str:
        first, last = (extra[when][side] / costs["bytes"] for when in ("first", "last"))
        return f"{first:.2f} x the model for one version, {last:.2f} x after {VERSIONS}"

    def over(some: list[float], others: list[float]) -> str:
        mine, its = statistics.median(some), statistics.median(others)
        return f"{mine * 1e3:.2f} ms, {mine / its:.2f} x a memcpy of the model"

    return [
        ("peak memory beyond the model, publisher", memory_of("publisher")),
        ("peak memory beyond the model, worker", memory_of("worker")),
        ("the same, its own pages only (no shared ones)", memory_of("worker_private")),
        ("first publish over the tenth", f"{seconds[0] / seconds[-1]:.1f} x"),
        ("the trainer's pause: publish_async returns", over(returned, copied)),
        ("the worker's pause: Update.seconds", over(applies, copies)),
        ("the worker's pause: first change seen to last", over(seen, beside)),
    ]


if __name__ == "__main__":
    answers = Answers({})
    answers.say(measure(Shape.parse(sys.argv[1]), transport_of(sys.argv[2])))
