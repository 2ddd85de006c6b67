"""ZeroMQ's own limit: chunks on PUB, copied straight to their place, one acknowledgement back.

No layout, no checksums, no staging (a version that breaks off leaves a torn model), no window and
no repair (so the queues have no bound). This is the loop that everything a bus adds is paid on top
of.
"""

import time

import numpy as np
import zmq

from ..contender import Kind
from ..fleet import START_SECONDS, Fleet, Worker
from ..model import Model

NEEDS: tuple[str, ...] = ("zmq",)
LIMIT = "raw_tcp"
CHUNK = 2**20
ANSWER_MS = 60_000


class BareZmq:
    """The publisher's side."""

    title = "TCP: bare ZeroMQ"
    kind: Kind = "limit"

    def start(self, workers: int, model: Model) -> None:
        self._model = model
        self._flat = np.ones(model.shape.nbytes, np.uint8)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.SNDHWM, 0)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._acks = self._context.socket(zmq.PULL)
        self._acks.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        told = {
            "pub": _bind(self._pub),
            "acks": _bind(self._acks),
        }
        self._workers = workers
        self._fleet = Fleet("bare_zmq", workers, model.shape, told)
        self._pub.setsockopt(zmq.RCVTIMEO, round(START_SECONDS * 1000))
        for _ in range(workers):
            self._pub.recv()  # a subscription has arrived
        self._fleet.wait_ready()

    def publish_once(self) -> float:
        self._model.write_to(self._flat)
        memory = self._flat.data
        before = time.perf_counter()
        for at in range(0, memory.nbytes, CHUNK):
            self._pub.send(memory[at : at + CHUNK], copy=False)
        for _ in range(self._workers):
            self._acks.recv()
        return time.perf_counter() - before

    def check(self) -> None:
        self._fleet.check(self._model)

    def stop(self) -> None:
        self._fleet.stop()
        self._context.destroy(linger=0)


def _bind(s: "zmq.Socket[bytes]") -> str:
    s.bind("tcp://127.0.0.1:0")
    return s.getsockopt_string(zmq.LAST_ENDPOINT)


def create() -> BareZmq:
    """Return the publisher's side."""
    return BareZmq()


def work(worker: Worker) -> None:
    """Copy chunk after chunk; acknowledge the last."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sub, acks = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    sub.setsockopt(zmq.RCVHWM, 32)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(worker.told["pub"])
    acks.connect(worker.told["acks"])
    flat = np.ones(worker.model.shape.nbytes, np.uint8)
    worker.model.rest_on(flat)
    worker.ready.set()
    while True:
        for at in range(0, flat.nbytes, CHUNK):
            frame = sub.recv(copy=False)
            np.copyto(flat[at : at + CHUNK], np.frombuffer(frame.buffer, np.uint8))
        acks.send(b"!")
