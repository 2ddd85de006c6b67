"""CURVE on control connections: keys of sockets, who is let in (ZAP), and what refusals look like.

ZeroMQ asks for each newcomer, at an address of its context, whether its key may come in. Every
publisher has a context of its own, and so a list of its own. The question waits for an answer, and
is answered by the publisher's thread between other work: nobody else shares what it looks at.

A refusal carries no words. What a worker's socket tells of a connection that has failed is enough
for a good guess, which is what its user is told.
"""

import contextlib
import struct
from collections.abc import Callable

import zmq
from zmq.utils import z85

from ..errors import KeysError

DOMAIN = b"weightbus"
ASK_AT = "inproc://zeromq.zap.01"  # ZeroMQ RFC 27
QUESTIONS = 64  # answered before others have a turn
# Handshakes in a row without a word. A publisher that stops may cause one, and one to which many
# workers dial at once several: so they must have gone on for `lost_after` as well.
BROKEN = 3
COMMAND_BYTES = 33  # what CURVE adds to a frame: its command's name, a short nonce, a check of 16

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


def serve(s: "zmq.Socket[bytes]", secret: str) -> None:
    """Have a socket that will be bound take connections of allowed keys alone."""  # K1
    check_curve()
    s.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    s.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody to ask: nobody comes in
    s.setsockopt(zmq.CURVE_SERVER, 1)
    s.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())


def pin(s: "zmq.Socket[bytes]", public: str, secret: str, publisher: str) -> None:
    """Have a socket that will connect speak to the owner of this publisher's key alone."""  # K1
    check_curve()
    s.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
    s.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    s.setsockopt(zmq.CURVE_SERVERKEY, publisher.encode())


class Gate:
    """Answers ZeroMQ's questions of who may come in, in the thread that owns it.

    Args:
        asked: A REP socket of the context whose sockets ask.
        may_come: Says whether the owner of a public key may.
    """

    def __init__(self, asked: "zmq.Socket[bytes]", may_come: Callable[[str], bool]) -> None:
        self._asked, self._may_come = asked, may_come
        asked.setsockopt(zmq.LINGER, 0)
        asked.bind(ASK_AT)

    def fileno(self) -> int:
        """Return what tells that there may be questions; it tells once, so answer all of them."""
        return int(self._asked.get(zmq.FD))

    def answer(self) -> bool:
        """Answer what is asked; return whether more may be."""
        with contextlib.suppress(zmq.Again):
            for _ in range(QUESTIONS):
                _, question, domain, _, _, mechanism, *keys = self._asked.recv_multipart(
                    zmq.NOBLOCK
                )
                known = domain == DOMAIN and mechanism == b"CURVE" and len(keys) == 1
                key = z85.encode(keys[0]).decode() if known else ""
                let_in = known and self._may_come(key)
                status, user = (b"200", key.encode()) if let_in else (b"400", b"")  # K2
                self._asked.send_multipart([b"1.0", question, status, b"", user, b""], zmq.NOBLOCK)
            return True
        return False


def key_of(frame: zmq.Frame) -> str:
    """Return the public key of whoever sent a frame over CURVE; empty: it came without."""
    with contextlib.suppress(zmq.ZMQError):
        return str(frame.get("User-Id"))
    return ""


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
        self._broken_since = 0.0

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
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return _NOT_ALLOWED
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            mismatch = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            return (_NO_KEYS_THERE if self._keyed else _NO_KEYS_HERE) if mismatch else ""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken = 0
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or not self._keyed:
            return ""
        self._broken_since = self._broken_since if self._broken else now
        self._broken += 1
        lasting = now - self._broken_since >= patience
        return _ANOTHER_KEY if self._broken >= BROKEN and lasting else ""
