"""The other limit: every worker copies the bytes out of shared memory, all at the same time."""

import mmap
import os
import socket
import tempfile
import time

import numpy as np
from numpy.typing import NDArray

from ..contender import Kind
from ..fleet import START_SECONDS, Fleet, Worker
from ..model import Model

NEEDS: tuple[str, ...] = ()
LIMIT = "shared_memory"
FOLDER = "/dev/shm"  # noqa: S108 - this folder is memory, which a temporary one may not be


class Copies:
    """The publisher's side. Filling the shared memory is not timed; the workers' copies are."""

    title = "shared: memcpy"
    kind: Kind = "limit"

    def start(self, workers: int, model: Model) -> None:
        self._model = model
        with (
            tempfile.NamedTemporaryFile(dir=FOLDER, prefix="weightbus-bench-") as file,
            socket.create_server(("127.0.0.1", 0)) as listener,
        ):
            os.ftruncate(file.fileno(), model.shape.nbytes)
            memory = mmap.mmap(file.fileno(), model.shape.nbytes)
            self._flat: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
            self._flat[:] = 0
            listener.settimeout(START_SECONDS)
            told = {"port": listener.getsockname()[1], "file": file.name}
            self._fleet = Fleet("shared_memory", workers, model.shape, told)
            self._connections = [listener.accept()[0] for _ in range(workers)]
            self._fleet.wait_ready()

    def publish_once(self) -> float:
        self._model.write_to(self._flat)
        before = time.perf_counter()
        for connection in self._connections:
            connection.sendall(b"!")
        for connection in self._connections:
            if connection.recv(1) != b"!":
                raise ConnectionError("a worker is gone")
        return time.perf_counter() - before

    def check(self) -> None:
        self._fleet.check(self._model)

    def stop(self) -> None:
        self._fleet.stop()
        for connection in self._connections:
            connection.close()


def create() -> Copies:
    """Return the publisher's side."""
    return Copies()


def work(worker: Worker) -> None:
    """Copy whenever told to."""
    with open(worker.told["file"], "r+b") as file:
        memory = mmap.mmap(file.fileno(), worker.model.shape.nbytes)
    source: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    with socket.create_connection(("127.0.0.1", worker.told["port"])) as connection:
        worker.ready.set()
        while connection.recv(1):
            worker.model.read_from(source)
            connection.sendall(b"!")
