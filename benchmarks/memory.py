"""The current and the peak memory of a process, as the kernel counts it."""

import contextlib
import threading
from pathlib import Path
from typing import Self

LOOK_SECONDS = 0.002


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """Return the peak of the bytes in memory since the start, or since `reset_peak`."""
    return _status("VmHWM")


def private(pid: int | None = None) -> int:
    """Return the private bytes of a process, which it has not mapped from files or shared memory.

    Pages of shared memory are never private.
    """
    return _field(Path(f"/proc/{pid or 'self'}/status"), "RssAnon")


def shared(pid: int | None = None) -> int:
    """Return the bytes of shared memory that a process has touched."""
    return _field(Path(f"/proc/{pid or 'self'}/status"), "RssShmem")


class PrivatePeak:
    """Measures the peak of another process's private bytes, every few milliseconds.

    The kernel counts only the peak of all pages, with shared ones.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.nbytes = 0

    def _look(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the process has ended
            while not self._over.wait(LOOK_SECONDS):
                self.nbytes = max(self.nbytes, private(self._pid))

    def __enter__(self) -> Self:
        self.nbytes = private(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def reset_peak() -> None:
    """Reset the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def available() -> int:
    """Return the bytes that new processes can use without swapping."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _status(field: str) -> int:
    return _field(Path("/proc/self/status"), field)


def _field(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{file} has no {field}: these measurements need Linux")
