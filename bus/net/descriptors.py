"""Descriptors, of which a process has so many: enough are kept, and who goes without is told.

libzmq ends the process where it finds none for a socket that is being made, and its thread spins
where it finds none for a connection.
"""

import contextlib
import errno
import math
import os
import re
import resource
from pathlib import Path

from ..limits import CROWDED_SECONDS, DESCRIPTORS_RESERVED

DESCRIPTORS_TAKEN = 24  # at most 23 as a side is made: with keys, a state folder and both pages
RAISE = "raise the limit (`ulimit -n`) where it is started"


def limit_of() -> float:
    """Return how many descriptors this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def spent(descriptor: int) -> bool:
    """Return whether hardly any descriptors are left: a new one has the lowest free number."""
    return descriptor >= limit_of() - DESCRIPTORS_RESERVED


def check_left() -> None:
    """Take as many descriptors as sockets are made of, and give them back.

    Raises:
        OSError: There are fewer; it says how many there may be.
    """
    taken = list[int]()
    try:
        while len(taken) < DESCRIPTORS_TAKEN:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        whose = (
            f"{len(taken)} of this process's {limit:,} descriptors are left"
            if error.errno == errno.EMFILE
            else f"{len(taken)} descriptors are left on this host"
        )
        raise OSError(
            error.errno, f"{whose}, and sockets need {DESCRIPTORS_TAKEN}: close files, or {RAISE}"
        ) from None
    finally:
        for descriptor in taken:
            os.close(descriptor)


def used_by(pid: int) -> tuple[int, int] | None:
    """Return how many descriptors a process has in use, and may have; None: that is not told."""
    with contextlib.suppress(OSError):
        limits = Path(f"/proc/{pid}/limits").read_text()
        if found := re.search(r"^Max open files\s+(\d+)", limits, re.MULTILINE):
            return len(os.listdir(f"/proc/{pid}/fd")), int(found[1])
    return None


class Crowd:
    """The connections that were turned away lately, since hardly any descriptors are left."""

    def __init__(self) -> None:
        self._count, self._host, self._last_at = 0, "", float("-inf")
        self._used = 0

    def note(self, descriptor: int, host: str, now: float) -> None:
        """One from a host was turned away, which had this number."""
        if now - self._last_at >= CROWDED_SECONDS:
            self._count = 0
        self._count, self._host, self._used, self._last_at = self._count + 1, host, descriptor, now

    def text(self, now: float) -> str:
        """Say it, for as long as it is news; empty if there is none."""
        if now - self._last_at >= CROWDED_SECONDS:
            return ""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        times = "once" if self._count == 1 else f"{self._count} times"
        return (
            f"connections were turned away {times}, last from {self._host or 'this host'}, since "
            f"the publisher's process has {self._used:,} of {limit:,} descriptors in use and keeps "
            f"{DESCRIPTORS_RESERVED}: {RAISE}"
        )
