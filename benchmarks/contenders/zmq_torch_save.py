"""`torch.save` over ZeroMQ: a checkpoint in memory, sent as one message, and loaded by each worker.

It is loaded with `weights_only`, which is safe, directly from the received message. A checkpoint is
a zip archive: one side writes it with a CRC, the other side reads it.
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
    """Copy each checkpoint's tensors into the model."""
    import torch

    torch.set_num_threads(1)
    sub, acks = sockets(worker)
    while True:
        tensors = torch.load(io.BytesIO(sub.recv(copy=False).buffer), weights_only=True)
        worker.model.take({name: tensor.numpy() for name, tensor in tensors.items()})
        acks.send(ACKNOWLEDGEMENT)
