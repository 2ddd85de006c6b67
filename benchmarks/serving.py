"""What a transfer to vLLM costs: `python benchmarks/serving.py [--quick]`.

Two processes are ranks: the engine in a worker and the layer-wise reload of vLLM, of which only
the Python is fetched, as by `make serving-vllm`. Their model is a stack of layers of one size, on
this processor.

pause   how long generation stands still for one update that was staged before, over one that is
        made wholly in the pause: in turns, the median of the ratio of each round
memory  how much more a rank has at its peak than when it had joined, in layers: with the version
        that is staged, and in the load alone
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from weightbus import Publisher, Settings
from weightbus.python_client.serving.server import PauseMode, VllmServers
from weightbus.python_client.serving.transfers import Transfers
from weightbus.tests.serving.ranks import RankProcess
from weightbus.tests.serving.standin import Server
from weightbus.tests.serving.vllm.run import NEWEST, packages, unpacked

RANKS, MIB, SECONDS = 2, 2**20, 120.0
PAUSE_MUST, PAUSE_REACH = 0.5, 0.25
LAYERS_MUST = 1.2  # beyond what is staged


class Engine:
    """A rank's engine, and how much memory the process has had."""

    def __init__(self, worker: Any) -> None:
        self._worker, self.rank = worker, vars(worker.weight_transfer_engine)["_rank"]
        self._joined = self._before = self._peak = 0
        own = worker.weight_transfer_engine.finish_weight_update

        def finish() -> None:
            self._before = _status("VmRSS")
            own()
            self._peak = _status("VmHWM")

        worker.weight_transfer_engine.finish_weight_update = finish

    def mark(self) -> None:
        """From here on the peak counts."""
        Path("/proc/self/clear_refs").write_text("5")
        self._joined = self._joined or _status("VmRSS")

    def peaks(self) -> str:
        """Say how much more there was at the peak than after joining, and than before the load."""
        return f"{self._peak - self._joined} {self._peak - self._before}"


def _status(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


def weights(layers: int, nbytes: int, value: float) -> Mapping[str, torch.Tensor]:
    """Return what is published."""
    side = int((nbytes // 4) ** 0.5)
    return {f"layers.{i}.weight": torch.full((side, side), value + i) for i in range(layers)}


def rank(layers: int, nbytes: int, number: int) -> tuple[Any, Engine]:
    """Make a worker of vLLM's class with such a model. (In the rank's process.)"""
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


class Watched(VllmServers):
    """Servers of which it is known how long they stood still."""

    stood = 0.0

    def pause(self, mode: PauseMode = "keep") -> None:
        super().pause(mode)
        self._since = time.perf_counter()

    def resume(self) -> None:
        self.stood = time.perf_counter() - self._since
        super().resume()


class Rows:
    """What was measured, line by line."""

    def __init__(self) -> None:
        self.missed = 0

    def add(self, what: str, measured: float, must: float, reach: float, more: str = "") -> None:
        verdict = "MISSED" if measured > must else "reached" if measured <= reach else "kept"
        self.missed += verdict == "MISSED"
        print(f"{what:52} {measured:6.2f}  must {must:g}, reach {reach:g}  {verdict}  {more}")


def measured(rows: Rows, *, shared: bool, layers: int, nbytes: int, rounds: int) -> None:
    """Measure both, on one of the roads."""
    road = "shared memory" if shared else "network"
    ranks = [RankProcess(n, partial(rank, layers, nbytes)) for n in range(RANKS)]
    assert not any(each.said() for each in ranks)
    server = Server(ranks)
    publisher = Publisher(settings=Settings(shared_memory=shared))
    servers = Watched(server.url, SECONDS)
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
    within._gather()  # noqa: SLF001 - the ranks have joined before anything is marked
    for each in ranks:
        each.ask("mark")

    def before(value: float) -> float:
        staged.send(weights(layers, nbytes, value))
        return servers.stood

    def wholly(value: float) -> float:
        ready = weights(layers, nbytes, value)
        with servers.paused():
            within.send(ready)
        return servers.stood

    peaks: list[tuple[int, int]] = []
    pairs: list[tuple[float, float]] = []
    turns: tuple[Callable[[float], float], ...] = (before, wholly)
    for number in range(rounds + 2):  # the first two warm up
        for each in ranks:
            each.ask("mark")
        took = tuple(turn(2.0 * number + n) for n, turn in enumerate(turns))
        if number == 0:
            first = max(int(each.ask("peaks").split()[0]) for each in ranks)
        for each in ranks:
            whole, load = map(int, each.ask("peaks").split())
            peaks.append((max(whole, first), load))
        if number >= 2:
            pairs.append((took[0], took[1]))
    ratio = statistics.median(a / b for a, b in pairs)
    ms = [1e3 * statistics.median(each) for each in zip(*pairs, strict=True)]
    size = layers * nbytes / MIB
    rows.add(
        f"pause, {size:.0f} MiB, {road}: staged before, over wholly",
        ratio,
        PAUSE_MUST,
        PAUSE_REACH,
        f"({ms[0]:.0f} ms over {ms[1]:.0f} ms)",
    )
    most = max(peak for peak, _ in peaks)
    alone = statistics.median(extra for _, extra in peaks[2 * RANKS :])
    rows.add(
        f"peak beyond the model, {road}: in layers",
        most / nbytes,
        layers + LAYERS_MUST,
        LAYERS_MUST,
        f"({most / MIB:.0f} MiB; a layer has {nbytes / MIB:.0f})",
    )
    rows.add(
        f"of that, in the load alone, {road}: in layers", alone / nbytes, LAYERS_MUST, LAYERS_MUST
    )
    for each in ranks:
        each.close()
    servers.close()
    server.close()
    publisher.close()


def main() -> None:
    """Measure both roads; the status is 1 if something misses what it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it runs")
    options = parser.parse_args()
    if "WEIGHTBUS_SERVING" not in os.environ:  # ranks are to find vLLM, and so are theirs
        path = os.pathsep.join(map(str, (unpacked(NEWEST), packages())))
        env = {**os.environ, "PYTHONPATH": path, "WEIGHTBUS_SERVING": NEWEST}
        env["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.execve(sys.executable, [sys.executable, *sys.argv], env)  # noqa: S606 - ourselves
    nbytes, rounds = (2 * MIB, 2) if options.quick else (25 * MIB, 9)
    rows = Rows()
    for shared in (True, False):
        measured(rows, shared=shared, layers=8, nbytes=nbytes, rounds=rounds)
    sys.exit(bool(rows.missed))


if __name__ == "__main__":
    main()
