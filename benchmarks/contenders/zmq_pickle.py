"""Pickle over ZeroMQ, the way pyzmq documents it: `send_pyobj` of all arrays, `recv_pyobj`.

Most frameworks that publish weights over PUB and SUB do this. One message of a model's size is
written, sent, received and read again in full before the first value is copied into the model. (Any
peer that can reach such a socket can run code in its workers; here it is on the loopback.)
"""

from ..fleet import Worker
from ..pubsub import ACKNOWLEDGEMENT, PubSub, sockets

NEEDS: tuple[str, ...] = ("zmq",)
LIMIT = "raw_tcp"


class ZmqPickle(PubSub):
    """The publisher's side."""

    title = "TCP: pickle over ZeroMQ"
    module = "zmq_pickle"

    def send(self) -> None:
        self.pub.send_pyobj(self.model.arrays, protocol=5, copy=False)


def create() -> ZmqPickle:
    """Return the publisher's side."""
    return ZmqPickle()


def work(worker: Worker) -> None:
    """Copy each pickle's arrays into the model."""
    sub, acks = sockets(worker)
    while True:
        worker.model.take(sub.recv_pyobj())
        acks.send(ACKNOWLEDGEMENT)
