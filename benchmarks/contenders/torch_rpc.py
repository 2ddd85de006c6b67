"""torch.distributed.rpc: one asynchronous call to each worker, with the tensors as its argument.

TensorPipe moves tensors apart from the pickled call, each to memory that it allocates at the
receiver. Between processes of one host the receiver would read the sender's memory by itself
(`process_vm_readv`), which is not a measure of TCP: so here it has the channels alone that it has
between hosts. `torch_rpc_local.py` leaves it the choice. Each worker gets the model in a call of
its own.
"""

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contender import Kind
from ..fleet import Fleet, Worker
from ..model import Model

if TYPE_CHECKING:
    import torch

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"
CALL_SECONDS = 120.0
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # or each end of a worker is a warning

_here: list[Worker] = []  # the worker of this process: a remote call has no other way to find it


class TorchRpc:
    """The publisher's side.

    Args:
        title: What it is called in tables.
        local: Whether it may use that all are on one host.
    """

    kind: Kind = "peer"

    def __init__(self, title: str, *, local: bool) -> None:
        self.title, self._local = title, local

    def start(self, workers: int, model: Model) -> None:
        os.environ.update(ENVIRONMENT)
        self._model = model
        self._names = [_name(index) for index in range(workers)]
        with tempfile.TemporaryDirectory() as folder:
            meet = str(Path(folder, "meet"))
            told = {"meet": meet, "ranks": 1 + workers, "local": self._local}
            self._fleet = Fleet("torch_rpc", workers, model.shape, told, ENVIRONMENT)
            _join("publisher", 0, told)
            self._fleet.wait_ready()

    def publish_once(self) -> float:
        from torch.distributed import rpc

        before = time.perf_counter()
        tensors = self._model.tensors
        calls = [
            rpc.rpc_async(name, _apply, args=(tensors,), timeout=CALL_SECONDS)
            for name in self._names
        ]
        for call in calls:
            call.wait()
        return time.perf_counter() - before

    def check(self) -> None:
        self._fleet.check(self._model)

    def stop(self) -> None:
        from torch.distributed import rpc

        self._fleet.stop()
        rpc.shutdown(graceful=False)


def create() -> TorchRpc:
    """Return the publisher's side."""
    return TorchRpc("TCP: torch.distributed.rpc", local=False)


def _name(index: int) -> str:
    return f"worker-{index}"


def _join(name: str, rank: int, told: dict[str, Any]) -> None:
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{told['meet']}",
        rpc_timeout=CALL_SECONDS,
        _transports=None if told["local"] else ["uv"],  # nothing public chooses
        _channels=None if told["local"] else ["mpt_uv", "basic"],
    )
    with warnings.catch_warnings(action="ignore"):  # of its own use of deprecated calls
        rpc.init_rpc(name, rank=rank, world_size=told["ranks"], rpc_backend_options=options)


def _apply(tensors: "dict[str, torch.Tensor]") -> None:
    """Copy the tensors to their places. (Called in the worker.)"""
    _here[0].model.take({name: tensor.numpy() for name, tensor in tensors.items()})


def work(worker: Worker) -> None:
    """Leave it to the remote calls."""
    _here.append(worker)
    _join(_name(worker.index), 1 + worker.index, worker.told)
    worker.ready.set()
    worker.for_ever()
