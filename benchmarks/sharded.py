"""Measure sharded trainers over shaped links: `python benchmarks/sharded.py`, or `make sharded`.

Four ranks (FSDP2's placement, on the CPU) and some workers are on separate hosts. Each host is a
network namespace, whose link carries at most 200 Mb/s each way. This needs root; everything is
removed at the end. `gather` first collects the model on rank 0, which sends it to all workers;
`sharded` publishes each rank's part from that rank. The measured time is from the call to the
receipt, which has every worker. A row that misses its bound ends the program with status 1. The
optimum is computed: with `gather` and N ranks, rank 0 receives (N-1)/N of a model, then sends a
model to each of W workers; with `sharded`, the slowest link carries a model to a worker, or W/N of
a model from a rank. A patch is sent W times over the link of rank 0.

The row `exchange` measures a model of many tensors: how long the ranks take to agree on a version
and to exchange checksums, without each rank's own work on its tensors. The row `parts` has two
workers on one host, each of which receives half of each tensor, by rows or columns.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import weightbus
from weightbus import ClosedError, Publisher, Settings, Subscriber
from weightbus.benchmarks.fleet import ANSWER_SECONDS, START_SECONDS
from weightbus.benchmarks.process import Answer, Answers, Process
from weightbus.benchmarks.scale import (
    CHUNK,
    FOREVER,
    MIB,
    MODEL,
    NETWORK,
    PORT,
    PUBLISH_SECONDS,
    Bound,
    Questions,
    Rows,
    enter,
    hosts,
    received,
    report,
)
from weightbus.bus.publisher.version import VersionOffer
from weightbus.python_client.publishing import sharded
from weightbus.python_client.publishing.ranks import Ranks, Round
from weightbus.python_client.publishing.sharded import Sharded

RANKS = 4
STORE_PORT = 29500
DIMS = {"rows": 0, "columns": 1}  # how tensors are cut
ONE = Bound("4 ranks, 1 worker: times faster than gathering first", 1.75, 1.5, 1.7, True)
FOUR = Bound("4 ranks, 4 workers: times faster than gathering first", 4.75, 3.8, 4.5, True)
TENSORS, EXCHANGES = 10_000, 5
EXCHANGE = Bound("4 ranks, 10,000 tensors: ms to agree and exchange checksums", 0, 20, 5, False)
COLUMNS = Bound("the same, cut by columns (each rank takes in 3/16 first)", 4.0, 3.0, 3.6, True)
PARTS = Bound("4 ranks, 2 workers of a host with parts: bytes over a version", 1, 1.05, 1.01, False)
PATCHED = Bound("4 ranks, 4 workers: a patch, times faster than all of it", 24, 2, 4, True)
CHANGED = 50  # for a patch, one in this many weights of 16 bits changes


class Exchange:
    """Measures the time of the exchanges between ranks.

    All ranks wait for each other before each exchange, so that the time has no rank's own work.

    Attributes:
        seconds: The time of the last publish, on rank 0.
    """

    def __init__(self, undo: ExitStack) -> None:
        self.seconds, self._begun = 0.0, 0.0
        lead, follow, offer = Ranks.lead, Ranks.follow, Sharded.offer
        stage: Callable[..., object] = vars(sharded)["_stage"]

        def leads(*about: Any, **options: Any) -> Round:
            dist.barrier()
            begun = time.perf_counter()
            found = lead(*about, **options)
            self.seconds = time.perf_counter() - begun
            return found

        def follows(*about: Any, **options: Any) -> Round:
            dist.barrier()
            return follow(*about, **options)

        def stages(*about: Any, **options: Any) -> object:
            found = stage(*about, **options)
            dist.barrier()
            self._begun = time.perf_counter()
            return found

        def offers(*about: Any, **options: Any) -> VersionOffer:
            found = offer(*about, **options)
            self.seconds += time.perf_counter() - self._begun
            return found

        undo.enter_context(patch.object(Ranks, "lead", leads))
        undo.enter_context(patch.object(Ranks, "follow", follows))
        undo.enter_context(patch.object(sharded, "_stage", stages))
        undo.enter_context(patch.object(Sharded, "offer", offers))


def model_of(about: dict[str, Any], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Return a model of many small tensors, or of some large ones."""
    if about["tensors"]:
        mine = torch.full((1, 16), 0.5)
        return {
            f"layers.{i}.weight": DTensor.from_local(mine.clone(), mesh, [Shard(0)])
            for i in range(about["tensors"])
        }
    return {
        f"layers.{i}.weight": distribute_tensor(
            torch.full((1024, 1024), 0.5), mesh, [Shard(DIMS[about["cut"]])]
        )
        for i in range(about["mib"] // 4)
    }


def rank(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Run a rank, which publishes."""
    number = about["rank"]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    stores: Any = dist
    store = stores.TCPStore(
        f"{NETWORK}.1", STORE_PORT, RANKS, number == 0, timedelta(seconds=START_SECONDS)
    )
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    model = model_of(about, init_device_mesh("cpu", (RANKS,)))
    exchange = Exchange(undo) if about["tensors"] else None
    settings = Settings(chunk_bytes=CHUNK, data=f"tcp://{NETWORK}.{number + 1}:{PORT + 1}")
    address = f"tcp://{NETWORK}.{number + 1}:{PORT}"
    publisher = undo.enter_context(Publisher(address, insecure=True, settings=settings))
    sources = {"gather": weightbus.gather(model), "sharded": weightbus.sharded(model)}
    source: Any = sources[about["way"]]

    encoding = about["encoding"]
    few = Settings(encoding=encoding, dtype="bf16") if encoding else None

    def publish() -> Answer:
        for tensor in model.values():
            changed = tensor.to_local().view(-1)[:: CHANGED if encoding else 1]
            changed.add_(2**-8 if encoding else 1)
        options = {"expect": about["expect"], "timeout": PUBLISH_SECONDS, "settings": few}
        dist.barrier()
        begun = time.monotonic()
        receipt = source.publish(publisher, MODEL, **options)
        seconds = time.monotonic() - begun
        seconds = seconds if exchange is None else exchange.seconds
        if receipt is None:
            return {"seconds": seconds, "applied": 0}
        nbytes = sum(worker.nbytes for worker in receipt.workers.values())
        return {"seconds": seconds, "applied": len(receipt.in_state("applied")), "nbytes": nbytes}

    questions.update(publish=publish)


def worker(questions: Questions, about: dict[str, Any], undo: ExitStack) -> None:
    """Apply versions."""
    settings = Settings(shared_memory=False, any_data_host=True)
    target: object = {
        f"layers.{i}.weight": np.zeros((1024, 1024), np.float32) for i in range(about["mib"] // 4)
    }
    if about["half"] is not None:
        target = half_of(about["mib"] // 4, about["half"])
    at = f"tcp://{NETWORK}.1:{PORT}"
    made = undo.enter_context(
        Subscriber(at, {MODEL: target}, name=about["name"], cast=True, settings=settings)
    )

    def receive() -> None:
        with suppress(ClosedError):
            while made.receive(FOREVER):
                pass

    threading.Thread(target=receive, daemon=True).start()
    questions["joined"] = lambda: {"joined": made.wait_joined(START_SECONDS)}
    questions["received"] = lambda: {"bytes": received()}


def half_of(tensors: int, half: int) -> weightbus.Part:
    """Return a target with half of each tensor, alternately of the rows and of the columns."""
    side = slice(512 * half, 512 * half + 512)
    shapes = {f"layers.{i}.weight": (1024, 512) if i % 2 else (512, 1024) for i in range(tensors)}
    target = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return weightbus.Part(
        target, {name: (None, side) if i % 2 else side for i, name in enumerate(target)}
    )


ROLES = {"rank": rank, "worker": worker}


def serve(text: str) -> None:
    """Run a rank or worker until the parent closes our standard input."""
    about, questions = json.loads(text), Questions()
    enter(about["host"])
    with ExitStack() as undo:
        ROLES[about["role"]](questions, about, undo)
        Answers(questions).serve()
    os._exit(0)  # the process group may hang at the end


def measured(
    way: str,
    workers: int,
    mib: int,
    rounds: int,
    cut: str = "rows",
    encoding: str = "",
    tensors: int = 0,
    *,
    parts: bool = False,
) -> list[Answer]:
    """Return rank 0's measurements of each publish but the first.

    Args:
        way: `gather` or `sharded`.
        workers: The number of workers, each on a separate host.
        mib: The size of the model.
        rounds: The number of versions that count.
        cut: How tensors are cut over the ranks.
        encoding: The encoding of patches; with patches, the model has 16 bits.
        tensors: If not 0, the number of small tensors; then the exchange is measured.
        parts: Whether the workers are on one host and each receives a part. Then the answers
            have the bytes that this host received.
    """
    with ExitStack() as undo:

        def start(role: str, host: int, **more: Any) -> Process:
            about = json.dumps({"role": role, "host": host, "mib": mib, **more})
            return undo.enter_context(Process(f"{role} on host {host}", "sharded", about))

        how = {"way": way, "expect": workers or None, "cut": cut}
        how |= {"encoding": encoding, "tensors": tensors}
        ranks = [start("rank", 1 + r, rank=r, **how) for r in range(RANKS)]
        made = [
            start(
                "worker", 1 + RANKS + (0 if parts else w), name=f"w{w}", half=w if parts else None
            )
            for w in range(workers)
        ]
        for each in made:
            if not each.ask("joined", START_SECONDS)["joined"]:
                raise TimeoutError(f"{each.name} has not joined")
        found = list[Answer]()
        for _ in range(1 + rounds):
            before = made[0].ask("received", ANSWER_SECONDS)["bytes"] if parts else 0
            for each in ranks:
                each.tell("publish")
            answers = [each.answer(PUBLISH_SECONDS + ANSWER_SECONDS) for each in ranks]
            if answers[0]["applied"] != workers:
                raise RuntimeError(f"{answers[0]['applied']} of {workers} workers have it")
            came = made[0].ask("received", ANSWER_SECONDS)["bytes"] if parts else 0
            found.append({**answers[0], "received": came - before})
        return found[1:]


def seconds_of(way: str, workers: int, mib: int, rounds: int, cut: str = "rows") -> float:
    """Return the least seconds of a publish; the first publish does not count."""
    return min(each["seconds"] for each in measured(way, workers, mib, rounds, cut))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description="Measure sharded trainers over shaped links.")
    parser.add_argument("--mib", type=int, default=64, help="size of the model (default: 64)")
    parser.add_argument("--rounds", type=int, default=2, help="versions of each way")
    parser.add_argument(
        "--only", help="names of rows, with commas: one, four, columns, patched, parts, exchange"
    )
    asked = parser.parse_args()

    def faster(workers: int, cut: str = "rows") -> Callable[[], float]:
        def ratio() -> float:
            gathered = seconds_of("gather", workers, asked.mib, asked.rounds, cut)
            sent = seconds_of("sharded", workers, asked.mib, asked.rounds, cut)
            print(f"{gathered:.2f} s over {sent:.2f} s")
            return gathered / sent

        return ratio

    def exchange() -> float:
        answers = measured("sharded", 0, 0, EXCHANGES, tensors=TENSORS)
        return 1000 * min(each["seconds"] for each in answers)

    def parts() -> float:
        answers = measured("sharded", 2, asked.mib, asked.rounds, parts=True)
        return min(each["received"] for each in answers) / (asked.mib * MIB)

    def patched() -> float:
        found = list[tuple[float, int]]()
        for encoding in ("raw", "delta"):
            each = measured("sharded", 4, asked.mib, asked.rounds, encoding=encoding)
            found.append(min((one["seconds"], one["nbytes"]) for one in each))
        (whole, all_bytes), (patch, nbytes) = found
        print(f"{whole:.2f} s over {patch:.2f} s, {all_bytes} bytes over {nbytes}")
        return whole / patch

    rows: Rows = {
        "one": (ONE, faster(1)),
        "four": (FOUR, faster(4)),
        "columns": (COLUMNS, faster(4, "columns")),
        "patched": (PATCHED, patched),
        "parts": (PARTS, parts),
        "exchange": (EXCHANGE, exchange),
    }
    with hosts(RANKS + 4, both_ways=True):
        report(rows, asked.only)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        serve(sys.argv[1])
    else:
        main()
