"""Drivers as workers of two ranks that publish a sharded model: sharded.py DRIVER...

This script starts itself as each of the ranks. Rank 1 ends itself in the middle of the last
version. Of that version, no worker may apply a byte.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import weightbus
from weightbus import Publisher, Settings, WeightBusError
from weightbus.bus.publisher import offers
from weightbus.python_client.publishing.parts import Obtaining
from weightbus.tests.client.gathering_ranks import begin_group
from weightbus.tests.client.ranks import run_ranks
from weightbus.tests.conformance.driver import Driver, Options
from weightbus.tests.conformance.ledger import Bytes
from weightbus.tests.conformance.publishing import expect

SECONDS = 60.0
SETTINGS = Settings(chunk_bytes=2**16, ping=0.2, lost_after=4.0)
SHAPE = (1024, 513)  # 2 MiB: 17 chunks at each rank, one of which has rows of both
VERSIONS = 4
ENDS_AFTER = 5  # chunks of the last version
DAMAGED = 3  # chunks of rank 1
DIED = 3  # exit status of a rank that ends itself, see `run_ranks`


def whole(number: int) -> torch.Tensor:
    """Return a tensor of any bits."""
    bits = torch.randint(-(2**31), 2**31, SHAPE, generator=torch.Generator().manual_seed(number))
    return bits.to(torch.int32).view(torch.float32)


class Counted:
    """Counts the bytes of chunks that this rank sends; also damages some, and ends the process."""

    def __init__(self, damages: int) -> None:
        self.nbytes, self.chunks, self.damages, self.ends = 0, 0, damages, False
        self._chunk_of: Callable[..., Any] = offers.chunk_of
        offers.chunk_of = self._counted

    def _counted(self, chunked: Any, index: int) -> Any:
        chunk, payload = self._chunk_of(chunked, index)
        self.nbytes += len(payload)
        self.chunks += 1
        if self.ends and self.chunks > ENDS_AFTER:
            os._exit(DIED)
        if self.damages:
            self.damages -= 1
            payload = bytes(len(payload))
        return chunk, payload


def play(publisher: Publisher, rank: int, workers: list[Driver]) -> None:
    """Publish some versions that workers take from both ranks, and one that they cannot."""
    counted = Counted(damages=DAMAGED * rank)
    mesh = init_device_mesh("cpu", (2,))
    obtain = patch.object(Obtaining, "__call__", side_effect=AssertionError("rank 0 gets chunks"))

    def publish(number: int) -> None:
        model = {"w": distribute_tensor(whole(number), mesh, [Shard(0)])}
        weightbus.sharded(model, timeout=SECONDS).publish(publisher, "m", timeout=SECONDS)

    sent: list[Any] = [None, None]
    for number in range(1, VERSIONS + 1):
        with obtain:  # workers take chunks of rank 1 from rank 1
            publish(number)
        dist.all_gather_object(sent, counted.nbytes)
        if rank:
            counted.nbytes, counted.chunks = 0, 0
            continue
        content = Bytes.of({"w": whole(number).numpy()}, SETTINGS.chunk_bytes, {})
        for worker in workers:
            event = worker.wait_applied("m", publisher.epoch, number)
            expect(event["tensors"] == content.crcs, f"{worker.name}: other bytes")
            expect(event["digest"] == content.digest, f"{worker.name}: another digest")
        half = len(workers) * whole(0).nbytes // 2
        expect(abs(sent[1] - half) <= 4 * SETTINGS.chunk_bytes, f"rank 1 has sent {sent[1]} bytes")
    counted.ends = bool(rank)
    try:
        publish(VERSIONS + 1)
    except WeightBusError as error:
        expect("chunks of rank 1" in str(error), str(error))
    else:
        expect(rank > 0, "published without rank 1")
    for worker in workers:  # none at rank 1
        runs = publisher.workers()[worker.name].running["m"]
        expect(runs == (publisher.epoch, VERSIONS), f"{worker.name} runs {runs}")
        worker.stop()
        expect(worker.running("m") == runs, worker.story())
    if rank == 0:
        took = f"{len(workers)} workers took {sent[1]} bytes of the last version from rank 1"
        print(f"sharded: {VERSIONS} versions hold; {took}", flush=True)


def run(rank: int, size: int, folder: Path) -> None:
    """Be one of the ranks, with the workers if it is rank 0."""
    drivers: list[str] = json.loads((folder / "drivers").read_text())
    begin_group(rank, size, folder)
    with ExitStack() as undo:
        publisher = undo.enter_context(Publisher("tcp://127.0.0.1:0", settings=SETTINGS))
        workers = list[Driver]()
        for at, driver in enumerate(drivers if rank == 0 else ()):
            made = Driver([driver], publisher.address, f"w{at}", Options(), folder)
            workers.append(undo.enter_context(closing(made)))
        if workers:
            publisher.wait_for_workers(len(workers), SECONDS)
        play(publisher, rank, workers)
    os._exit(0)  # the group has lost a rank, so that it cannot be left


def main(drivers: list[str]) -> int:
    """Play with all drivers at once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "drivers").write_text(json.dumps(drivers))
        print(run_ranks(__file__, 2, folder, dies=1)[0], end="")
    return 0


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.exit(main([str(Path(driver).resolve()) for driver in sys.argv[1:]]))
