"""A script that torchrun starts, for tests: `torchrun_script.py KIND FOLDER [ADDRESS]`.

Each rank writes what it saw to FOLDER/rank-R.json.
"""

import json
import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import weightbus
from weightbus import Publisher, Settings, Subscriber, WeightBusError
from weightbus.bus.publisher import offers
from weightbus.tests.compose.waiting import wait_for

SECONDS = 60.0  # far more than anything here takes
SIZE = 3 * 2**18  # numbers of a version of three chunks
SOON = Settings(ping=0.1, lost_after=1.0)
RANK = int(os.environ["RANK"])

sent = Counter[str]()  # chunks that a relay or publisher of this process has sent
chunk_of = offers.chunk_of


def counted(*args: Any) -> Any:
    sent["chunks"] += 1
    return chunk_of(*args)


vars(offers)["chunk_of"] = counted


def arrays(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32)}


def write(folder: Path, **saw: Any) -> None:
    (folder / f"rank-{RANK}.json").write_text(json.dumps(saw))


def apply_all(worker: Subscriber, weights: Any) -> list[float]:
    """Apply versions until the last one; return the value of each."""
    values = list[float]()
    while True:
        update = worker.receive(SECONDS)
        assert update is not None, f"rank {RANK} received nothing"
        assert (weights["w"] == weights["w"][0]).all()
        values.append(float(weights["w"][0]))
        if "last" in update.metadata:
            return values


def workers(folder: Path, address: str) -> None:
    """Apply what a trainer elsewhere publishes."""
    weights = arrays(0)
    with (
        weightbus.torchrun.relays(address, ["m"], settings=SOON, timeout=SECONDS) as bus,
        Subscriber(bus.addresses, {"m": weights}, name=f"rank-{RANK}", settings=SOON) as worker,
    ):
        values = apply_all(worker, weights)
        # A relay does not report what a worker has applied just before it left.
        wait_for((folder / "published").exists, "the receipt is there", SECONDS)
        received = None if bus.relay is None else bus.relay.status().received["m"]
        write(folder, values=values, names=bus.names, sent=sent["chunks"], received=received)


def trainer(folder: Path) -> None:
    """Publish on rank 0, apply on the others. Rank 3 dies at its first start, in the publish."""
    starts = folder / "starts-of-3"
    if RANK == 3:
        starts.write_text(starts.read_text() + "." if starts.exists() else ".")
    publisher = Publisher(settings=SOON) if RANK == 0 else None
    with weightbus.torchrun.relays(publisher, ["m"], settings=SOON, timeout=SECONDS) as bus:
        if publisher is not None:
            publisher.wait_for_workers(3, SECONDS)
            receipt = publisher.publish(
                "m", arrays(7), expect=3, timeout=SECONDS, metadata={"last": ""}
            )
            rows = {row.name: [row.state, *row.through] for row in receipt.workers.values()}
            write(folder, rows=rows, names=bus.names)
            (folder / "published").touch()
            publisher.close()
            return
        weights = arrays(0)
        dies = RANK == 3 and starts.read_text() == "."
        settings = Settings(ping=0.1, lost_after=1.0, before_apply=lambda _: dies and os._exit(3))
        with Subscriber(
            bus.addresses, {"m": weights}, name=f"rank-{RANK}", settings=settings
        ) as worker:
            write(folder, values=apply_all(worker, weights), names=bus.names)
            wait_for((folder / "published").exists, "the receipt is there", SECONDS)


def alone(folder: Path) -> None:
    """Make the call on one rank only, then on the other one, then on both; with a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    texts = list[str]()
    for caller in (0, 1):
        if caller == RANK:
            try:
                weightbus.torchrun.relays("tcp://127.0.0.1:1", ["m"], timeout=0.5)
            except WeightBusError as error:
                texts.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    with weightbus.torchrun.relays("tcp://127.0.0.1:1", ["m"], timeout=SECONDS) as bus:
        write(folder, texts=texts, names=bus.names)
    dist.destroy_process_group()


if __name__ == "__main__":
    kind, where, *rest = sys.argv[1:]
    globals()[kind](Path(where), *rest)
