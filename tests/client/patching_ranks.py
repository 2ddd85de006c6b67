"""One of the ranks that publish sharded models with `weightbus.sharded`, as patches.

    python patching_ranks.py RANK SIZE FOLDER

Prints a JSON object of what this rank saw: for rank 0 what its workers took, and how. Blocks of
patches are small here, and have other bytes than chunks, so that most are on several ranks. The
last rank ends itself at the end.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import weightbus
from weightbus import Publisher, Relay, Settings, Subscriber, WeightBusError
from weightbus.bus.net.sources import SourceFetcher
from weightbus.bus.publisher.roster import PatchCandidate
from weightbus.bus.staged import SourceFetch
from weightbus.bus.worker.events import SourceFetched
from weightbus.codecs.delta import format as form
from weightbus.python_client import subscriber as subscribers
from weightbus.python_client.publishing import shard_patches, sharded
from weightbus.tests.client.gathering_ranks import SECONDS, Tensors, begin_group, bits, status

CHUNK_BYTES = 2**12
DELTA = Settings(encoding="delta")
WHOLE_FETCH = SourceFetcher.fetch
Change = Callable[[Tensors], object]
Placements = dict[str, Any]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# The dtype and shape of each tensor, and how it is sharded; none: it is plain.
TENSORS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "count": (torch.int64, (3,)),
    "norm": (torch.float32, (333,)),
    "rows": (torch.bfloat16, (1001, 65)),
    "columns": (torch.bfloat16, (130, 77)),
    "same": (torch.bfloat16, (50, 50)),
    "half": (torch.float16, (999, 21)),
    "buffer": (torch.bfloat16, (4000,)),
}
USUAL: Placements = {
    "norm": Shard(0),
    "rows": Shard(0),
    "columns": Shard(1),
    "same": Replicate(),
    "half": Shard(0),
}
OTHER = USUAL | {"rows": Shard(1), "half": Replicate(), "columns": Shard(0)}


def weights() -> Tensors:
    made = torch.Generator().manual_seed(1)
    return {
        name: (50 * torch.randn(shape, generator=made)).round().div(64).to(dtype)
        for name, (dtype, shape) in TENSORS.items()
    }


def step(tensors: Tensors) -> None:
    """Change one element in fifty of each tensor, most of them in the last place."""
    for tensor in tensors.values():
        flat = tensor.view(-1).view(INTEGERS[tensor.itemsize])
        flat[::50] += 1
        flat[::350] += 5


def other_numbers(tensors: Tensors) -> None:
    """Change all elements, beyond what a patch is worth."""
    made = torch.Generator().manual_seed(2)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=made))


def a_quarter(tensors: Tensors) -> None:
    """Change so much that the parts of two ranks are too large together, and neither is alone."""
    made = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        some = tensor.view(-1)[::4]
        some.copy_(torch.randn(some.shape, generator=made))


def clear(tensors: Tensors) -> None:
    """Leave almost only zeros: a base of zeros would lead to a small patch, too."""
    for tensor in tensors.values():
        tensor.zero_().view(-1)[::97] = 3


class PatchRank:
    """This rank. Rank 0 has workers with and without patches, and one behind a relay."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.mesh = init_device_mesh("cpu", (size,))
        self.saw: dict[str, Any] = {}
        self.took: dict[str, Tensors] = {}
        self.tensors, self.placements = weights(), USUAL
        self.own = self.publisher()
        self.ends: list[Any] = []
        self.notices: list[str] = []
        if rank == 0:
            self.begin_workers()

    def publisher(self) -> Publisher:
        settings = Settings(chunk_bytes=CHUNK_BYTES, shared_memory=False, ping=0.5, lost_after=3.0)
        return Publisher("tcp://127.0.0.1:0", settings=settings)

    def begin_workers(self) -> None:
        noted = logging.Handler()
        noted.emit = lambda record: self.notices.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("weightbus").addHandler(noted)
        patch.object(SourceFetcher, "fetch", self.fetch).start()
        few = Settings(shared_memory=False)
        relay = Relay(self.own.address, "tcp://127.0.0.1:0", ["m"], name="relay", settings=few)
        self.ends.append(relay)
        for name, address in (
            ("direct", self.own.address),
            ("plain", self.own.address),
            ("behind", relay.address),
        ):
            with patch.object(subscribers, "DELTA", "another" if name == "plain" else "delta-1"):
                made = Subscriber(address, {"m": self.taking(name)}, name=name, settings=few)
            self.ends.append(made.start())
        self.own.wait_for_workers(3, SECONDS)

    def taking(self, name: str) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
        def take(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.took[name] = {key: tensor.clone() for key, tensor in pairs}

        return take

    @staticmethod
    def fetch(sources: SourceFetcher, job: SourceFetch, hello: Any) -> None:
        """Let the worker `plain` fetch all from its publisher, as workers in other languages do."""
        if hello.name != "plain":
            return WHOLE_FETCH(sources, job, hello)
        return vars(sources)["_report"](SourceFetched(job, (), over=True))

    def model(self) -> dict[str, object]:
        return {
            name: distribute_tensor(tensor, self.mesh, [self.placements[name]])
            if name in self.placements
            else tensor
            for name, tensor in self.tensors.items()
        }

    def publish(self, case: str, change: Change = step, settings: Settings = DELTA) -> None:
        """Publish a changed model; note how each worker took it, and whether it is the same."""
        change(self.tensors)
        told = len(self.notices)
        receipt = weightbus.sharded(self.model(), timeout=SECONDS).publish(
            self.own, "m", timeout=SECONDS, settings=settings
        )
        if receipt is None:
            return
        assert receipt.in_state("applied") == ["behind", "direct", "plain"], str(receipt)
        want = self.tensors
        if settings.dtype is not None:
            want = {name: tensor.half() for name, tensor in want.items()}
        faults = [
            f"{name} of {worker}"
            for worker, took in self.took.items()
            for name in want
            if bits(took[name]) != bits(want[name])
        ]
        self.saw[case] = {
            "ways": {name: w.encoding for name, w in receipt.workers.items() if not w.through},
            "share": receipt.workers["direct"].nbytes / receipt.nbytes,
            "faults": faults,
            "notices": [text for text in self.notices[told:] if "as a whole" in text],
        }


@contextmanager
def links_of(rate: float) -> Generator[None]:
    """Let rank 0 believe that all links carry so many bytes per second."""
    whole = vars(Publisher)["_candidates"]

    def candidates(*about: Any, **more: Any) -> list[PatchCandidate]:
        return [PatchCandidate(each.running, rate) for each in whole(*about, **more)]

    with patch.object(Publisher, "_candidates", candidates):
        yield


@contextmanager
def failing(name: str, value: object, *, here: bool) -> Generator[None]:
    with patch.object(shard_patches, name, value) if here else nullcontext():
        yield


def no_memory(*_: Any, **__: Any) -> bytes:
    raise MemoryError


def patches(me: PatchRank) -> None:
    for case in ("first", "second", "third", "fourth"):
        me.publish(case)
    me.placements = OTHER
    me.publish("other shards", clear)
    me.publish("other shards again", lambda tensors: tensors["half"].view(-1)[:9].fill_(1))
    me.placements = USUAL
    me.publish("first shards", lambda tensors: tensors["rows"].view(-1)[-9:].fill_(1))
    me.publish("first shards again")
    me.tensors["more"] = torch.ones(7)
    me.publish("other layout")
    me.publish("other layout again")
    if me.rank == me.size - 1:
        me.own.close()
        me.own = me.publisher()
    me.publish("a rank begins again")
    me.publish("after that")
    me.publish("raw", settings=Settings(encoding="raw"))
    me.publish("nothing to build on")
    me.publish("after raw")
    me.publish("all is other", other_numbers)
    me.publish("after other")
    me.publish("a quarter is other", a_quarter)
    me.publish("after a quarter")
    with failing("encode_part", no_memory, here=me.rank == me.size - 1):
        me.publish("no memory")
    with failing("OFFER_SHARE", 0.0, here=me.rank == 0):
        me.publish("no time")
    me.publish("after failures")
    for case, rate in (("slow", 1e4), ("fast", 1e12), ("slow again", 1e4)):
        with links_of(rate):
            me.publish(f"auto, {case}", settings=Settings(encoding="auto"))
    del me.tensors["count"]
    half = Settings(encoding="delta", dtype={"*": "f16"})
    me.publish("converted", settings=half)
    me.publish("converted again", settings=half)


def memory(me: PatchRank) -> None:
    """Note how far the memory of a rank rises in a patched publish, in units of its shards."""
    rows, count = 512 * me.size, 32
    mine = count * 2 * 1024 * rows / me.size
    model = {
        f"{n}": distribute_tensor(torch.ones(rows, 1024).bfloat16(), me.mesh, [Shard(n % 2)])
        for n in range(count)
    }
    own = Publisher("tcp://127.0.0.1:0", settings=Settings(shared_memory=False))
    worker = None
    if me.rank == 0:
        command = [sys.executable, __file__, "worker", own.address, str(rows), str(count)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - our own code
        own.wait_for_workers(1, SECONDS)
    source = weightbus.sharded(model, timeout=SECONDS)
    with patch.object(sharded, "BATCH_BYTES", 2**20):
        for round_ in range(3):
            for tensor in model.values():
                tensor.to_local().view(-1)[round_::100] += 1
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
            before = status("VmRSS")
            receipt = source.publish(own, "m", timeout=SECONDS, settings=DELTA)
            way = receipt.workers["w"].encoding if receipt else ""
            me.saw[f"memory, {round_}"] = (status("VmHWM") - before) / mine, way
    dist.barrier()
    if worker is not None:
        worker.communicate(timeout=SECONDS)
    own.close()


def worker(address: str, rows: int, count: int) -> None:
    """Be a worker in a process of its own, until the parent closes our standard input."""
    target = {f"{n}": np.zeros((rows, 1024), np.float32) for n in range(count)}
    few = Settings(shared_memory=False)
    with Subscriber(address, {"m": target}, name="w", cast=True, settings=few).start():
        sys.stdin.read()


def dies(me: PatchRank) -> None:
    """A rank ends while it encodes its part."""

    def ends(*_: Any, **__: Any) -> bytes:
        print(json.dumps(me.saw), flush=True)
        os._exit(3)

    before = {name: tensor.clone() for name, tensor in me.tensors.items()}
    with failing("encode_part", ends, here=me.rank == me.size - 1):
        try:
            me.publish("died", settings=Settings(encoding="delta", dtype={"*": "f16"}))
        except WeightBusError as error:
            me.saw["died"] = f"{type(error).__name__}: {error}"
    me.saw["kept"] = all(
        bits(took[name]) == bits(before[name].half())
        for took in me.took.values()
        for name in before
    )


def main(rank: int, size: int, folder: Path) -> None:
    begin_group(rank, size, folder)
    with patch.multiple(form, BLOCK_ELEMENTS=1000, GROUP_BLOCKS=3):
        me = PatchRank(rank, size)
        patches(me)
    memory(me)
    with patch.multiple(form, BLOCK_ELEMENTS=1000, GROUP_BLOCKS=3):
        dies(me)
    print(json.dumps(me.saw), flush=True)
    for end in reversed(me.ends):
        end.close()
    me.own.close()
    os._exit(0)  # the group has lost a rank, so that it cannot be left


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
