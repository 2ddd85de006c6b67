"""One of the ranks that publish sharded models with `weightbus.sharded`.

    python sharding_ranks.py RANK SIZE FOLDER

Prints a JSON object of what this rank saw: for rank 0 what its workers took, and for all ranks the
errors. The models are those of `gathering_ranks.py`. One rank ends itself at the end.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import weightbus
from weightbus import Publisher, Settings, StateError, Subscriber, WeightBusError
from weightbus.bus.messages import Hello
from weightbus.bus.net.endpoints import host_and_port
from weightbus.bus.net.sources import SourceFetcher
from weightbus.bus.staged import SourceFetch
from weightbus.bus.worker.events import SourceFetched
from weightbus.python_client.publishing import sharded
from weightbus.python_client.publishing.ranks import Ranks, Round
from weightbus.tests.client.gathering_ranks import (
    SECONDS,
    SHORT,
    Rank,
    Tensors,
    after_steps,
    begin_group,
    bits,
    made_once,
    placements,
    status,
    tied,
    two_ways,
    wrappers,
)

CHUNK_BYTES = 64  # so small that most chunks have bytes of several ranks
Intervals = list[tuple[int, int, int]]
WHOLE_FETCH, FETCH = SourceFetcher.fetch, vars(SourceFetcher)["_fetch"]


class ShardRank(Rank):
    """This rank. Rank 0 has a worker that takes chunks from sources, and one that does not."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.mesh = init_device_mesh("cpu", (size,))
        self.saw, self.took, self.plain = {}, {}, dict[str, torch.Tensor]()
        self.publisher, self.worker = None, None
        settings = Settings(chunk_bytes=CHUNK_BYTES, ping=0.5, lost_after=3.0)
        self.own = Publisher("tcp://127.0.0.1:0", settings=settings)
        self.workers: list[Subscriber] = []
        self.address_of: list[Any] = [None] * size
        dist.all_gather_object(self.address_of, self.own.address)
        if rank == 0:
            patch.object(SourceFetcher, "fetch", self.fetch).start()
            for name, take in (("direct", self.take), ("plain", self.take_plain)):
                made = Subscriber(self.own.address, {"m": take}, name=name)
                self.workers.append(made.start())
            self.own.wait_for_workers(2, SECONDS)

    @staticmethod
    def fetch(sources: SourceFetcher, job: SourceFetch, hello: Hello) -> None:
        """Let the worker `plain` fetch all from its publisher, as workers in other languages do."""
        if hello.name != "plain":
            return WHOLE_FETCH(sources, job, hello)
        return vars(sources)["_report"](SourceFetched(job, (), over=True))

    def take_plain(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.plain = {name: tensor.clone() for name, tensor in pairs}

    def publish(self, model: object, **options: Any) -> Any:
        options = {"timeout": SECONDS} | options
        return weightbus.sharded(model, timeout=SECONDS).publish(self.own, "m", **options)

    def source(self, model: object) -> Callable[[], object]:
        source = weightbus.sharded(model, timeout=SECONDS)
        return partial(source.publish, self.own, "m", timeout=SECONDS)

    def same(self, case: str, model: object, want: Tensors, **options: Any) -> Any:
        receipt = super().same(case, model, want, **options)
        if self.rank == 0 and not self.saw[f"same: {case}"]:
            assert sorted(receipt.in_state("applied")) == ["direct", "plain"]
            if any(bits(self.plain[name]) != bits(self.took[name]) for name in want):
                self.saw[f"same: {case}"] = "the worker without sources has other values"
        return receipt


def refused(me: ShardRank) -> None:
    """Errors before anything is announced; after each, the same call succeeds."""
    last, made = me.size - 1, made_once(me)
    soon = weightbus.sharded(made, timeout=SHORT)

    def again(case: str) -> None:
        me.same(f"after {case}", made, tied().state_dict())

    for case, rank in (("the last rank does not call", last), ("rank 0 does not call", 0)):
        call: Callable[[], object] = partial(soon.publish, me.own, "m")
        me.error(case, int if me.rank == rank else call)
        again(case)
    usual: dict[str, object] = {"x": torch.ones(2), "y": torch.ones(1)}
    others: dict[str, dict[str, object]] = {
        "a name": {"x": torch.ones(2), "z": torch.ones(1)},
        "shards": {"x": distribute_tensor(torch.ones(2), me.mesh, [Shard(0)]), "y": torch.ones(1)},
        "a shape": {"x": torch.ones(1, 2), "y": torch.ones(1)},
        "a dtype": {"x": torch.ones(2, dtype=torch.float64), "y": torch.ones(1)},
    }
    for case, other in others.items():
        me.error(case, partial(me.publish, other if me.rank == last else usual))
    mine = Settings(dtype="float16") if me.rank == last else None
    me.error("a setting", partial(me.publish, usual, settings=mine))
    misplaced(me)
    there = "another" if me.rank == last else "m"
    source = weightbus.sharded(made, timeout=SECONDS)
    me.error("another id", partial(source.publish, me.own, there, timeout=SECONDS))
    step = {"step": "1" if me.rank == last else "2"}
    me.error("another step", partial(me.publish, usual, metadata=step))
    me.error("bad metadata", partial(me.publish, usual, metadata={"": ""}))
    again("different models")
    call = partial(soon.publish, me.own, "m")
    me.error("once", call)
    me.error("twice", call if me.rank == last else int)
    again("a second call of one rank")
    me.error("rank 0 has a bad argument", lambda: me.publish(usual, commit="never"))
    again("rank 0's errors")


def kept(me: ShardRank) -> None:
    """Note what ranks connect and send again in calls that follow one without failure."""
    made = made_once(me)
    me.publish(made)
    connect: Any = vars(dist)["ProcessGroupGloo"]
    with (
        patch.object(dist, "ProcessGroupGloo", wraps=connect) as connects,
        patch.object(sharded, "difference", wraps=vars(sharded)["difference"]) as compares,
    ):
        for _ in range(2):
            me.same("with the connections of before", made, tied().state_dict())
        me.saw["connected and compared again"] = connects.call_count, compares.call_count
        me.error("a failure", partial(me.publish, {"x": torch.ones(1 + (me.rank == 1))}))
        me.saw["after a failure to agree"] = connects.call_count
        fails = patch.object(Round, "send_bytes", side_effect=StateError("broken"))
        with fails if me.rank == 1 else nullcontext():
            begun = time.monotonic()
            me.error("a broken round", partial(me.publish, made))
            me.saw["broken after"] = time.monotonic() - begun
        me.same("with new connections", made, tied().state_dict())
        me.saw["after a broken round"] = connects.call_count


def stopped(me: ShardRank) -> None:
    """Rank 0, whose process has the store, is stopped while the last rank makes the call."""
    pids: list[Any] = [None] * me.size
    dist.all_gather_object(pids, os.getpid())
    made, begun = made_once(me), time.monotonic()
    if me.rank == me.size - 1:
        os.kill(pids[0], signal.SIGSTOP)
        try:
            weightbus.sharded(made, timeout=SHORT).publish(me.own, "m", timeout=SHORT)
        except WeightBusError as error:
            me.saw["rank 0 is stopped"] = f"{type(error).__name__}: {error}"
        finally:
            os.kill(pids[0], signal.SIGCONT)
        me.saw["stopped for"] = time.monotonic() - begun
    dist.barrier()
    me.same("after rank 0 was stopped", made, tied().state_dict())


def misplaced(me: ShardRank) -> None:
    """One rank finds the parts of a tensor elsewhere than the others do, as by a mistake here."""
    model = {"x": distribute_tensor(torch.ones(2 * me.size), me.mesh, [Shard(0)])}
    wrong: dict[str, Callable[[Intervals], Intervals]] = {
        "a hole": lambda found: found[:-1],
        "an overlap": lambda found: [(begin, end + 4 * (not r), r) for begin, end, r in found],
        "too much": lambda found: [*found[:-1], (*found[-1][:1], 8 * me.size + 4, me.size - 1)],
        "elsewhere": lambda found: [(begin, end, (r + 1) % me.size) for begin, end, r in found],
    }
    intervals = vars(sharded)["_intervals"]
    for case, change in wrong.items():
        for rank in (0, me.size - 1):
            with ExitStack() as undo:
                if me.rank == rank:

                    def changed(*about: Any, change: Any = change) -> Any:
                        return change(intervals(*about))

                    undo.enter_context(patch.object(sharded, "_intervals", changed))
                me.error(f"{case}, rank {'0' if rank == 0 else 'last'}", partial(me.publish, model))


def memory(me: ShardRank) -> None:
    """Note how far the memory of a rank rises in a publish, in units of its shards."""
    rows, count = 512 * me.size, 16
    mine = count * 2 * 4 * 1024 * rows / me.size
    model = {
        f"{n}.{dim}": distribute_tensor(torch.ones(rows, 1024), me.mesh, [Shard(dim)])
        for n in range(count)
        for dim in (0, 1)
    }
    own = Publisher("tcp://127.0.0.1:0")
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = status("VmRSS")
    with patch.object(sharded, "BATCH_BYTES", 2**20):
        weightbus.sharded(model, timeout=SECONDS).publish(own, "m", timeout=SECONDS)
    me.saw["memory"] = (status("VmHWM") - before) / mine
    dist.barrier()
    own.close()


def dies(me: ShardRank, rank: int) -> None:
    """A rank ends once the version is announced, before a worker has a chunk from it."""
    old, new = torch.ones(16 * me.size, 16), torch.zeros(16 * me.size, 16)
    me.same("before a rank ends", {"w": distribute_tensor(old, me.mesh, [Shard(0)])}, {"w": old})
    gone, fetch = threading.Event(), FETCH

    def ends(*_: Any) -> None:
        print(json.dumps(me.saw), flush=True)
        os._exit(3)

    def fetch_late(sources: SourceFetcher, running: Any, address: str, *about: Any) -> None:
        if not gone.is_set():
            until_refused(me.address_of[rank])
            gone.set()
        fetch(sources, running, address, *about)

    if me.rank == rank:
        patch.object(Ranks, "wait_for_outcome", ends).start()
    patch.object(SourceFetcher, "_fetch", fetch_late).start()
    begun = time.monotonic()
    try:
        me.publish({"w": distribute_tensor(new, me.mesh, [Shard(0)])})
    except WeightBusError as error:
        me.saw["died"] = f"{type(error).__name__}: {error}"
    me.saw["seconds"] = time.monotonic() - begun
    me.saw["kept"] = me.rank > 0 or all(took["w"].equal(old) for took in (me.took, me.plain))


def until_refused(address: str) -> None:
    """Return once nothing listens at an address."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            socket.create_connection(host_and_port(address), SECONDS).close()
        except OSError:
            return
    raise TimeoutError(f"{address} still listens")


def main(rank: int, size: int, folder: Path) -> None:
    begin_group(rank, size, folder)
    me = ShardRank(rank, size)
    for case in (wrappers, after_steps, placements, two_ways, kept, stopped, refused, memory):
        case(me)
    dies(me, size - 1)
    print(json.dumps(me.saw), flush=True)
    for worker in me.workers:
        worker.close()
    me.own.close()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
