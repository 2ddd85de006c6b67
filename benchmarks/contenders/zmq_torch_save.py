"""`torch.save` over ZeroMQ: a checkpoint in memory, sent as one message, and loaded by each worker.

Loaded with `weights_only`, so it is the one of these that is safe, and from the received message
itself. A checkpoint is a zip archive: it is written, and checked with a CRC, on one side and read
on the other.
"""

import io

from ..fleet import Worker
from ..pubsub import ACKNOWLEDGEMENT, PubSub, sockets

NEEDS: tuple[str, ...] = ("zmq", "torch")
LIMIT = "raw_tcp"


class ZmqTorchSave(PubSub):
    """The publisher's side."""

    title = "TCP: torch.save over ZeroMQ"
    module = "zmq_torch_save"

    def send(self) -> None:
        import torch

        file = io.BytesIO()
        torch.save(self.model.tensors, file)
        self.pub.send(file.getbuffer(), copy=False)


def create() -> ZmqTorchSave:
    """Return the publisher's side."""
    return ZmqTorchSave()


def work(worker: Worker) -> None:
    """Copy each checkpoint's tensors to their places."""
    import torch

    torch.set_num_threads(1)
    sub, acks = sockets(worker)
    while True:
        tensors = torch.load(io.BytesIO(sub.recv(copy=False).buffer), weights_only=True)
        worker.model.take({name: tensor.numpy() for name, tensor in tensors.items()})
        acks.send(ACKNOWLEDGEMENT)
