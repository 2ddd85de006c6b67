"""The limit of the network: the same bytes over TCP, and one byte back.

There are no chunks, checksums, staging or tensors. Each worker has a connection and a sender
thread, and `recv_into` writes directly into the model's block. It has a small send buffer, which is
faster than the kernel's default: there, megabytes queue up and leave the cache.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..contender import Kind
from ..fleet import Fleet, Worker
from ..line import Line, Lines
from ..model import Model

NEEDS: tuple[str, ...] = ()
LIMIT = "raw_tcp"
SEND_BUFFER = 2**18  # bytes; the fastest of 128 KiB to 4 MiB, by up to 50 %
RECEIVE = 2**18  # bytes to receive at once, while they are in the cache


class RawTcp:
    """The publisher's side."""

    title = "TCP: raw"
    kind: Kind = "limit"

    def start(self, workers: int, model: Model) -> None:
        self._model = model
        self._flat = np.ones(model.shape.nbytes, np.uint8)
        self._lines = Lines()
        self._fleet = Fleet("raw_tcp", workers, model.shape, {"port": self._lines.port})
        self._lines.accept(workers)
        for connection in self._lines.connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._senders = ThreadPoolExecutor(workers)
        self._fleet.wait_ready()

    def publish_once(self) -> float:
        self._model.write_to(self._flat)
        before = time.perf_counter()
        if len(self._lines.connections) == 1:
            self._send(self._lines.connections[0])
        else:
            list(self._senders.map(self._send, self._lines.connections))
        self._lines.wait()
        return time.perf_counter() - before

    def _send(self, connection: socket.socket) -> None:
        connection.sendall(self._flat.data)

    def check(self) -> None:
        self._fleet.check(self._model)

    def stop(self) -> None:
        self._fleet.stop()
        self._senders.shutdown()
        self._lines.close()


def create() -> RawTcp:
    """Return the publisher's side."""
    return RawTcp()


def work(worker: Worker) -> None:
    """Receive into one block, whose parts are the tensors."""
    flat = np.ones(worker.model.shape.nbytes, np.uint8)
    worker.model.rest_on(flat)
    with Line(worker.told["port"]) as line:
        worker.ready.set()
        while True:
            at = 0
            while at < flat.nbytes:
                into = flat[at : at + RECEIVE]
                count = line.connection.recv_into(into)  # type: ignore[arg-type] # a buffer
                if not count:
                    return
                at += count
            line.done()
