"""Sockets that listen: bound where nobody else does, and never taken from somebody who does.

The kernel sees to that for TCP. A path stays behind when its publisher is killed, and has to be
removed before it can be bound again: but not while somebody listens there. Looking, removing and
binding are one step, since whoever does them holds a lock on the folder, which the kernel ends with
its holder: nothing is left behind.
"""

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
import time
from collections.abc import Generator

from ..limits import DESCRIPTORS_RESERVED
from . import endpoints

BACKLOG = 128  # connections that the kernel keeps until they are accepted
LOCK_SECONDS = 1.0  # for the lock on a folder, which others hold for less than a millisecond
LOOK_SECONDS = 0.005  # between two attempts to take it


def spent(descriptor: int) -> bool:
    """Return whether hardly any descriptors are left: a new one has the lowest free number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - DESCRIPTORS_RESERVED


class Listener:
    """A socket that listens at an endpoint.

    Attributes:
        endpoint: Where; with the port that was taken.

    Raises:
        OSError: It is taken, or makes no sense.
    """

    def __init__(self, endpoint: str) -> None:
        path = endpoints.ipc_path(endpoint)
        self._path, self._file = "", (0, 0)  # to be removed, while it is this file
        if path is None:
            self.socket = _listening_tcp(endpoint)
            host, port = self.socket.getsockname()[:2]
            self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
            return
        self.endpoint = endpoint
        if path.startswith("@"):
            self.socket = _listening_at(endpoints.ipc_name(path))
            return
        with _folder_of(path):
            if left_behind(path):
                os.unlink(path)
            self.socket = _listening_at(path)
            self._path, self._file = path, _identity(path)

    def close(self) -> None:
        """Listen no longer; calling it twice is fine."""
        self.socket.close()
        path, self._path = self._path, ""
        if path:
            with contextlib.suppress(OSError), _folder_of(path):
                if _identity(path) == self._file:  # else somebody has put their own there
                    os.unlink(path)


@contextlib.contextmanager
def _folder_of(path: str) -> Generator[None]:
    """Keep other publishers from binding in the folder of a path meanwhile."""
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOOK_SECONDS)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        os.close(folder)


def left_behind(path: str) -> bool:
    """Tell whether a path is a socket at which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _listening_tcp(endpoint: str) -> socket.socket:
    host, port = endpoints.host_and_port(endpoint.replace(":*", ":0"))
    family = socket.AF_INET6 if "[" in endpoint else socket.AF_INET
    found = socket.getaddrinfo(
        None if host == "*" else host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(found[0][4])
        return _ready(listener)
    except BaseException:
        listener.close()
        raise


def _listening_at(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        return _ready(listener)
    except BaseException:
        listener.close()
        raise


def _ready(listener: socket.socket) -> socket.socket:
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
