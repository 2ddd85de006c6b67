"""Accepts the HTTP connections of a page, and limits the number of connections without access.

A connection takes a descriptor of the publisher's process, and a page's port may be open to hosts
that have no access. So a connection is *unproven* until it has sent a request that has access. An
unproven connection is closed after `SILENT_SECONDS`. If a new connection needs room, the oldest
unproven connection is closed earlier. So a flood of silent connections does not lock out clients
with access. asyncio's server is not used: it accepts without a limit, and if there are no free
descriptors, it logs a traceback 128 times a second.
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

# Connections may take 1 / `SHARE` of the process's descriptors, since workers need the others, but
# at most `CONNECTIONS_MAX`: 32 browsers (`STREAMS_MAX`) with a few connections each.
CONNECTIONS_MAX, SHARE = 128, 8
UNPROVEN_MAX = 16  # unproven connections of one host: a browser opens six, which soon have access
SILENT_SECONDS = 5.0  # seconds until the first request with access
IDLE_SECONDS = 30.0  # seconds between two requests; Prometheus sends one every 15 s
UNREAD_SECONDS = 30.0  # seconds until the kernel closes a connection that acknowledges no bytes
BACKLOG = 128  # connections that the kernel queues until they are accepted
ACCEPTS = 16  # connections accepted in a row, before other events are processed
PAUSE_SECONDS = 1.0  # seconds between two attempts to accept, if descriptors or memory are lacking
CHECK_SECONDS = 0.5  # seconds between two checks for silent connections
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class _Connection:
    """An accepted connection."""

    socket: socket.socket
    host: str  # the peer's IP address
    since: float  # when the connection was accepted, in seconds on the monotonic clock
    proven: bool = False  # whether a request on the connection had access
    transport: asyncio.BaseTransport | None = None


class Connections:
    """Accepts connections, and closes silent and surplus ones.

    Create and use an instance only in the thread of its event loop.

    Args:
        listeners: The listening sockets.
        make: Returns a new protocol object for a connection.
        where: The address of the page, for the log.
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
        self._close_silent()

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
                # Stop for a while: otherwise the loop would call `_accept` again at once.
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_SECONDS, self._resume, listener)
                self._warn(f"{error.strerror}; {RAISE}")
                return
            self._add(connection, str(peer[0]))

    def _add(self, connection: socket.socket, host: str) -> None:
        # Serve a new connection, if there is room; for room, close an older unproven connection.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if nearly_exhausted(connection.fileno()):
            connection.close()
            text = f"its process keeps the last of its {limit:,} descriptors: {RAISE}"
            self._warn(f"the last from {host}, as {text}")
            return
        capacity = min(CONNECTIONS_MAX, max(1, limit // SHARE)) if limit > 0 else CONNECTIONS_MAX
        unproven = [each for each in self._open() if not each.proven]
        same_host = [each for each in unproven if each.host == host]
        if len(same_host) >= UNPROVEN_MAX or len(self._all) >= capacity:
            candidates = same_host if len(same_host) >= UNPROVEN_MAX else unproven
            if not candidates:
                connection.close()
                self._warn(f"the last from {host}, as {capacity} others are in use")
                return
            self._hang_up(candidates[0])
            self._warn(f"the last from {candidates[0].host}, to make room for a new one")
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

    def _close_silent(self) -> None:
        now = time.monotonic()
        for each in self._open():
            if not each.proven and now - each.since >= SILENT_SECONDS:
                self._hang_up(each)  # no warning: browsers open connections that they do not need
        self._timer = self._loop.call_later(CHECK_SECONDS, self._close_silent)

    def _hang_up(self, each: _Connection) -> None:
        del self._all[each.socket.fileno()]
        if isinstance(each.transport, asyncio.Transport):
            each.transport.abort()
        else:
            with suppress(OSError):  # the transport is being created, and will read the end
                each.socket.shutdown(socket.SHUT_RDWR)

    def _warn(self, why: str) -> None:
        self._closed.warn(why, time.monotonic())


def listening(host: str, port: int) -> list[socket.socket]:
    """Return one listening socket for each address of the host that can be bound.

    Raises:
        OSError: No address can be bound, or one of them is in use.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    failed: OSError | None = None
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        try:
            listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            failed = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            listener.setblocking(False)
            bound.append(listener)
    if failed is not None and (not bound or failed.errno == errno.EADDRINUSE):
        for each in bound:
            each.close()
        raise failed
    return bound
