"""A tunnel to an address, which records bytes and can be slow, damage bytes, or break."""

import contextlib
import math
import socket
import threading
from collections.abc import Callable

from weightbus.bus.net.endpoints import host_and_port


class Tunnel:
    """Accepts connections and forwards their bytes until `cut`, which discards later bytes.

    `sever` ends all existing connections, at both ends.

    Args:
        bytes_per_second: The speed of the tunnel.

    Attributes:
        heard: The bytes that came from the connecting peers.
        told: The bytes that were sent to these peers.
        spoil: How many large pieces are damaged on their way.
    """

    def __init__(self, bytes_per_second: float = math.inf) -> None:
        self._speed = bytes_per_second
        self.heard, self.told, self.spoil = bytearray(), bytearray(), 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._server.getsockname())
        self._target = ("", 0)
        self._ends: list[socket.socket] = [self._server]
        self._dead = threading.Event()  # set: the existing connections discard bytes
        self._threads: list[threading.Thread] = []

    def lead_to(self, address: str) -> None:
        self._target = host_and_port(address)
        self._begin(self._accept)

    def cut(self) -> None:
        self._dead.set()
        self._dead = threading.Event()

    def sever(self) -> None:
        for end in self._ends[1:]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(30.0)

    def _begin(self, job: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=job, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, _ = self._server.accept()
                self._ends.append(here)
                there = socket.create_connection(self._target)
                self._ends.append(there)
                self._begin(self._forward, here, there, self._dead, self.heard)
                self._begin(self._forward, there, here, self._dead, self.told)

    def _forward(
        self, from_: socket.socket, to: socket.socket, dead: threading.Event, noted: bytearray
    ) -> None:
        with contextlib.suppress(OSError):  # reset, as by a process that is killed
            while data := bytearray(from_.recv(65536)):
                noted += data
                if self.spoil and len(data) > 2**15:  # in the midst of a chunk
                    self.spoil -= 1
                    data[len(data) // 2] ^= 16
                if not dead.is_set():
                    to.sendall(data)
                    dead.wait(len(data) / self._speed)
        with contextlib.suppress(OSError):
            if not dead.is_set():
                to.shutdown(socket.SHUT_WR)
