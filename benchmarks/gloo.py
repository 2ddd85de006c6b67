"""The base of contenders over torch.distributed's gloo: a process group, and acknowledgements.

`broadcast` returns on each side when its own bytes are sent or received. So each worker reports
over a separate connection (`line.py`) that it has applied a version.
"""

import os
import time
from abc import ABC, abstractmethod
from datetime import timedelta

from .contender import Kind
from .fleet import START_SECONDS, Fleet, Worker
from .line import Line, Lines
from .model import Model

# Otherwise gloo looks up the host's name, which may not exist.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"}
START = timedelta(seconds=START_SECONDS)
FOREVER = timedelta(days=1)

# What a broadcast raises in the other processes when one process ends. Then their connections
# close, and a publisher that waits raises an error.
BROKEN_OFF = (RuntimeError,)


class Gloo(ABC):
    """The publisher's side, rank 0; the contender defines how to broadcast the tensors."""

    title: str
    module: str
    kind: Kind = "peer"

    def start(self, workers: int, model: Model) -> None:
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        os.environ.update(ENVIRONMENT)
        self.model, self._lines = model, Lines()
        self.prepare()
        store = distributed.TCPStore(  # type: ignore[attr-defined] # its stubs do not export it
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=START
        )
        told = {"store": store.port, "ranks": 1 + workers, "port": self._lines.port}
        self._fleet = Fleet(self.module, workers, model.shape, told, ENVIRONMENT)
        distributed.init_process_group(
            "gloo", store=store, rank=0, world_size=1 + workers, timeout=FOREVER
        )
        self._lines.accept(workers)
        self._fleet.wait_ready()

    def publish_once(self) -> float:
        before = time.perf_counter()
        self.broadcast()
        self._lines.wait()
        return time.perf_counter() - before

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare the broadcasts, once."""

    @abstractmethod
    def broadcast(self) -> None:
        """Broadcast a version."""

    def check(self) -> None:
        self._fleet.check(self.model)

    def stop(self) -> None:
        from torch import distributed

        self._fleet.stop()
        distributed.destroy_process_group()
        self._lines.close()


def join(worker: Worker) -> Line:
    """Join the process group; return the connection for acknowledgements."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    told = worker.told
    store = distributed.TCPStore(  # type: ignore[attr-defined] # its stubs do not export it
        "127.0.0.1", told["store"], is_master=False, timeout=START
    )
    distributed.init_process_group(
        "gloo", store=store, rank=1 + worker.index, world_size=told["ranks"], timeout=FOREVER
    )
    line = Line(told["port"])
    worker.ready.set()
    return line
