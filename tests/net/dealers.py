"""Peers of a publisher's control socket, made of plain sockets: a test decides what they send."""

import contextlib
import os
import socket
import time

from nacl import bindings
from zmq.utils import z85

from weightbus.bus.net.endpoints import host_and_port, ipc_path
from weightbus.bus.net.publisher_sockets import PublisherSockets
from weightbus.bus.net.zmtp import COMMAND, GREETING, head_of

SECONDS = 30.0
METADATA = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
CURVE_GREETING = GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame of ZMTP."""
    return head_of(len(body), flags) + body


READY = frame(b"\x05READY" + METADATA, COMMAND)
PING = frame(b"\x04PING\0\0" + b"a" * 16, COMMAND)


def dialled(endpoint: str, source: str = "") -> socket.socket:
    """Return a connection; over TCP, `source` is this host's address for it, if not empty."""
    path = ipc_path(endpoint)
    if path is None:
        return socket.create_connection(
            host_and_port(endpoint), SECONDS, source_address=(source, 0) if source else None
        )
    found = socket.socket(socket.AF_UNIX)
    found.connect(path)
    found.settimeout(SECONDS)
    return found


def read_until(sockets: PublisherSockets, connection: socket.socket, word: bytes) -> bytes:
    """Let the publisher run until it has sent `word`; return all bytes that it has sent."""
    heard, deadline = b"", time.monotonic() + SECONDS
    connection.setblocking(False)
    while word not in heard:
        assert time.monotonic() < deadline, f"{word!r} did not come, but {heard[-100:]!r}"
        sockets.poll(0.01)
        assert sockets.receive() is None
        with contextlib.suppress(BlockingIOError):
            more = connection.recv(2**20)
            assert more, f"hung up before {word!r} came"
            heard += more
    connection.settimeout(SECONDS)
    return heard


def joined(
    sockets: PublisherSockets, source: str = "", metadata: bytes = METADATA
) -> socket.socket:
    """Return a connection whose handshake is complete, without keys."""
    found = dialled(sockets.address, source)
    found.sendall(GREETING + frame(b"\x05READY" + metadata, COMMAND))
    read_until(sockets, found, b"READY")
    return found


def received(sockets: PublisherSockets) -> tuple[bytes, list[bytes]]:
    """Let the publisher run until a message arrives; return its sender and its frames."""
    deadline = time.monotonic() + SECONDS
    while (found := sockets.receive()) is None:
        assert time.monotonic() < deadline, "nothing came"
        sockets.poll(0.1)
    return found[0], [bytes(each) for each in found[1]]


def is_closed(connection: socket.socket) -> bool:
    """Read the bytes that are here; return whether the other side has closed the connection."""
    connection.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            while connection.recv(2**16):
                pass
            return True
    except OSError:
        return True
    return False


def wait_until_closed(
    sockets: PublisherSockets, connection: socket.socket, send: bytes = b""
) -> None:
    """Let the publisher run until it closes a connection, which sends `send` meanwhile."""
    deadline = time.monotonic() + SECONDS
    while not is_closed(connection):
        assert time.monotonic() < deadline, "it was not hung up on"
        with contextlib.suppress(OSError):
            connection.send(send)
        sockets.poll(0.001)
        assert sockets.receive() is None, "nothing of it is a message"


class CurveDealer:
    """The client's side of CURVE (ZeroMQ RFC 26), step by step.

    Args:
        public, secret: The client's keys, as 40 characters of Z85.
        server: The publisher's public key.
    """

    def __init__(self, public: str, secret: str, server: str) -> None:
        self._public, self._secret = z85.decode(public), z85.decode(secret)
        self._server = z85.decode(server)
        self._own, self._own_secret = bindings.crypto_box_keypair()
        self._shared = bindings.crypto_box_beforenm(self._server, self._own_secret)
        self._sent = 0

    def hello(self) -> bytes:
        """Return the first command."""
        box = self._numbered(b"CurveZMQHELLO---", bytes(64))
        return b"\x05HELLO\x01\x00" + bytes(72) + self._own + box

    def initiate(self, welcome: bytes, vouched_for: bytes = b"") -> bytes:
        """Return the answer to a WELCOME; the vouch may be for another connection."""
        nonce = b"WELCOME-" + welcome[8:24]
        plain = bindings.crypto_box_open_easy_afternm(welcome[24:], nonce, self._shared)
        theirs, cookie = plain[:32], plain[32:]
        shared = bindings.crypto_box_beforenm(theirs, self._secret)
        chance = os.urandom(16)
        subject = (vouched_for or self._own) + self._server
        vouch = chance + bindings.crypto_box_easy_afternm(subject, b"VOUCH---" + chance, shared)
        self._shared = bindings.crypto_box_beforenm(theirs, self._own_secret)
        box = self._numbered(b"CurveZMQINITIATE", self._public + vouch + METADATA)
        return b"\x08INITIATE" + cookie + box

    def message(self, body: bytes, flags: int = 0) -> bytes:
        """Return the body of the frame that carries a frame."""
        return b"\x07MESSAGE" + self._numbered(b"CurveZMQMESSAGEC", bytes([flags]) + body)

    def _numbered(self, prefix: bytes, plain: bytes) -> bytes:
        self._sent += 1
        number = self._sent.to_bytes(8, "big")
        return number + bindings.crypto_box_easy_afternm(plain, prefix + number, self._shared)
