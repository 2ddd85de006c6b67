"""The base of contenders with TorchRL's weight synchronisation: a scheme, and its two sides.

A scheme's queues can be passed to processes only when these are created, so multiprocessing spawns
the workers. By default, TorchRL's workers on a host use the same memory to which versions are
written: they would see half a version while it is written, and the trainer's next step before it is
sent. So each worker here gets its own model in its own memory once the scheme has connected, and
the scheme copies every version into this model, as on a device that cannot share the trainer's
memory.
"""

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from .contender import Kind
from .fleet import Fleet, Worker
from .model import Model

if TYPE_CHECKING:
    from tensordict import TensorDict

MODEL = "policy"


class TorchRL(ABC):
    """The publisher's side."""

    title: str
    module: str
    kind: Kind = "peer"

    def start(self, workers: int, model: Model) -> None:
        import torch
        from torch import multiprocessing

        torch.set_num_threads(1)
        self.model = model
        self._scheme = self.scheme()
        self._weights = self.weights()
        self._scheme.init_on_sender(
            weights=self._weights,
            devices=[torch.device("cpu")] * workers,
            ctx=multiprocessing.get_context("spawn"),
        )
        self._fleet = Fleet(self.module, workers, model.shape, {}, inherit=self._scheme)
        self._scheme.connect()
        self._fleet.wait_ready()

    @abstractmethod
    def scheme(self) -> Any:
        """Return the scheme, which waits for acknowledgements in `send`."""

    @abstractmethod
    def weights(self) -> "TensorDict":
        """Return the weights that the scheme starts with."""

    @abstractmethod
    def sent(self) -> "TensorDict":
        """Return the weights to pass to `send`."""

    def publish_once(self) -> float:
        before = time.perf_counter()
        self._scheme.send(self.sent())
        return time.perf_counter() - before

    def check(self) -> None:
        self._fleet.check(self.model)

    def stop(self) -> None:
        self._fleet.stop()
        self._scheme.shutdown()


def work(worker: Worker) -> None:
    """Let the scheme's thread apply versions."""
    import torch

    torch.set_num_threads(1)
    scheme = worker.inherited
    shared, own = tensordict_of(worker.model), tensordict_of(worker.model)
    scheme.init_on_receiver(model_id=MODEL, worker_idx=worker.index, model=shared)
    scheme.connect()  # from here on, `shared` is the publisher's memory
    scheme.model = own
    worker.ready.set()
    worker.for_ever()


def tensordict_of(model: Model) -> "TensorDict":
    """Return a TensorDict of the model's tensors, without copying them."""
    from tensordict import TensorDict

    return TensorDict(model.tensors)
