"""The worker processes, as the trainer holds them: started, heard, killed, and always ended."""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from ...codecs.errors import WeightBusError
from .episode import Episode, from_line

GOODBYE_SECONDS = 5.0  # for a worker to finish its episode and leave, before it is killed
COMPLAINT_BYTES = 2_000  # how much of a dead worker's stderr is repeated


class WorkerDied(WeightBusError):  # noqa: N818 - it names what happened
    """A worker process ended that nobody had ended."""


class Fleet:
    """Worker processes by name, and the episodes that they send.

    Args:
        address: The publisher's address, for the workers.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._complaints: dict[str, IO[bytes]] = {}
        self._episodes: queue.SimpleQueue[Episode] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._started = 0

    def start(self, name: str) -> None:
        """Start the worker of this name."""
        self._started += 1
        complaints = self._complaints[name] = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", f"{__package__}.worker", self._address]
        process = subprocess.Popen(  # noqa: S603 - our own module, our own arguments
            [*command, "--name", name, "--seed", str(self._started)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            # One core's worth of threads each: a worker multiplies matrices of 64 by 64.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._processes[name] = process
        reader = threading.Thread(target=self._read, args=(process,), name=name, daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        with process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # a worker that is killed may leave half a line
                    self._episodes.put(from_line(line))

    def kill(self, name: str) -> None:
        """Kill a worker as the kernel would: at once, with no goodbye (SIGKILL)."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(GOODBYE_SECONDS)
        self._forget(name, process)

    def take(self, timeout: float) -> list[Episode]:
        """Return the episodes that have arrived, waiting up to `timeout` seconds for the first.

        Raises:
            WorkerDied: A worker ended by itself; it repeats the worker's last words.
        """
        self._check()
        episodes: list[Episode] = []
        with contextlib.suppress(queue.Empty):
            episodes.append(self._episodes.get(timeout=timeout))
            while True:
                episodes.append(self._episodes.get_nowait())
        return episodes

    def _check(self) -> None:
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None:
                complaints = self._complaints[name]
                complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - COMPLAINT_BYTES))
                words = complaints.read().decode(errors="replace").strip()
                raise WorkerDied(
                    f"worker {name} (process {process.pid}) ended with code {code}; its last "
                    f"words: {words or 'none'}"
                )

    def close(self) -> None:
        """End every worker: politely, and after a while not."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + GOODBYE_SECONDS
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(GOODBYE_SECONDS)
            self._forget(name, process)
        self._processes.clear()
        for reader in self._readers:
            reader.join(GOODBYE_SECONDS)

    def _forget(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        if process.stdin is not None:
            process.stdin.close()
        self._complaints.pop(name).close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
