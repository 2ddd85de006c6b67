"""A trainer of several ranks, each a process: `ranked.py '{"life": 1, ...}'`, see `trainer.Told`.

Rank 0 takes the orders, and says before each publish to the other ranks what it publishes. These
are forked before anything has a thread. As a step of training does, rank 0 waits for the others;
but not for long: then it publishes without them, and a rank that was away takes the last of what
rank 0 has said. All write their events to the same pipe; each call of a rank is one, with its time.
"""

import json
import logging
import os
import select
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weightbus
from weightbus import WeightBusError
from weightbus.python_client.publisher import Publisher
from weightbus.python_client.publishing.ranks import MARGIN_SECONDS
from weightbus.tests.chaos.content import Kind, weights
from weightbus.tests.chaos.trainer import CALM_SECONDS, Told, Trainer
from weightbus.types import Receipt

BEGIN_SECONDS = 60.0  # for the ranks to connect
MEET_SECONDS = 1.5  # for all ranks to make a call, and again to exchange what they must
COLUMNS = "0.weight"  # of which each rank has columns


def shards_of(model: str, serial: int, kind: Kind, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return what a rank has of what is published under a serial number."""
    made, rank, size = dict[str, torch.Tensor](), mesh.get_rank(), mesh.size()
    for name, array in weights(model, serial, kind).items():
        whole = torch.from_numpy(array)
        if not whole.ndim:
            made[name] = whole
        elif whole.dtype == torch.float16:
            made[name] = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        else:
            at = Shard(1 if name == COLUMNS else 0)
            parts = whole.chunk(size, at.dim)
            empty = whole.narrow(at.dim, 0, 0)
            mine = parts[rank] if rank < len(parts) else empty
            about: Any = {"shape": whole.shape, "stride": whole.stride()}
            made[name] = DTensor.from_local(mine.contiguous(), mesh, [at], run_check=False, **about)
    return made


def begin_group(rank: int, size: int, store: Any) -> DeviceMesh:
    """Connect to the other ranks."""
    seconds = timedelta(seconds=BEGIN_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    return init_device_mesh("cpu", (size,))


def store_at(port: int, *, leads: bool) -> Any:
    """Return the store of the ranks, which is in the process of rank 0."""
    seconds = timedelta(seconds=BEGIN_SECONDS)
    stores: Any = dist
    return stores.TCPStore("127.0.0.1", port, None, leads, seconds, wait_for_workers=False)


def tell(event: str, **facts: Any) -> None:
    """Write an event, in one piece."""
    os.write(1, f"{json.dumps({'event': event, **facts})}\n".encode())


class Call:
    """One call of a rank; tells how long it took, and how it ended."""

    def __init__(self, rank: int, serial: int, limit: float) -> None:
        self._facts: Mapping[str, Any] = {"rank": rank, "serial": serial, "limit": limit}
        self._begun, self.error = time.monotonic(), ""

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        seconds = round(time.monotonic() - self._begun, 2)
        tell("called", **self._facts, seconds=seconds, error="" if error is None else repr(error))


class Follower:
    """A rank other than 0: does as rank 0 says, in lines of JSON."""

    def __init__(self, told: Told, rank: int, orders: int, idle: int) -> None:
        self._told, self._rank, self._orders, self._idle = told, rank, orders, idle
        self._ahead = b""
        store = store_at(self._next()["port"], leads=False)
        self._mesh = begin_group(rank, len(told.sources) + 1, store)
        self._publisher = Publisher(
            "tcp://127.0.0.1:0", settings=told.settings, keys=told.keys or None
        )
        where = {"address": self._publisher.address, "data": self._publisher.data_address}
        tell("rank", rank=rank, pid=os.getpid(), **where)

    def _next(self) -> dict[str, Any]:
        """Return the last order, once there is one.

        Raises:
            EOFError: Rank 0 has ended.
        """
        while b"\n" not in self._ahead:
            more = os.read(self._orders, 2**16)
            if not more:
                raise EOFError
            self._ahead += more
        *lines, self._ahead = self._ahead.split(b"\n")
        order: dict[str, Any] = json.loads(lines[-1])
        return order

    def run(self) -> None:
        """Publish what rank 0 publishes, until it ends."""
        while True:
            with suppress(BrokenPipeError):  # rank 0 has ended, as the next line finds
                os.write(self._idle, bytes([self._rank]))
            order = self._next()
            model, serial, timeout = order["model"], order["serial"], order["timeout"]
            mine = shards_of(model, serial, self._told.kind, self._mesh)
            at = self._told.sources[self._rank - 1]
            source = weightbus.sharded(mine, timeout=MEET_SECONDS, advertise=at)
            limit = MEET_SECONDS + max(MEET_SECONDS, timeout) + MARGIN_SECONDS
            with suppress(WeightBusError), Call(self._rank, serial, limit):
                source.publish(self._publisher, model, timeout=timeout, metadata=stamp(serial))


def stamp(serial: int) -> dict[str, str]:
    """Return the metadata by which ranks know that they publish the same."""
    return {"serial": str(serial)}


class RankedTrainer(Trainer):
    """Rank 0.

    Args:
        told: What it is told.
        pipes: Of the other ranks, for what they are to publish.
        idle: From which the number of a rank comes when it waits for that.
    """

    def __init__(self, told: Told, pipes: list[int], idle: int) -> None:
        self._pipes, self._idle, self._busy = pipes, idle, {*range(1, len(pipes) + 1)}
        store = store_at(0, leads=True)
        self._say({"port": store.port})
        self._mesh = begin_group(0, len(pipes) + 1, store)
        super().__init__(told)

    def _tell(self, event: str, **facts: Any) -> None:
        tell(event, **facts)  # since the other ranks write there, too

    def _say(self, order: Mapping[str, Any]) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it was killed
                os.write(pipe, f"{json.dumps(order)}\n".encode())

    def _wait(self) -> None:
        """Wait for the other ranks, as far as they come."""
        until = time.monotonic() + 2 * MEET_SECONDS
        left = 2 * MEET_SECONDS
        while self._busy and select.select([self._idle], [], [], max(0.0, left))[0]:
            self._busy.difference_update(os.read(self._idle, 2**10))
            left = until - time.monotonic()

    def _begin(self, model: str, serial: int, **options: Any) -> "Future[Receipt]":
        timeout: float = options["timeout"]
        self._wait()
        self._say({"model": model, "serial": serial, "timeout": timeout})
        self._busy = {*range(1, len(self._pipes) + 1)}
        mine, future = shards_of(model, serial, self._told.kind, self._mesh), Future[Receipt]()
        source: Any = weightbus.sharded(mine, timeout=MEET_SECONDS)
        about = options | {"metadata": stamp(serial)}
        try:
            with Call(0, serial, timeout):
                future.set_result(source.publish(self._publisher, model, **about))
        except WeightBusError as error:
            future.set_exception(error)
        return future

    def _settle(self, model: str, workers: int) -> None:
        """Publish until all ranks take part: some may still be in a call that has failed."""
        until = time.monotonic() + CALM_SECONDS
        while True:
            try:
                return super()._settle(model, workers)
            except WeightBusError as error:
                if time.monotonic() > until:
                    raise
                self._tell("trouble", serial=self._serial, text=repr(error))


def run(told: Told) -> NoReturn:
    """Be all ranks: fork those other than 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    pipes, (idle, tells) = list[int](), os.pipe()
    for rank in range(1, len(told.sources) + 1):
        orders, pipe = os.pipe()
        if not os.fork():
            for other in (0, idle, pipe, *pipes):
                os.close(other)
            try:
                Follower(told, rank, orders, tells).run()
            except EOFError:
                os._exit(0)  # the process group may hang at the end
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(orders)
        pipes.append(pipe)
    RankedTrainer(told, pipes, idle).run()
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    run(Told(**json.loads(sys.argv[1])))
