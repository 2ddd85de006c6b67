"""A publisher without keys, made of plain sockets: a test decides what it sends."""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weightbus.bus.headers import encode
from weightbus.bus.messages import Pong, Refuse, Welcome
from weightbus.bus.net.zmtp import COMMAND, GREETING, LONG, MORE
from weightbus.bus.structs import Message

SECONDS = 60.0  # far more than any step here takes
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


def message(*frames: bytes) -> bytes:
    return b"".join(frame(f, MORE * (i < len(frames) - 1)) for i, f in enumerate(frames))


class Hostile:
    """The listening publisher; `accept` returns the next worker's connection.

    Args:
        path: The path of an `ipc` address; None: TCP.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen()
            self.address = f"ipc://{path}"
        self._listener.settimeout(SECONDS)

    def accept(self) -> "Link":
        """Return a connection whose handshake is complete."""
        made, _ = self._listener.accept()
        made.settimeout(SECONDS)
        made.sendall(GREETING + frame(READY, COMMAND))
        return Link(made)

    def close(self) -> None:
        self._listener.close()


class Link:
    """One control connection of a worker."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._heard = self._unsent = b""
        self._read(len(GREETING))
        self._frame()  # READY

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _read(self, count: int) -> bytes:
        while len(self._heard) < count:
            if not (more := self.socket.recv(2**16)):
                raise ConnectionResetError("the worker has hung up")
            self._heard += more
        found, self._heard = self._heard[:count], self._heard[count:]
        return found

    def _frame(self) -> tuple[int, bytes]:
        flags = self._read(1)[0]
        size = struct.unpack(">Q", self._read(8))[0] if flags & LONG else self._read(1)[0]
        return flags, self._read(size)

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages as they arrive; answer its pings."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            flags, body = self._frame()
            if not flags & COMMAND:
                said = json.loads(body)
                if said["type"] == "ping":
                    self.send(Pong(token=said["token"], epoch=7))
                yield said

    def wait_for(self, kind: str) -> dict[str, Any]:
        """Return the next message of a type."""
        for said in self.heard():
            if said["type"] == kind:
                return said
        raise TimeoutError(f"the worker says no {kind}")

    def send(self, header: Message, payloads: Sequence[bytes] = ()) -> None:
        self.socket.sendall(message(encode(header), *payloads))

    def welcome(self, data: str = "tcp://*:1", models: dict[str, int] | None = None) -> None:
        """Send a welcome after the worker's hello."""
        self.send(Refuse(code="unknown-worker", text="say hello"))  # it may be in a session
        self.wait_for("hello")
        self.send(Welcome(epoch=7, data=data, ping_ms=50, lost_ms=5000, models=models or {}))

    def flood(self, data: bytes) -> bool:
        """Send `data` repeatedly, as far as possible; return whether the worker has hung up."""
        self.socket.setblocking(False)
        try:
            for _ in range(64):
                self._unsent = self._unsent or data
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            with contextlib.suppress(BlockingIOError):
                return not self.socket.recv(2**16)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False
