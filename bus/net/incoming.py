"""Counts received bytes on a worker's control connection that belong to no complete message.

libzmq limits the size of a frame, but not the number of frames of a message: it collects frames for
as long as more arrive. So this module compares the bytes that the kernel has received with the
bytes of the messages that libzmq has delivered. If a publisher sends more than was requested, the
worker closes the connection.

Only Linux counts received bytes, and only for TCP. Elsewhere, only the size of frames is limited.

libzmq reveals the descriptor of its connection. But libzmq may have closed the descriptor since,
and the same number may now belong to another socket. So each check duplicates the descriptor, and
verifies the peer of the duplicate before it reads the count.
"""

import os
import socket
import sys

from . import endpoints

RECEIVED = slice(128, 136)  # of Linux's `struct tcp_info`: tcpi_bytes_received (since 4.1)
SMALL_BYTES = 2**13  # libzmq reads at most this at once
CHECK_SECONDS = 0.1  # seconds between two checks
PING_BYTES_PER_SECOND = 64  # allowed for bytes that are never in a message: ZeroMQ's own pings
ALERT_SECONDS = 0.02  # seconds between two checks while many bytes are in no message


class Incoming:
    """Counts the bytes of one connection at a time.

    Bytes received before the first check are not counted: their messages may have been delivered
    before the descriptor of the connection was known.

    Attributes:
        in_messages: Bytes of the messages delivered since the first check, with the heads of their
            frames, and the allowance for pings.
        check_at: The time of the next check.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._peer, self._local_port = "", 0  # the peer's endpoint, and the local port
        self._before: int | None = None  # bytes received before the first check
        self.in_messages = 0.0
        self._checked_at = self.check_at = 0.0

    def follow(self, descriptor: int, peer: str) -> None:
        """Count the bytes of another connection, to the endpoint `peer`; -1: of no connection."""
        self._descriptor, self._peer, self._local_port = descriptor, peer, 0
        self._before, self.check_at = None, 0.0

    def check(self, now: float) -> int:
        """Return the number of received bytes that are in no message yet; 0 if unknown."""
        received, pending, first = self._received(), 0, self._before is None
        if received is None or self._before is None:
            self._before, self.in_messages = received, 0.0
        else:
            self.in_messages += PING_BYTES_PER_SECOND * (now - self._checked_at)
            self.in_messages = min(self.in_messages, received - self._before)
            pending = int(received - self._before - self.in_messages)
        self._checked_at = now
        alert = pending > SMALL_BYTES or (received is not None and first)
        self.check_at = now + (ALERT_SECONDS if alert else CHECK_SECONDS)
        return pending

    def _received(self) -> int | None:
        """Return how many bytes the connection has received; None if unknown."""
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
        self._local_port = self._local_port or own[1]
        return bool(own[1] == self._local_port)
