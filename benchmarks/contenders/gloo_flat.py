"""torch.distributed's gloo: all tensors copied into one, one broadcast, copied out of it again."""

from contextlib import suppress

import numpy as np

from ..fleet import Worker
from ..gloo import BROKEN_OFF, Gloo, join

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"


class GlooFlat(Gloo):
    """The publisher's side."""

    title = "TCP: gloo, one tensor"
    module = "gloo_flat"

    def prepare(self) -> None:
        self._flat = np.ones(self.model.shape.nbytes, np.uint8)

    def broadcast(self) -> None:
        import torch
        from torch import distributed

        self.model.write_to(self._flat)
        distributed.broadcast(torch.from_numpy(self._flat), 0)


def create() -> GlooFlat:
    """Return the publisher's side."""
    return GlooFlat()


def work(worker: Worker) -> None:
    """Receive the block, then copy the tensors out of it."""
    import torch
    from torch import distributed

    flat = np.ones(worker.model.shape.nbytes, np.uint8)
    with suppress(*BROKEN_OFF), join(worker) as line:
        while True:
            distributed.broadcast(torch.from_numpy(flat), 0)
            worker.model.read_from(flat)
            line.done()
