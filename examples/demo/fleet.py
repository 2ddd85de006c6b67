"""Starts, reads, kills and ends the worker processes of the demo."""

import contextlib
import os
import queue
import subprocess
import tempfile
import threading
import time
from typing import IO

from weightbus import WeightBusError

from .subject import Subject
from .tally import Played

GOODBYE_SECONDS = 5.0  # for a worker to finish its episode and leave, before it is killed
COMPLAINT_BYTES = 2_000  # how much of a dead worker's stderr the error quotes
SEEDS = 1_000  # number of workers' seeds for each seed of the demo


class WorkerDied(WeightBusError):  # noqa: N818 - it names what happened
    """A worker process ended by itself."""


class Fleet:
    """The worker processes by name, and the queue of what they have played.

    Args:
        address: The publisher's address, for the workers.
        subject: The subject, which has the workers' programs.
        seed: The seed from which the workers' seeds are derived.
    """

    def __init__(self, address: str, subject: Subject, seed: int) -> None:
        self._address, self._subject, self._seed = address, subject, seed
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._complaints: dict[str, IO[bytes]] = {}
        self._played: queue.SimpleQueue[Played] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._started = 0

    def start(self, name: str) -> None:
        """Start the worker of this name."""
        self._started += 1
        complaints = self._complaints[name] = tempfile.TemporaryFile()  # noqa: SIM115
        seed = str(SEEDS * self._seed + self._started)
        process = subprocess.Popen(  # noqa: S603 - our own program, our own arguments
            [*self._subject.program(name), self._address, "--name", name, "--seed", seed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            # One thread each: a worker multiplies only matrices of 64 by 64.
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
                    self._played.put(self._subject.read(line))

    def kill(self, name: str) -> None:
        """Kill a worker with SIGKILL, so that it cannot say goodbye to the publisher."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(GOODBYE_SECONDS)
        self._forget(name, process)

    def take(self, timeout: float) -> list[Played]:
        """Return the episodes that have arrived; wait up to `timeout` seconds for the first.

        Raises:
            WorkerDied: A worker ended by itself; the error quotes the end of its stderr.
        """
        self._check()
        played: list[Played] = []
        with contextlib.suppress(queue.Empty):
            played.append(self._played.get(timeout=timeout))
            while True:
                played.append(self._played.get_nowait())
        return played

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
        """End every worker: close its stdin, and kill it if it does not end soon."""
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
