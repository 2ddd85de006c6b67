"""Pickle over ZeroMQ with its buffers out of band (PEP 574): a frame for each array, uncopied.

An expert's solution without a framework: nothing is copied before it is sent, and workers copy from
the received frames directly into the model. A multipart message is complete before
its first part can be read, so nothing of sending, receiving and copying overlaps.
"""

import pickle

from ..fleet import Worker
from ..pubsub import ACKNOWLEDGEMENT, PubSub, sockets

NEEDS: tuple[str, ...] = ("zmq",)
LIMIT = "raw_tcp"


class ZmqBuffers(PubSub):
    """The publisher's side."""

    title = "TCP: pickle over ZeroMQ, frames apart"
    module = "zmq_buffers"

    def send(self) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(self.model.arrays, protocol=5, buffer_callback=buffers.append)
        self.pub.send_multipart([head, *(each.raw() for each in buffers)], copy=False)


def create() -> ZmqBuffers:
    """Return the publisher's side."""
    return ZmqBuffers()


def work(worker: Worker) -> None:
    """Copy out of the frames."""
    sub, acks = sockets(worker)
    while True:
        head, *buffers = sub.recv_multipart(copy=False)
        frames = [each.buffer for each in buffers]
        arrays = pickle.loads(head.buffer, buffers=frames)  # noqa: S301 - as the peers do
        worker.model.take(arrays)
        acks.send(ACKNOWLEDGEMENT)
