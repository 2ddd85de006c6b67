"""What comes on a worker's control connection, as the kernel counts it, and is in no message yet.

libzmq bounds a frame, but not the frames of a message: it collects them for as long as more come.
So the bytes that have come are held against those of the messages that were taken, and a publisher
that sends more than it was asked for is hung up on.

Linux alone counts them, and for TCP alone. Over ipc, and on other systems, frames alone are
bounded.

libzmq names the descriptor of its connection, which may be another connection's by now. So each
look is at a duplicate, and first at whose that is.
"""

import os
import socket
import sys

from . import endpoints

RECEIVED = slice(128, 136)  # of Linux's `struct tcp_info`: tcpi_bytes_received (since 4.1)
SMALL_BYTES = 2**13  # libzmq reads so much at once
LOOK_SECONDS = 0.1  # between two looks: in each a flood brings some 40 MB over loopback
FORGIVEN_PER_SECOND = 64  # bytes that never are in a message: pings of ZeroMQ's own
ALERT_SECONDS = 0.02  # the same while more than a little is in no message


class Incoming:
    """The bytes of one connection at a time.

    What came before the first look is not counted: messages of it may have been taken before the
    connection was known.

    Attributes:
        taken: Bytes of the messages since that were taken, with the heads of their frames.
        look_at: When the next look is due.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._peer, self._own = "", 0  # the other side's endpoint, and this side's port
        self._came: int | None = None  # by the first look
        self.taken = 0.0
        self._looked_at = self.look_at = 0.0

    def follow(self, descriptor: int, peer: str) -> None:
        """Look at another connection, to this endpoint; -1: at none."""
        self._descriptor, self._peer, self._own = descriptor, peer, 0
        self._came, self.look_at = None, 0.0

    def look(self, now: float) -> int:
        """Return how many bytes are in no message; 0 where nothing is known."""
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
        """Return how many bytes have come; None if that is not known."""
        tcp = hasattr(socket, "TCP_INFO") and endpoints.ipc_path(self._peer) is None
        if self._descriptor < 0 or not tcp:
            return None
        try:
            with socket.socket(fileno=os.dup(self._descriptor)) as connection:
                if not self._is_ours(connection):
                    return None
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.stop)
        except OSError:  # it is closed
            return None
        return int.from_bytes(told[RECEIVED], sys.byteorder)

    def _is_ours(self, connection: socket.socket) -> bool:
        peer, own = connection.getpeername(), connection.getsockname()
        if not isinstance(peer, tuple) or peer[1] != endpoints.host_and_port(self._peer)[1]:
            return False
        self._own = self._own or own[1]
        return bool(own[1] == self._own)
