"""A TCP connection between a publisher and each worker: one byte to start, one byte when done.

It is for systems that move bytes but have no acknowledgements. A plain connection adds almost
nothing to the measured time.
"""

import socket
from typing import Self

from .fleet import START_SECONDS

ANSWER_SECONDS = 120.0
BYTE = b"!"


class Lines:
    """The publisher's ends. Workers connect to `port`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(START_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []

    def accept(self, workers: int) -> None:
        """Wait until all workers have connected."""
        for _ in range(workers):
            connection = self._listener.accept()[0]
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(ANSWER_SECONDS)
            self.connections.append(connection)

    def go(self) -> None:
        """Make every worker start."""
        for connection in self.connections:
            connection.sendall(BYTE)

    def wait(self) -> None:
        """Wait until every worker has reported that it is done."""
        for connection in self.connections:
            if connection.recv(1) != BYTE:
                raise ConnectionError("a worker has closed its connection")

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()
        for connection in self.connections:
            connection.close()


class Line:
    """A worker's end."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def wait(self) -> bool:
        """Wait for the start; return False if the publisher has closed the connection."""
        return bool(self.connection.recv(1))

    def done(self) -> None:
        """Report that this worker is done."""
        self.connection.sendall(BYTE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
