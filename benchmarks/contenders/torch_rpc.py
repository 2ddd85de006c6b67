"""torch.distributed.rpc: one asynchronous call to each worker, with the tensors as its argument.

TensorPipe sends tensors separately from the pickled call, each into memory that it allocates at the
receiver. Between processes of one host the receiver would read the sender's memory directly
(`process_vm_readv`), which does not use TCP: so here it may only use its channels between hosts.
`torch_rpc_local.py` lets it choose. Each worker gets the model in a separate call.
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
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # otherwise each end of a worker causes a warning

_here: list[Worker] = []  # the worker of this process, for remote calls


class TorchRpc:
    """The publisher's side.

    Args:
        title: Its name in tables.
        local: Whether it may use channels between processes of one host.
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
        _transports=None if told["local"] else ["uv"],  # there is no public option for this
        _channels=None if told["local"] else ["mpt_uv", "basic"],
    )
    with warnings.catch_warnings(action="ignore"):  # about torch's own use of deprecated calls
        rpc.init_rpc(name, rank=rank, world_size=told["ranks"], rpc_backend_options=options)


def _apply(tensors: "dict[str, torch.Tensor]") -> None:
    """Copy the tensors into the model. (Called in the worker.)"""
    _here[0].model.take({name: tensor.numpy() for name, tensor in tensors.items()})


def work(worker: Worker) -> None:
    """Let remote calls apply versions."""
    _here.append(worker)
    _join(_name(worker.index), 1 + worker.index, worker.told)
    worker.ready.set()
    worker.for_ever()
