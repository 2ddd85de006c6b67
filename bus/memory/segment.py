"""Segments: memory that workers on the same host read directly (the shared-memory transport).

A publisher's snapshots are in a `memfd`: memory with a file descriptor but no name. A worker of the
same user opens this memory read-only, as the file `/proc/<pid>/fd/<fd>`. A worker that finds the
announced token in the file is on the publisher's host. No cleanup is needed: the kernel frees the
memory when the last process that maps the file has ended, even if it was killed.

    0       8       24      32        40       48              4096
    ├───────┼───────┼───────┼─────────┼────────┼─────── ··· ────┼──────────────┤
    │ magic │ token │ epoch │ version │ length │ model, zeros   │ data section │
    └───────┴───────┴───────┴─────────┴────────┴────────────────┴──────────────┘
                      u64     u64       u64: length of the model's id (all little-endian)

The *stamp* (epoch, version, model) names the content of the data section, and is zero while the
segment is being filled. There may be a second copy of the data section in the memory of a CUDA
device. Then a note at offset 256 contains the location of that copy (`codecs/device_memory.py`). A
second stamp at offset 512, with the same fields, names the version of that copy. Until a worker
requests the bytes in the segment, only the second copy is made, and only the second stamp is set.

No torn read is possible: the publisher fills a segment under an exclusive `flock`, a worker copies
under a shared `flock`, and neither waits for the other. A segment that a worker has locked is not
overwritten, even if the worker is stopped in the middle of its copy. The kernel releases the lock
of a worker that dies. A worker that finds another stamp than the announced one is too late, and
fetches the latest version.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import resource
import secrets
import stat
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..event_log import RateLimitedWarning
from ..messages import Shared
from ..staged import OverwrittenError, StaleError
from .pages import STEP_BYTES, Check, populate

unshared = RateLimitedWarning(
    logging.getLogger("weightbus.publisher"),
    "no shared memory (%s): workers on this host use the network too",
)
MAGIC = b"WBPSHM1\0"
HEADER_BYTES = 4096  # one page, so that the data section is page-aligned
MODEL_BYTES = 128  # the most bytes of a model's id
STAMP_END = 48 + MODEL_BYTES
NOTE_BEGIN, NOTE_BYTES = 256, 96  # the note with the location of a second copy
SECOND_BEGIN, SECOND_END = 512, 512 + STAMP_END - 24  # the stamp of that copy
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}\Z")
TOUCH_BYTES = 2**26  # bytes touched in one step, after which other threads can run
# From 3.13 on, Python need not duplicate the descriptor of a mapping.
UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
VIEWS_MAX = 8  # segments that a worker keeps mapped: a few models with a few blocks each


class Segment:
    """A segment of this process, which other processes may read.

    Args:
        nbytes: The size of the data section.
        check: Called between the steps of the allocation; may raise.

    Raises:
        OSError: There is not enough memory, or this system has no segments.
    """

    def __init__(self, nbytes: int, check: Check = lambda: None) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        fd = os.memfd_create("weightbus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _leave_room(fd)
            os.fchmod(fd, 0o600)  # S1
            size = HEADER_BYTES + nbytes
            for begin in range(0, size, STEP_BYTES):  # allocate all of it now, or raise
                os.posix_fallocate(fd, begin, min(STEP_BYTES, size - begin))
                check()
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)  # readers can rely on the size
            self._memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, **UNTRACKED)
            populate(self._memory, check)
        except BaseException:
            os.close(fd)
            raise
        self._has_note = False
        self._fd = fd  # `__del__` closes it, only once, since the number may be reused
        self.token = secrets.token_hex(16)
        self._memory[:24] = MAGIC + bytes.fromhex(self.token)
        self.data: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)[HEADER_BYTES:]

    def claim(self) -> bool:
        """Lock the segment and clear its stamps, to fill it; return False if a worker copies."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # S3
        except BlockingIOError:
            return False
        self._memory[24:STAMP_END] = bytes(STAMP_END - 24)
        self._memory[SECOND_BEGIN:SECOND_END] = bytes(STAMP_END - 24)
        return True

    def release(self, model: str, epoch: int, version: int, *, late: bool = False) -> None:
        """Stamp the filled segment, and unlock it. `late`: stamp only its second copy."""
        stamp = stamp_of(model, epoch, version)
        if self._has_note:
            self._memory[SECOND_BEGIN:SECOND_END] = stamp  # S12
        if not late:
            self._memory[24:STAMP_END] = stamp  # S3
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def arrived(self) -> None:
        """Stamp a segment into which the bytes were copied after `release(late=True)`."""
        # S12
        self._memory[24:STAMP_END] = self._memory[SECOND_BEGIN:SECOND_END]

    def note(self, note: bytes) -> None:
        """Set the location of a second copy; empty: there is none. The segment must be locked."""
        self._has_note = bool(note)  # S12
        self._memory[NOTE_BEGIN : NOTE_BEGIN + NOTE_BYTES] = note.ljust(NOTE_BYTES, b"\0")

    @property
    def shared(self) -> Shared:
        """The path and token by which workers find this segment."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Shared(path=path, token=self.token)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)  # not `os.close`: `os` may be gone when the interpreter ends


class StampedMemory(ABC):
    """Memory that is read under a lock, with its stamp checked before and after."""

    data: NDArray[np.uint8]

    @property
    def note(self) -> bytes:
        """The location of a second copy of the data section; zeros or empty if there is none."""
        return b""

    @contextmanager
    def reading(
        self, model: str, epoch: int, version: int, *, second: bool = False
    ) -> Generator[None]:
        """Hold the lock while the block copies from the memory, or from the second copy. (S5)

        Raises:
            StaleError: The memory has another version than this one, or is being filled.
            OverwrittenError: The memory had this version before the copy, but not after.
        """
        stamp = stamp_of(model, epoch, version)
        found = self._second_stamp if second else self._stamp
        if not self._hold():
            raise StaleError
        try:
            if found() != stamp:
                raise StaleError
            yield
            if found() != stamp:
                raise OverwrittenError("the memory was written to while it was copied")
        finally:
            self._let_go()

    @abstractmethod
    def _hold(self) -> bool:
        """Acquire the readers' lock without waiting; return whether that was possible."""

    @abstractmethod
    def _let_go(self) -> None:
        """Release the lock."""

    @abstractmethod
    def _stamp(self) -> bytes:
        """Return the memory's stamp."""

    def _second_stamp(self) -> bytes:
        return b""


class MappedSegment(StampedMemory):
    """Another process's segment, read-only.

    Raises:
        OSError: There is no such segment on this host, or it is not readable.
    """

    def __init__(self, shared: Shared, nbytes: int) -> None:
        if _PATH.match(shared.path) is None:  # S4
            raise OSError(f"{shared.path!r} is not a path of a segment")
        self._fd = os.open(shared.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != HEADER_BYTES + nbytes:
            raise OSError(f"{shared.path} is not a segment of {nbytes} bytes")
        if not fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"{shared.path} could be cut short while it is read")
        size = HEADER_BYTES + nbytes
        self._memory = mmap.mmap(self._fd, size, prot=mmap.PROT_READ, **UNTRACKED)
        if self._memory[:24] != MAGIC + bytes.fromhex(shared.token):
            raise OSError(f"{shared.path} is a segment with another token")
        self.token, self._path = shared.token, shared.path
        self.data: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)[HEADER_BYTES:]
        self.touched = False  # whether `touching` was called
        self._lock = threading.Lock()
        self._holders = 0  # number of blocks that read; all threads share one kernel lock

    @property
    def given_up(self) -> bool:
        """True if the owner has closed the segment, and so will write no more versions into it."""
        try:
            found, ours = os.stat(self._path), os.fstat(self._fd)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino)

    @property
    def note(self) -> bytes:
        """The location of a second copy of the data section; zeros if there is none."""
        return self._memory[NOTE_BEGIN : NOTE_BEGIN + NOTE_BYTES]

    def touching(self) -> Generator[None]:
        """Read from every page once, in steps: this is half the cost of the first copy."""
        self.touched = True
        for begin in range(0, self.data.nbytes, TOUCH_BYTES):
            self.data[begin : begin + TOUCH_BYTES : mmap.PAGESIZE].max()
            yield

    def _hold(self) -> bool:
        with self._lock:
            if self._holders == 0:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            self._holders += 1
            return True

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _stamp(self) -> bytes:
        return self._memory[24:STAMP_END]

    def _second_stamp(self) -> bytes:
        return self._memory[SECOND_BEGIN:SECOND_END]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)  # not `os.close`: `os` may be gone when the interpreter ends


class MappedSegments:
    """The segments that a worker has opened. Each is mapped only once."""

    def __init__(self) -> None:
        self._views: dict[str, MappedSegment] = {}

    def open(self, shared: Shared, nbytes: int) -> MappedSegment | None:
        """Return the mapping of a segment of this host; None if it cannot be opened."""
        known = self._views.get(shared.token)
        if known is not None and known.data.nbytes == nbytes:
            return known
        try:
            view = MappedSegment(shared, nbytes)
        except (OSError, ValueError):
            return None
        # A mapping keeps memory allocated, even if the owner closed the segment to free memory.
        self._views = {token: each for token, each in self._views.items() if not each.given_up}
        while len(self._views) >= VIEWS_MAX:  # S4
            del self._views[next(iter(self._views))]
        self._views[shared.token] = view
        return view


def _leave_room(fd: int) -> None:
    """Check that half of the process's descriptors stay free for connections.

    Raises:
        OSError: `fd`, the lowest number that was free, is half of the limit or more.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and fd >= most // 2:
        raise OSError(
            errno.EMFILE,
            f"half of this process's {most} descriptors are taken, and the others are for "
            "connections; raise the limit (ulimit -n), or publish fewer models from one process",
        )


def probe() -> Segment | None:
    """Return an empty segment, which shows workers that they are on this host; None if it fails."""
    try:
        return Segment(0)
    except OSError:
        return None


def stamp_of(model: str, epoch: int, version: int) -> bytes:
    """Return the stamp of a version."""
    name = model.encode()
    return struct.pack("<QQQ", epoch, version, len(name)) + name.ljust(MODEL_BYTES, b"\0")
