"""Counts received bytes on a worker's control connection that belong to no complete message.

libzmq limits the size of a frame, but not the number of frames of a message: it collects frames for
as long as more arrive. So the bytes received are compared with those of messages taken. A
connection is closed if its publisher sends more than was requested.

Only Linux counts received bytes, and only for TCP. Otherwise only the size of frames is limited.

libzmq reveals the descriptor of its connection. The number may have been reused for another socket
since. So each check duplicates the descriptor, and first verifies the peer of the duplicate.
"""

import os
import socket
import sys

from . import endpoints

RECEIVED = slice(128, 136)  # of Linux's `struct tcp_info`: tcpi_bytes_received (since 4.1)
SMALL_BYTES = 2**13  # libzmq reads at most this at once
LOOK_SECONDS = 0.1  # seconds between two checks
FORGIVEN_PER_SECOND = 64  # bytes that are never in a message: ZeroMQ's own pings
ALERT_SECONDS = 0.02  # seconds between two checks while many bytes are in no message


class Incoming:
    """Counts the bytes of one connection at a time.

    Bytes received before the first check are not counted: their messages may have been taken before
    the connection was known.

    Attributes:
        taken: Bytes of messages taken since the first check, including the heads of their frames.
        look_at: The time of the next check.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._peer, self._own = "", 0  # the peer's endpoint, and the local port
        self._came: int | None = None  # bytes received before the first check
        self.taken = 0.0
        self._looked_at = self.look_at = 0.0

    def follow(self, descriptor: int, peer: str) -> None:
        """Count the bytes of another connection, to the endpoint `peer`; -1: of no connection."""
        self._descriptor, self._peer, self._own = descriptor, peer, 0
        self._came, self.look_at = None, 0.0

    def look(self, now: float) -> int:
        """Return the number of received bytes that are in no message yet; 0 if unknown."""
        came, unseen, began = self._count(), 0, self._came is None
        if came is None or self._came is None:
            self._came, self.taken = came, 0.0
        else:
            self.taken += FORGIVEN_PER_SECOND * (now - self._looked_at)
            self.taken = min(self.taken, came - self._came)
            unseen = int(came - self._came - self.taken)
        self._looked_at = now
        alert = unseen > SMALL_BYTES or (came is not None and began)
        self.look_at = now + (ALERT_SECONDS if alert else LOOK_SECONDS)
        return unseen

    def _count(self) -> int | None:
        """Return the number of bytes received; None if unknown."""
        tcp = hasattr(socket, "TCP_INFO") and endpoints.ipc_path(self._peer) is None
        if self._descriptor < 0 or not tcp:
            return None
        try:
            with socket.socket(fileno=os.dup(self._descriptor)) as connection:
                if not self._is_ours(connection):
                    return None
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.stop)
        except OSError:  # the connection is closed
            return None
        return int.from_bytes(info[RECEIVED], sys.byteorder)

    def _is_ours(self, connection: socket.socket) -> bool:
        peer, own = connection.getpeername(), connection.getsockname()
        if not isinstance(peer, tuple) or peer[1] != endpoints.host_and_port(self._peer)[1]:
            return False
        self._own = self._own or own[1]
        return bool(own[1] == self._own)
