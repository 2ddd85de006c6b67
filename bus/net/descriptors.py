"""Keeps file descriptors in reserve, and reports connections rejected for lack of them.

libzmq aborts the process if no descriptor is left for a new socket, and its thread spins if none is
left for a connection.
"""

import contextlib
import errno
import math
import os
import re
import resource
from pathlib import Path

from ..limits import DESCRIPTORS_RESERVED, REJECTIONS_SECONDS

# A publisher or worker opens at most 23: with keys, a state folder and both HTTP pages.
DESCRIPTORS_TAKEN = 24
RAISE = "raise the limit (`ulimit -n`) where it is started"


def limit_of() -> float:
    """Return how many descriptors this process may have open; infinity: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def nearly_exhausted(descriptor: int) -> bool:
    """True if few descriptors are left; `descriptor` was just opened.

    The kernel gives a new descriptor the lowest free number.
    """
    return descriptor >= limit_of() - DESCRIPTORS_RESERVED


def check_left() -> None:
    """Check that enough descriptors are free for all sockets, by opening and closing as many.

    Raises:
        OSError: Too few descriptors are free; the error says how many.
    """
    opened = list[int]()
    try:
        while len(opened) < DESCRIPTORS_TAKEN:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = (
            f"{len(opened)} of this process's {limit:,} descriptors are left"
            if error.errno == errno.EMFILE
            else f"{len(opened)} descriptors are left on this host"
        )
        raise OSError(
            error.errno, f"{count}, and sockets need {DESCRIPTORS_TAKEN}: close files, or {RAISE}"
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def used_by(pid: int) -> tuple[int, int] | None:
    """Return a process's number of open descriptors and its limit; None if unknown."""
    with contextlib.suppress(OSError):
        limits = Path(f"/proc/{pid}/limits").read_text()
        if found := re.search(r"^Max open files\s+(\d+)", limits, re.MULTILINE):
            return len(os.listdir(f"/proc/{pid}/fd")), int(found[1])
    return None


class RejectedConnections:
    """Counts recent connections that were rejected because few descriptors were left."""

    def __init__(self) -> None:
        self._count, self._host, self._last_at = 0, "", float("-inf")
        self._used = 0

    def note(self, descriptor: int, host: str, now: float) -> None:
        """Count a rejected connection from a host; `descriptor` is the number of its descriptor."""
        if now - self._last_at >= REJECTIONS_SECONDS:
            self._count = 0
        self._count, self._host, self._used, self._last_at = self._count + 1, host, descriptor, now

    def text(self, now: float) -> str:
        """Return a warning about recent rejections; empty if there were none."""
        if now - self._last_at >= REJECTIONS_SECONDS:
            return ""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        times = "once" if self._count == 1 else f"{self._count} times"
        return (
            f"connections were turned away {times}, last from {self._host or 'this host'}, since "
            f"the publisher's process has {self._used:,} of {limit:,} descriptors in use and keeps "
            f"{DESCRIPTORS_RESERVED}: {RAISE}"
        )
