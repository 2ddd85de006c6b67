"""Redis: arrays as values, a list of versions for each worker, and a list of answers.

The installed server runs on its own unix socket, without files on disk. The publisher sets all
values at once and pushes the version onto every worker's list. A worker waits for an entry of its
list, gets all values at once, and copies them into its model. The server has one thread for
commands, so it serves workers one after the other.
"""

import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contender import Kind
from ..fleet import START_SECONDS, Fleet, Worker
from ..model import Model

if TYPE_CHECKING:
    import redis

NEEDS: tuple[str, ...] = ("redis",)
PROGRAMS: tuple[str, ...] = ("redis-server",)
LIMIT = "raw_tcp"
ANSWER_SECONDS = 120.0
DONE = "done"  # the list of answers


class RedisValues:
    """The publisher's side."""

    title = "sockets: Redis"
    kind: Kind = "peer"

    def start(self, workers: int, model: Model) -> None:
        self._model, self._workers = model, workers
        self._folder = tempfile.TemporaryDirectory(prefix="weightbus-bench-")
        where = str(Path(self._folder.name, "socket"))
        self._server = _serve(where)
        self._redis = _connect(where)
        _wait_for(self._redis)
        self._fleet = Fleet("redis_values", workers, model.shape, {"socket": where})
        self._fleet.wait_ready()

    def publish_once(self) -> float:
        before = time.perf_counter()
        # As bytes, since the client assumes that a buffer's length is its number of bytes.
        arrays = self._model.arrays.items()
        self._redis.mset({name: array.view(np.uint8).data for name, array in arrays})
        for index in range(self._workers):
            self._redis.rpush(_list(index), "go")
        for _ in range(self._workers):
            if self._redis.blpop(DONE, timeout=ANSWER_SECONDS) is None:
                raise TimeoutError(f"no answer within {ANSWER_SECONDS:.0f} s")
        return time.perf_counter() - before

    def check(self) -> None:
        self._fleet.check(self._model)

    def stop(self) -> None:
        self._fleet.stop()
        self._redis.close()
        self._server.kill()  # the server has nothing to save
        self._server.wait()
        self._folder.cleanup()


def _serve(where: str) -> "subprocess.Popen[bytes]":
    settings = ["--port", "0", "--unixsocket", where, "--save", "", "--appendonly", "no"]
    return subprocess.Popen(["redis-server", *settings], stdout=subprocess.DEVNULL)  # noqa: S603, S607


def _connect(where: str) -> "redis.Redis":
    import redis

    # Without a timeout (default: 5 s), since a worker may wait long for its turn.
    return redis.Redis(unix_socket_path=where, socket_timeout=None)


def _wait_for(server: "redis.Redis") -> None:
    import redis

    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            server.ping()
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _list(index: int) -> str:
    return f"worker-{index}"


def create() -> RedisValues:
    """Return the publisher's side."""
    return RedisValues()


def work(worker: Worker) -> None:
    """Copy the values into the model for each entry of the list."""
    server, arrays = _connect(worker.told["socket"]), worker.model.arrays
    names = list(arrays)
    worker.ready.set()
    while True:
        server.blpop(_list(worker.index), timeout=0)
        values: Any = server.mget(names)  # bytes, since decoding is off
        for name, value in zip(names, values, strict=True):
            np.copyto(arrays[name], np.frombuffer(value, np.float32))
        server.rpush(DONE, "!")
