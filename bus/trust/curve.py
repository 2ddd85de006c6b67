"""Sets up CURVE on a worker's control connection, and finds out why a handshake failed.

CURVE is ZeroMQ's encryption with a key pair on each side. A publisher that refuses a handshake
sends a status but no text. So this module guesses the reason from the events of the worker's
socket. The publisher's side is in `curve_server.py`.
"""

import contextlib
import struct
from typing import NamedTuple

import zmq
from zmq.utils import z85

from ..errors import KeysError

# This many consecutive handshakes that ended without a status are reported, if they also lasted
# `lost_after` seconds: a publisher that stops may cause one, and one with many new workers several.
BROKEN = 3
OVERLOADED = 300  # status of a handshake rejected for lack of room (RFC 27: temporary failure)

CHANGES = (  # the events that are read; after a ZMTP error, only EVENT_DISCONNECTED comes
    zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
_NOT_ALLOWED = (
    "the publisher does not allow this worker's key: add the file allowed/NAME.json that "
    "`weightbus keygen` made for it to the publisher's folder of keys"
)
_ANOTHER_KEY = (
    "the other side closes the connection in the handshake: most likely the publisher has another "
    "key than the one that this worker's file names, or speaks without keys; or a proxy answers in "
    "its place"
)
_OVERLOADED = (
    "the publisher has so many unfinished connections that it drops some, this worker's among "
    "them: others flood it, or it has too little time; this worker goes on trying"
)
_NO_KEYS_THERE = (
    "the publisher speaks without keys, and this worker has some, which it does not give up: "
    "start the publisher with keys=, or the worker without"
)
_NO_KEYS_HERE = (
    "the publisher asks for keys, and this worker has none: give it keys=, a file that "
    "`weightbus keygen` makes"
)


def check_curve() -> None:
    """Check that this build of ZeroMQ supports CURVE.

    Raises:
        KeysError: This build does not support CURVE.
    """
    if not zmq.has("curve"):
        raise KeysError(
            f"keys need CURVE, which this libzmq ({zmq.zmq_version()}) was built without: install "
            "pyzmq from a wheel, or a libzmq with libsodium"
        )


def keypair() -> tuple[str, str]:
    """Return a new pair of a public and a secret key, 40 characters of Z85 each."""
    check_curve()
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def is_key(text: str) -> bool:
    """True if `text`, 40 characters of Z85, is a key: no group of five exceeds 32 bits."""
    try:
        z85.decode(text)
    except struct.error:
        return False
    return True


def public_of(secret: str) -> str:
    """Return the public key that belongs to a secret key; both are 40 characters of Z85."""
    check_curve()
    return zmq.curve_public(secret.encode()).decode()


def pin(s: "zmq.Socket[bytes]", public: str, secret: str, publisher: str) -> None:
    """Set a socket's key pair, and the public key whose owner the publisher must be."""  # K1
    check_curve()
    s.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
    s.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    s.setsockopt(zmq.CURVE_SERVERKEY, publisher.encode())


class Changes(NamedTuple):
    """What happened to a connection since the last `ConnectionEvents.read`.

    Attributes:
        changed: Whether there was an event.
        refused: Why a handshake failed; empty if none failed, or if keys were not the reason.
        closed: Whether the connection closed or could not be opened.
    """

    changed: bool
    refused: str
    closed: bool


class _Handshakes:
    """Consecutive handshakes with one endpoint that ended without a status."""

    def __init__(self) -> None:
        self.count, self.since, self.overloaded = 0, 0.0, False


class ConnectionEvents:
    """Reads the events of a connecting socket, and finds out why a handshake failed.

    Args:
        monitor: The socket's monitor socket, which reports the events `CHANGES`.
        keyed: Whether the socket was given keys.

    Attributes:
        descriptor: The file descriptor of the connection; -1: there is none now.
        connections: The number of connections so far, which distinguishes two connections with the
            same descriptor.
    """

    def __init__(self, monitor: "zmq.Socket[bytes]", *, keyed: bool) -> None:
        self._monitor, self._keyed = monitor, keyed
        self.descriptor, self.connections = -1, 0
        self._handshakes: dict[bytes, _Handshakes] = {}  # by endpoint
        self._left: bytes | None = None

    def leave(self, endpoint: str) -> None:
        """Ignore events of this endpoint until the next `dial` to it."""
        self._left, self.descriptor = endpoint.encode(), -1

    def dial(self, endpoint: str) -> None:
        """Read events of this endpoint again."""
        if self._left == endpoint.encode():
            self._left = None

    def read(self, now: float, patience: float) -> Changes:
        """Return what happened since the last call.

        Handshakes that end without a status are reported once they have gone on for `patience`
        seconds. Call this often, since ZeroMQ blocks while a thousand events are queued.
        """
        changed, refused, closed = False, "", False
        with contextlib.suppress(zmq.Again):
            while True:
                about, endpoint = self._monitor.recv_multipart(zmq.NOBLOCK)
                if endpoint == self._left:
                    continue
                event, value = struct.unpack("=HI", about)
                shakes = self._handshakes.setdefault(endpoint, _Handshakes())
                changed = True
                refused = self._why(event, value, shakes, now, patience) or refused
                closed = closed or event in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_DISCONNECTED)
        return Changes(changed, refused, closed)

    def _why(self, event: int, value: int, shakes: _Handshakes, now: float, patience: float) -> str:
        """Return why a handshake failed; empty unless keys are the reason."""  # K5
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
            self.descriptor = value if event == zmq.EVENT_CONNECTED else -1
            self.connections += event == zmq.EVENT_CONNECTED
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value != OVERLOADED:
            return _NOT_ALLOWED
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            return (_NO_KEYS_THERE if self._keyed else _NO_KEYS_HERE) if mismatch else ""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            shakes.count = 0
        overloaded = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if not (overloaded or event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) or not self._keyed:
            return ""
        shakes.since = shakes.since if shakes.count else now
        shakes.count += 1
        shakes.overloaded = overloaded or (shakes.overloaded and shakes.count > 1)
        if shakes.count < BROKEN or now - shakes.since < patience:
            return ""
        return _OVERLOADED if shakes.overloaded else _ANOTHER_KEY
