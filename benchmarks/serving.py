"""Measure the transfer of weights to vLLM: `python benchmarks/serving.py [--quick]`.

Two processes are ranks, with weightbus's engine in a worker and vLLM's layer-wise reload. Only
vLLM's Python code is fetched, as by `make serving-vllm`. The model is a stack of layers of equal
size, on the CPU.

pause   the pause of generation for an update that was staged before, over the pause for an update
        that is received in the pause: measured in turns, the median of the rounds' ratios
memory  how many layers of private memory a rank has at its peak, in addition to its memory after
        joining; freed memory is returned to the system at once, to make this measurable
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from weightbus import Publisher, Settings
from weightbus.python_client.serving.server import VllmServers
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.ranks import RankProcess
from weightbus.tests.serving.standin import Server
from weightbus.tests.serving.vllm.run import NEWEST, packages, unpacked

RANKS, MIB, SECONDS = 2, 2**20, 120.0
PAUSE_MUST, PAUSE_REACH = 0.5, 0.25
LAYERS_MUST = 1.2  # layers in addition to the staged version


class Engine:
    """The questions of `RankProcess` to a rank."""

    def __init__(self, worker: Any) -> None:
        self.rank = vars(worker.weight_transfer_engine)["_rank"]


class Memory:
    """Measures the memory of processes: private memory, and mapped memory of other processes.

    It reads the values every millisecond, because the kernel has no peaks of these parts.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._over = pids, threading.Event()
        self.base = [self._now(pid) for pid in pids]
        self.peak = list(self.base)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.wait(0.001):
            for n, pid in enumerate(self._pids):
                self.peak[n] = max(self.peak[n], self._now(pid))

    def _now(self, pid: int) -> int:
        """Return the private bytes of a process."""
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise LookupError(pid)

    def more(self) -> int:
        """Return the largest growth of the private memory of any of the processes."""
        self._over.set()
        self._thread.join()
        return max(peak - base for peak, base in zip(self.peak, self.base, strict=True))


def weights(layers: int, nbytes: int, value: float) -> Mapping[str, torch.Tensor]:
    """Return the weights to publish."""
    side = int((nbytes // 4) ** 0.5)
    return {f"layers.{i}.weight": torch.full((side, side), value + i) for i in range(layers)}


def rank(layers: int, nbytes: int, number: int, _start: int) -> tuple[Any, Engine]:
    """Return a worker of vLLM's class with such a model. (Called in the rank's process.)"""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm.v1.worker.gpu_worker import Worker

    from weightbus.vllm import register

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            side = int((nbytes // 4) ** 0.5)
            made = [torch.nn.Linear(side, side, bias=False) for _ in range(layers)]
            self.layers = torch.nn.ModuleList(made)

        def load_weights(self, pairs: Any) -> Any:
            return AutoWeightsLoader(self).load_weights(pairs)

    register()
    torch.set_num_threads(1)
    model = Stack()
    layerwise.record_metadata_for_reloading(model)
    worker = object.__new__(Worker)
    parallel = SimpleNamespace(rank=number, data_parallel_index=0, world_size=RANKS)
    plain = SimpleNamespace(quantization=None, dtype=torch.float32)
    worker.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=plain)
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.rank = number
    worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="weightbus"), worker.vllm_config, torch.device("cpu"), model
    )
    return worker, Engine(worker)


class Rows:
    """The lines of the result."""

    def __init__(self) -> None:
        self.missed = 0

    def add(self, what: str, measured: float, must: float, reach: float, more: str = "") -> None:
        verdict = "MISSED" if measured > must else "reached" if measured <= reach else "kept"
        self.missed += verdict == "MISSED"
        print(f"{what:52} {measured:6.2f}  must {must:g}, reach {reach:g}  {verdict}  {more}")


def measured(
    rows: Rows, *, memory: bool, shared: bool, layers: int, nbytes: int, rounds: int
) -> None:
    """Measure the pause, or the memory, over one of the transports."""
    transport = "shared memory" if shared else "network"
    ranks = [RankProcess(partial(rank, layers, nbytes), n) for n in range(RANKS)]
    assert not any(each.said() for each in ranks)
    server = Server(ranks)
    publisher = Publisher(settings=Settings(shared_memory=shared))
    servers = VllmServers(server.url, SECONDS)
    made = partial(
        Transfers,
        publisher,
        servers,
        model="policy",
        deployment="v",
        timeout=SECONDS,
        pause_timeout=SECONDS,
    )
    staged, within = made(), made(pause=None)
    given = weights(layers, nbytes, 0.0)
    staged.join({n: ("F32", tuple(t.shape)) for n, t in given.items()})
    within.join({n: ("F32", tuple(t.shape)) for n, t in given.items()})
    within._gather(time.monotonic() + SECONDS)  # noqa: SLF001 - the ranks have joined before anything is marked

    def before(value: float) -> float:
        staged.send(weights(layers, nbytes, value))
        return servers.paused_s

    def wholly(value: float) -> float:
        ready = weights(layers, nbytes, value)
        with servers.paused():
            within.send(ready)
        return servers.paused_s

    watched = Memory([each.process.pid or 0 for each in ranks])
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 2):  # the first two warm up
        took = before(2.0 * number), wholly(2.0 * number + 1)
        if number >= 2:
            pairs.append(took)
    more = watched.more()
    ratio = statistics.median(a / b for a, b in pairs)
    ms = [1e3 * statistics.median(each) for each in zip(*pairs, strict=True)]
    size = layers * nbytes / MIB
    if memory:
        rows.add(
            f"peak of a rank beyond the model, {transport}: in layers",
            more / nbytes,
            layers + LAYERS_MUST,
            LAYERS_MUST,
            f"({more / MIB:.0f} MiB; a layer has {nbytes / MIB:.0f})",
        )
    else:
        rows.add(
            f"pause, {size:.0f} MiB, {transport}: staged before, over wholly",
            ratio,
            PAUSE_MUST,
            PAUSE_REACH,
            f"({ms[0]:.0f} ms over {ms[1]:.0f} ms)",
        )
    publisher.close()
    for each in ranks:
        each.close()
    servers.close()
    server.close()


def main() -> None:
    """Measure both transports; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it runs")
    options = parser.parse_args()
    if "WEIGHTBUS_SERVING" not in os.environ:  # so that ranks and their child processes find vLLM
        path = os.pathsep.join(map(str, (unpacked(NEWEST), packages())))
        env = {**os.environ, "PYTHONPATH": path, "WEIGHTBUS_SERVING": NEWEST}
        env["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.execve(sys.executable, [sys.executable, *sys.argv], env)  # noqa: S606 - ourselves
    nbytes, rounds = (2 * MIB, 2) if options.quick else (25 * MIB, 9)
    rows = Rows()
    for memory in (False, True):
        if memory:  # otherwise freed memory that the allocator keeps would count
            os.environ["MALLOC_MMAP_THRESHOLD_"], rounds = str(MIB), 1
        for shared in (True, False):
            measured(rows, memory=memory, shared=shared, layers=8, nbytes=nbytes, rounds=rounds)
    sys.exit(bool(rows.missed))


if __name__ == "__main__":
    main()
