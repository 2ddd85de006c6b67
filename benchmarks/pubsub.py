"""The base of contenders over plain ZeroMQ: a PUB socket, and an acknowledgement by each worker.

There is no layout, checksum, staging, window or repair, so the queues are unlimited.
"""

import time
from abc import ABC, abstractmethod
from typing import Any

import zmq

from .contender import Kind
from .fleet import START_SECONDS, Fleet, Worker
from .model import Model

ANSWER_MS = 120_000
ACKNOWLEDGEMENT = b"!"

Socket = zmq.Socket[bytes]


class PubSub(ABC):
    """The publisher's side; the contender defines the messages."""

    title: str
    module: str
    kind: Kind = "peer"

    def start(self, workers: int, model: Model) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self.pub = self._context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.SNDHWM, 0)
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.pub.setsockopt(zmq.RCVTIMEO, round(START_SECONDS * 1000))
        self._acks = self._context.socket(zmq.PULL)
        self._acks.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self.model, self._workers = model, workers
        told = {"pub": _bind(self.pub), "acks": _bind(self._acks)}
        self._fleet = Fleet(self.module, workers, model.shape, told)
        for _ in range(workers):
            self.pub.recv()  # a subscription has arrived
        self._fleet.wait_ready()

    def publish_once(self) -> float:
        self.prepare()
        before = time.perf_counter()
        self.send()
        for _ in range(self._workers):
            self._acks.recv()
        return time.perf_counter() - before

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Prepare a version, without counting the time."""

    @abstractmethod
    def send(self) -> None:
        """Send a version."""

    def check(self) -> None:
        self._fleet.check(self.model)

    def stop(self) -> None:
        self._fleet.stop()
        self._context.destroy(linger=0)


def _bind(s: Socket) -> str:
    s.bind("tcp://127.0.0.1:0")
    return s.getsockopt_string(zmq.LAST_ENDPOINT)


def sockets(worker: Worker, queue: int = 0) -> tuple[Socket, Socket]:
    """Return a worker's sockets: one for versions, one for acknowledgements.

    Args:
        worker: The worker, which is ready afterwards.
        queue: The largest number of unread messages; 0: unlimited.
    """
    context: zmq.Context[Any] = zmq.Context.instance()  # which exists as long as the process
    sub, acks = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    sub.setsockopt(zmq.RCVHWM, queue)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(worker.told["pub"])
    acks.connect(worker.told["acks"])
    worker.ready.set()
    return sub, acks
