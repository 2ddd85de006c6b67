"""CURVE on a worker's control connection: keys, and what a refusal looks like.

A refusal has no words, but a status. What a worker's socket reports of a connection that has failed
is enough for a good guess, which is what its user reads. The publisher's side is in
`curve_server.py`.
"""

import contextlib
import struct

import zmq
from zmq.utils import z85

from ..errors import KeysError

# Handshakes in a row without a word. A publisher that stops may cause one, and one to which many
# workers dial at once several: so they must have gone on for `lost_after` as well.
BROKEN = 3
CROWDED = 300  # the status that a publisher reports for want of room (RFC 27: try again later)

CHANGES = (  # of a connection. After an error of ZMTP the last one comes, and then none any more
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
    "the other side hangs up in the handshake: most likely the publisher has another key than the "
    "one that this worker's file names, or speaks without keys; or a proxy answers in its place"
)
_CROWDED = (
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
    """Check that this build of ZeroMQ speaks CURVE.

    Raises:
        KeysError: It does not.
    """
    if not zmq.has("curve"):
        raise KeysError(
            f"keys need CURVE, which this libzmq ({zmq.zmq_version()}) was built without: install "
            "pyzmq from a wheel, or a libzmq with libsodium"
        )


def keypair() -> tuple[str, str]:
    """Draw a new pair: public and secret key, as 40 characters of Z85 each."""
    check_curve()
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def is_key(text: str) -> bool:
    """Return whether 40 characters of Z85 are a key: five of them may stand for too much."""
    try:
        z85.decode(text)
    except struct.error:
        return False
    return True


def public_of(secret: str) -> str:
    check_curve()
    return zmq.curve_public(secret.encode()).decode()


def pin(s: "zmq.Socket[bytes]", public: str, secret: str, publisher: str) -> None:
    """Have a socket that will connect speak to the owner of this publisher's key alone."""  # K1
    check_curve()
    s.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
    s.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    s.setsockopt(zmq.CURVE_SERVERKEY, publisher.encode())


class Changes:
    """What becomes of the connection of a socket that connects.

    Args:
        told: Its monitor, of the events `CHANGES`.
        keyed: Whether it has keys.

    Attributes:
        descriptor: Of its last connection, as far as that was read; -1: it has ended.
        connections: How many it has had: the number of a descriptor may be that of the one before.
    """

    def __init__(self, told: "zmq.Socket[bytes]", *, keyed: bool) -> None:
        self._told, self._keyed = told, keyed
        self.descriptor, self.connections = -1, 0
        self._broken = 0  # handshakes in a row that have ended without a word
        self._broken_since, self._crowded = 0.0, False

    def read(self, now: float, patience: float) -> tuple[bool, str]:
        """Return whether anything became of it since this was asked last; and why it failed.

        That handshakes end without a word is a reason once it has gone on for `patience` seconds.

        Ask often: ZeroMQ stands still while a thousand changes wait here.
        """
        changed, refused = False, ""
        with contextlib.suppress(zmq.Again):
            while True:
                event, value = struct.unpack("=HI", self._told.recv_multipart(zmq.NOBLOCK)[0])
                changed, refused = True, self._why(event, value, now, patience) or refused
        return changed, refused

    def _why(self, event: int, value: int, now: float, patience: float) -> str:
        """Say why a handshake has failed, if that is a matter of keys."""  # K5
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
            self.descriptor = value if event == zmq.EVENT_CONNECTED else -1
            self.connections += event == zmq.EVENT_CONNECTED
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value != CROWDED:
            return _NOT_ALLOWED
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            return (_NO_KEYS_THERE if self._keyed else _NO_KEYS_HERE) if mismatch else ""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken = 0
        crowded = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if not (crowded or event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) or not self._keyed:
            return ""
        self._broken_since = self._broken_since if self._broken else now
        self._broken += 1
        self._crowded = crowded or (self._crowded and self._broken > 1)
        if self._broken < BROKEN or now - self._broken_since < patience:
            return ""
        return _CROWDED if self._crowded else _ANOTHER_KEY
