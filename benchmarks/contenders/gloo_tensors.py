"""torch.distributed's gloo: a broadcast for each tensor, received in place.

All broadcasts are started before the first is waited for, which is faster than one after the other.
Since tensors are received in place, an incomplete version leaves a torn model.
"""

from contextlib import suppress

from ..fleet import Worker
from ..gloo import BROKEN_OFF, Gloo, join
from ..model import Model

NEEDS: tuple[str, ...] = ("torch",)
LIMIT = "raw_tcp"


class GlooTensors(Gloo):
    """The publisher's side."""

    title = "TCP: gloo, tensor by tensor"
    module = "gloo_tensors"

    def broadcast(self) -> None:
        _broadcast_all(self.model)


def create() -> GlooTensors:
    """Return the publisher's side."""
    return GlooTensors()


def _broadcast_all(model: Model) -> None:
    from torch import distributed

    works = [distributed.broadcast(t, 0, async_op=True) for t in model.tensors.values()]
    for each in works:
        if each is not None:  # it is None in processes that do not take part
            each.wait()


def work(worker: Worker) -> None:
    """Receive each tensor in place."""
    with suppress(*BROKEN_OFF), join(worker) as line:
        while True:
            _broadcast_all(worker.model)
            line.done()
