"""How much memory a process has, and had at most, as the kernel counts it."""

import contextlib
import threading
from pathlib import Path
from typing import Self

LOOK_SECONDS = 0.002


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that were in memory since the start, or since `reset_peak`."""
    return _status("VmHWM")


def private(pid: int | None = None) -> int:
    """Return the bytes that belong to a process alone: those that it did not map from somewhere.

    Pages of shared memory are not among them, whoever has touched them.
    """
    return _field(Path(f"/proc/{pid or 'self'}/status"), "RssAnon")


def shared(pid: int | None = None) -> int:
    """Return the bytes of shared memory that a process has touched."""
    return _field(Path(f"/proc/{pid or 'self'}/status"), "RssShmem")


class PrivatePeak:
    """The most private bytes that another process had, looked at every few milliseconds.

    The kernel keeps a peak of all pages only, shared ones included.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.nbytes = 0

    def _look(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it has ended
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
    """Forget the peak so far."""
    Path("/proc/self/clear_refs").write_text("5")


def available() -> int:
    """Return the bytes that new processes can have without swapping."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _status(field: str) -> int:
    return _field(Path("/proc/self/status"), field)


def _field(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{file} has no {field}: these measurements need Linux")
