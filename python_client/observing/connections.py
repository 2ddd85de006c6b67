"""Accepts the HTTP connections of a page, with bounds on their number and on silent connections.

A connection takes a descriptor of the publisher's process, and a page's port may be open to hosts
that have no access. So a connection is *unproven* until a request on it has access. An unproven
connection is closed after `SILENT_SECONDS`. The oldest one is closed earlier if a new connection
needs room. So a flood of silent connections does not lock out clients with access.
asyncio's server is not used: it accepts without a bound, and if there are no free descriptors, it
logs a traceback 128 times a second.
"""

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ...bus.event_log import RateLimitedWarning
from ...bus.net.descriptors import RAISE, nearly_exhausted

log = logging.getLogger("weightbus.http")

# Connections are also limited to one in `SHARE` of the process's descriptors, since workers need
# the others. The maximum allows 32 browsers (`STREAMS_MAX`) with a few connections each.
CONNECTIONS_MAX, SHARE = 128, 8
UNPROVEN_MAX = 16  # unproven connections of one host: a browser opens six, which soon have access
SILENT_SECONDS = 5.0  # seconds until the first request with access
IDLE_SECONDS = 30.0  # seconds between two requests; Prometheus sends one every 15 s
UNREAD_SECONDS = 30.0  # seconds until the kernel closes a connection that does not acknowledge
BACKLOG = 128  # connections that the kernel queues until they are accepted
ACCEPTS = 16  # connections accepted at once, before others are served
PAUSE_SECONDS = 1.0  # seconds between two attempts to accept without free descriptors
LOOK_SECONDS = 0.5  # seconds between two checks for silent connections
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection, which exists until its socket is closed."""

    socket: socket.socket
    host: str  # the peer's IP address
    since: float  # when it was accepted, in seconds on the monotonic clock
    proven: bool = False  # whether a request on it had access
    transport: asyncio.BaseTransport | None = None


class Connections:
    """Accepts connections, and closes silent and surplus ones.

    Only the thread of the event loop in which an instance is made may use the instance.

    Args:
        listeners: The listening sockets.
        make: Makes the protocol of a connection.
        where: The address, for the log.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        make: Callable[[], asyncio.BaseProtocol],
        where: str,
    ) -> None:
        self._listeners, self._make = listeners, make
        self._all: dict[int, _Connection] = {}  # by descriptor, which a newer connection may reuse
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._closed = RateLimitedWarning(
            log, f"connections to the page at {where} were closed: %s"
        )
        for listener in listeners:
            self._resume(listener)
        self._look()

    def close(self) -> None:
        """Stop accepting; existing connections stay open."""
        self._timer.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def prove(self, transport: asyncio.BaseTransport | None) -> None:
        """Mark the connection of a transport as proven: a request on it has access."""
        found = None if transport is None else transport.get_extra_info("socket")
        if found is not None and (each := self._all.get(found.fileno())) is not None:
            each.proven = True

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        # Accept the connections that wait, up to `ACCEPTS`.
        for _ in range(ACCEPTS):
            try:
                connection, peer = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in SCARCE:
                    raise
                # otherwise the loop would call `_accept` again at once
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_SECONDS, self._resume, listener)
                self._warn(f"{error.strerror}; {RAISE}")
                return
            self._take(connection, str(peer[0]))

    def _take(self, connection: socket.socket, host: str) -> None:
        # Serve a connection, or close it, or close an older one in its place.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if nearly_exhausted(connection.fileno()):
            connection.close()
            text = f"its process keeps the last of its {limit:,} descriptors: {RAISE}"
            self._warn(f"the last from {host}, as {text}")
            return
        most = min(CONNECTIONS_MAX, max(1, limit // SHARE)) if limit > 0 else CONNECTIONS_MAX
        unproven = [each for each in self._open() if not each.proven]
        same = [each for each in unproven if each.host == host]
        if len(same) >= UNPROVEN_MAX or len(self._all) >= most:
            oldest = same if len(same) >= UNPROVEN_MAX else unproven
            if not oldest:
                connection.close()
                self._warn(f"the last from {host}, as {most} others are in use")
                return
            self._hang_up(oldest[0])
            self._warn(f"the last from {oldest[0].host}, as others need its place")
        connection.setblocking(False)
        with suppress(OSError, AttributeError):  # only Linux has TCP_USER_TIMEOUT
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_SECONDS)
            )
        each = self._all[connection.fileno()] = _Connection(connection, host, time.monotonic())
        task = self._loop.create_task(self._serve(each))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, each: _Connection) -> None:
        try:
            each.transport, _ = await self._loop.connect_accepted_socket(self._make, each.socket)
        except OSError:  # the peer has closed already
            each.socket.close()

    def _open(self) -> list[_Connection]:
        """Return the open connections, oldest first, and forget closed ones."""
        self._all = {n: each for n, each in self._all.items() if each.socket.fileno() >= 0}
        return sorted(self._all.values(), key=lambda each: each.since)

    def _look(self) -> None:
        now = time.monotonic()
        for each in self._open():
            if not each.proven and now - each.since >= SILENT_SECONDS:
                self._hang_up(each)  # no warning: browsers open connections that they do not need
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _hang_up(self, each: _Connection) -> None:
        del self._all[each.socket.fileno()]
        if isinstance(each.transport, asyncio.Transport):
            each.transport.abort()
        else:
            with suppress(OSError):  # the transport, which is being made, will read the end
                each.socket.shutdown(socket.SHUT_RDWR)

    def _warn(self, why: str) -> None:
        self._closed.warn(why, time.monotonic())


def listening(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets, for all addresses of the host that can be bound.

    Raises:
        OSError: No address can be bound, or one of them is in use.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    failed: OSError | None = None
    for family, at in dict.fromkeys((family, at) for family, _, _, _, at in found):
        try:
            made = socket.create_server(at[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            failed = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            made.setblocking(False)
            bound.append(made)
    if failed is not None and (not bound or failed.errno == errno.EADDRINUSE):
        for each in bound:
            each.close()
        raise failed
    return bound
