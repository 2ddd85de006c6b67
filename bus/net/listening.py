"""Opens listening sockets, but never binds an endpoint at which another process listens.

For TCP, the kernel ensures this. For Unix sockets, a path remains when its publisher is killed. The
path must be removed before it can be bound again, but not while a process listens there. So a lock
on the folder makes checking, removing and binding atomic. The kernel releases the lock when its
holder ends.

Any user who may read a folder may lock it, for any time. So this module ignores a lock that is held
for longer than a publisher needs. To be safe without the lock, a path is renamed before it is
removed, and renamed back if a process listens there after all.
"""

import contextlib
import errno
import fcntl
import gc
import logging
import math
import os
import secrets
import selectors
import socket
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from ..errors import AddressError
from ..event_log import RateLimitedWarning
from ..limits import ACCEPT_SECONDS
from . import endpoints
from .processes import PROC, SocketHolder, ephemeral_range, holder_of

log = logging.getLogger("weightbus.publisher")

BACKLOG = 4096  # connections that the kernel queues until they are accepted
LOCK_SECONDS = 1.0  # seconds to wait for the lock on a folder
LOCK_RETRY_SECONDS = 0.005  # seconds between two attempts to lock a folder
# Seconds to retry a port that the kernel gave to a connection, or that a publisher of this process
# has and will close. (A publisher without references closes once Python has collected it.)
BIND_SECONDS = 5.0
AGAIN_SECONDS = 0.05  # seconds between two attempts to bind
_SIOCGIFADDR = 0x8915  # Linux's ioctl for the address of an interface

T = TypeVar("T")


class PublisherEndpoints(Protocol):
    """A publisher's sockets, as `bound` sees them.

    Attributes:
        leaving: Whether the sockets will be closed soon.
        address, data_address: The endpoints of the control socket and of the data socket.
    """

    leaving: bool
    address: str
    data_address: str


_publishers: "weakref.WeakValueDictionary[str, PublisherEndpoints]" = weakref.WeakValueDictionary()


def register(endpoint: str, publisher: PublisherEndpoints) -> None:
    """Register a publisher of this process at its endpoint, as long as the publisher exists."""
    _publishers[endpoint] = publisher


def bound(bind: Callable[[], T], endpoint: str, parameter: str, patience: float | None = None) -> T:
    """Return the result of `bind()`; retry while the port is temporarily in use.

    Args:
        bind: Binds the endpoint; raises an `OSError` on failure.
        endpoint: The endpoint.
        parameter: The name of the user's parameter that gave the endpoint, for errors.
        patience: Seconds to retry; None: `BIND_SECONDS`.

    Raises:
        AddressError: The endpoint is invalid, has another listener, or stayed in use.
    """
    started, retried = time.monotonic(), False
    patience = BIND_SECONDS if patience is None else patience
    while True:
        leaving = any(publisher.leaving for publisher in _publishers_at(endpoint))
        try:
            return bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = str(error.strerror or error)
                raise AddressError(f"cannot bind {parameter} {endpoint}: {reason}") from None
        holder = holder_of(endpoint)
        if not retried and holder is not None and holder.pid in (0, os.getpid()):
            if holder.pid:
                gc.collect()  # the holder may be an unreferenced publisher
            retried = True  # a holder whose process is unknown may have ended meanwhile
            continue
        waited = time.monotonic() - started
        if waited >= patience or not (leaving or _is_temporary(endpoint, holder)):
            raise _in_use_error(endpoint, parameter, holder, waited)
        time.sleep(AGAIN_SECONDS)


def _is_temporary(endpoint: str, holder: SocketHolder | None) -> bool:
    """True if an endpoint is in use only by a connection, and thus temporarily."""
    connected = holder is None or not holder.listens
    return connected and endpoints.ipc_path(endpoint) is None and PROC.exists()


def _publishers_at(endpoint: str) -> list[PublisherEndpoints]:
    """Return the publishers of this process at an endpoint."""
    return [each for own, each in list(_publishers.items()) if endpoints.same_place(endpoint, own)]


def _in_use_error(
    endpoint: str, parameter: str, holder: SocketHolder | None, waited: float
) -> AddressError:
    # Return the error for an endpoint that is in use.
    other = f"pass another {parameter}= (port 0 takes any free one)"
    if holder is None and endpoints.ipc_path(endpoint) is not None:
        return AddressError(
            f"{endpoint} is in use by a file, and no process is seen to listen there: remove the "
            f"file if it is not needed, or pass another {parameter}="
        )
    if holder is None or not holder.listens:
        by = holder or "an unknown process"
        ports = ephemeral_range(endpoint)
        hint = f"; the kernel gives ports of {ports} to connections: choose one outside" * bool(
            ports
        )
        return AddressError(
            f"{endpoint} is in use by {by}, and stayed so for {waited:g} s: {other}{hint}"
        )
    if holder.pid == os.getpid():
        ours = _publishers_at(endpoint)
        by = "by a publisher of this process: close() it" if ours else "by this process itself"
        hint = "".join(_data_hint(endpoint, parameter, each) for each in ours[:1])
        return AddressError(f"{endpoint} is in use {by}, or {other}{hint}")
    hint = _next_port_hint(endpoint, holder) if parameter == "address" else ""
    return AddressError(
        f"{endpoint} is in use by {holder}, which listens there; stop it, or {other}{hint}"
    )


def _data_hint(endpoint: str, parameter: str, publisher: PublisherEndpoints) -> str:
    """Return a hint if one publisher's address is another's data endpoint; else ""."""
    if parameter == "address" and endpoints.same_place(endpoint, publisher.data_address):
        cause = f"{endpoint} is the data socket of the publisher at {publisher.address}"
    elif parameter == "data" and endpoints.same_place(endpoint, publisher.address):
        cause = f"the publisher at {publisher.address} is where the data socket of this one goes"
    else:
        return ""
    return f'. {cause}: leave a port between, or give one of them Settings(data="tcp://HOST:PORT")'


def _next_port_hint(endpoint: str, holder: SocketHolder) -> str:
    """Return a hint if the process that has a port also has the next lower port; else ""."""
    if endpoints.ipc_path(endpoint) is not None:
        return ""
    _, port = endpoints.host_and_port(endpoint)
    lower = endpoint.removesuffix(str(port)) + str(port - 1)
    if port <= 1 or (found := holder_of(lower)) is None or found.pid != holder.pid:
        return ""
    return f". It also listens at {lower}: if that is a publisher, leave a port between"


class Listener:
    """A socket that listens at an endpoint.

    Attributes:
        endpoint: The endpoint, with the actual port.

    Raises:
        OSError: The endpoint is in use, or invalid.
    """

    def __init__(self, endpoint: str) -> None:
        path = endpoints.ipc_path(endpoint)
        # The path to remove at close, if it is still the file with this id.
        self._path, self._file_id = "", (0, 0)
        self._folder = ""  # the folder to remove at close, since this object has created it
        if path is None:
            self.socket = _listening_tcp(endpoint)
            host, port = self.socket.getsockname()[:2]
            self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
            return
        if path == "*":  # any path, as in ZeroMQ
            self._folder = tempfile.mkdtemp(prefix="weightbus-")
            path = f"{self._folder}/control"
        self.endpoint = f"ipc://{path}"
        if path.startswith("@"):
            self.socket = _listening_at(endpoints.ipc_name(path))
            return
        with _locked_folder(path):
            if is_stale_socket(path):
                _remove(path)
            self.socket = _listening_at(path)
            self._path, self._file_id = path, _identity(path)

    def close(self) -> None:
        """Close the socket and remove its path; may be called twice."""
        self.socket.close()
        path, self._path = self._path, ""
        if path:
            with contextlib.suppress(OSError), _locked_folder(path):
                if _identity(path) == self._file_id:  # otherwise the path is another socket's
                    os.unlink(path)
        if self._folder:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)


class WatchedListener(Listener):
    """A listener that is registered in a selector, and can stop accepting for a while.

    Meanwhile, new connections wait in the kernel's backlog.

    Args:
        endpoint: The endpoint.
        selector: The selector.
        name: What connects, for the log, such as `a subscriber`.

    Attributes:
        resume_at: The time at which to accept again; infinite: the listener does not pause.

    Raises:
        OSError: The endpoint is in use, or invalid.
    """

    def __init__(self, endpoint: str, selector: selectors.BaseSelector, name: str) -> None:
        super().__init__(endpoint)
        self._selector, self.resume_at = selector, math.inf
        self._not_accepted = RateLimitedWarning(log, f"cannot accept {name}, will try again: %s")
        selector.register(self.socket, selectors.EVENT_READ)

    def accept(self, now: float) -> tuple[socket.socket, Any] | None:
        """Return a new connection and its peer's address; None if there is none.

        After an error, the listener pauses.
        """
        try:
            return self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            self._not_accepted.warn(error, now)
            self.pause(now)
            return None

    def pause(self, now: float) -> None:
        """Leave new connections in the kernel's backlog for a while."""
        self.resume_at = now + ACCEPT_SECONDS
        self._selector.unregister(self.socket)

    def resume(self) -> None:
        """Accept again. Call this at the time `resume_at`."""
        self.resume_at = math.inf
        self._selector.register(self.socket, selectors.EVENT_READ)

    def close(self) -> None:
        """Close the socket and remove its path."""
        if self.resume_at == math.inf:
            self._selector.unregister(self.socket)
        super().close()


@contextlib.contextmanager
def _locked_folder(path: str) -> Generator[None]:
    """Lock the folder of a path during the block, so that other publishers wait.

    If another process holds the lock for longer than `LOCK_SECONDS`, go on without the lock.
    """
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break  # the holder is not a publisher
                time.sleep(LOCK_RETRY_SECONDS)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # explicitly, as a forked child may have the descriptor
        os.close(folder)


def is_stale_socket(path: str) -> bool:
    """Return whether a path is a socket at which no process listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _remove(path: str) -> None:
    """Remove the path of a stale socket, unless another process listens there by now.

    Raises:
        OSError: Another process listens there, or the path cannot be removed.
    """
    renamed = os.path.join(os.path.dirname(path), f".{secrets.token_hex(4)}")
    if len(os.fsencode(renamed)) > endpoints.PATH_MAX:  # the check could not connect to it
        os.unlink(path)
        return
    os.rename(path, renamed)
    if is_stale_socket(renamed):
        os.unlink(renamed)
        return
    try:
        os.link(renamed, path, follow_symlinks=False)
        os.unlink(renamed)
    except FileExistsError:  # a third process has bound the path
        os.unlink(renamed)
    except OSError:  # no hard links on this file system
        os.rename(renamed, path)
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _listening_tcp(endpoint: str) -> socket.socket:
    # Return a socket that listens at a TCP endpoint.
    host, port = endpoints.host_and_port(endpoint.replace(":*", ":0"))
    family = socket.AF_INET6 if "[" in endpoint else socket.AF_INET
    host = _address_of(host)
    found = socket.getaddrinfo(
        None if host == "*" else host, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(found[0][4])
        return _listen(listener)
    except BaseException:
        listener.close()
        raise


def _address_of(host: str) -> str:
    """Return a host's address if it is the name of a network interface; else the host itself."""
    if host in (name for _, name in socket.if_nameindex()):
        request = struct.pack("256s", host.encode())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            return socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFADDR, request)[20:24])
    return host


def _listening_at(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        return _listen(listener)
    except BaseException:
        listener.close()
        raise


def _listen(listener: socket.socket) -> socket.socket:
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
