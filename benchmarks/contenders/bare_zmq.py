"""The limit of ZeroMQ: chunks on PUB, copied directly into the model, and one acknowledgement.

There is no layout, no checksum, no staging (an incomplete version leaves a torn model), no window
and no repair (so the queues are unlimited). A bus adds its costs to the cost of this loop. A model
of at most one chunk is one message.
"""

import numpy as np

from ..contender import Kind
from ..fleet import Worker
from ..model import Model
from ..pubsub import ACKNOWLEDGEMENT, PubSub, sockets

NEEDS: tuple[str, ...] = ("zmq",)
LIMIT = "raw_tcp"
CHUNK = 2**20
QUEUE = 32  # chunks that may lie unread at a worker: more is slower, as they leave the cache


class BareZmq(PubSub):
    """The publisher's side."""

    title = "TCP: bare ZeroMQ"
    module = "bare_zmq"
    kind: Kind = "limit"

    def start(self, workers: int, model: Model) -> None:
        self._flat = np.ones(model.shape.nbytes, np.uint8)
        super().start(workers, model)

    def prepare(self) -> None:
        self.model.write_to(self._flat)

    def send(self) -> None:
        memory = self._flat.data
        for at in range(0, memory.nbytes, CHUNK):
            self.pub.send(memory[at : at + CHUNK], copy=False)


def create() -> BareZmq:
    """Return the publisher's side."""
    return BareZmq()


def work(worker: Worker) -> None:
    """Copy chunk after chunk; acknowledge the last."""
    flat = np.ones(worker.model.shape.nbytes, np.uint8)
    worker.model.rest_on(flat)
    sub, acks = sockets(worker, QUEUE)
    while True:
        for at in range(0, flat.nbytes, CHUNK):
            frame = sub.recv(copy=False)
            np.copyto(flat[at : at + CHUNK], np.frombuffer(frame.buffer, np.uint8))
        acks.send(ACKNOWLEDGEMENT)
