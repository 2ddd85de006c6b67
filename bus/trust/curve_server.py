"""Implements the publisher's side of CURVE on one control connection (RFC 26), without sockets.

C and S are the permanent key pairs of the worker and the publisher, C' and S' are their key pairs
for this connection. A box (from->to) is what one key pair encrypts and authenticates for another:

    HELLO      C'; box of zeros (C'->S), which proves that the worker knows S
    WELCOME    box of S' and a cookie (S->C')
    INITIATE   the cookie; box of C, a vouch for C' (box of C' and S, C->S') and metadata (C'->S')
    READY      box of metadata (S'->C'), or ERROR if C is not allowed
    MESSAGE    box of flags and a frame (C'->S' or S'->C')

Each side numbers its boxes, and rejects a box whose number is not above the last one received. In
the RFC the cookie keeps the server stateless until INITIATE. Here the connection has state, and the
cookie is random.

libsodium does the cryptography, through PyNaCl.
"""

import hmac
import os
from collections.abc import Callable
from typing import Any

from zmq.utils import z85

from ..errors import KeysError
from ..headers import Buffer

NOT_ALLOWED = b"\x05ERROR\x03400"  # ZAP's (RFC 27) status of a key that is not allowed
OVERLOADED = b"\x05ERROR\x03300"  # ZAP's status of a temporary failure
COMMAND_BYTES = 33  # overhead of CURVE per frame: command name, flags, short nonce, 16 for the tag
_HELLO, _INITIATE, _MESSAGE = 200, 257, 33  # least bytes of each command, including its name
_COOKIE = 96
_INNER_MORE, _INNER_COMMAND = 1, 2  # flags in a MESSAGE's box


class CurveError(Exception):
    """The worker does not use CURVE, has no allowed key, or sent a damaged or repeated box.

    Attributes:
        reply: A command to send to the worker before the connection is closed, if any.
    """

    def __init__(self, text: str, reply: bytes = b"") -> None:
        super().__init__(text)
        self.reply = reply


def _sodium() -> Any:
    """Return PyNaCl's bindings of libsodium; raise KeysError if PyNaCl is not installed."""
    try:
        from nacl import bindings
    except ImportError:
        raise KeysError(
            "a publisher with keys needs the package pynacl, which is not installed: pip install "
            "'weightbus[keys]'"
        ) from None
    return bindings


class CurveServer:
    """The publisher's key pair and its check of workers' keys, shared by all connections.

    Args:
        secret: The publisher's secret key, as 40 characters of Z85.
        may_connect: Returns whether the owner of a public key (Z85) may connect.

    Raises:
        KeysError: PyNaCl is not installed.
    """

    def __init__(self, secret: str, may_connect: Callable[[str], bool]) -> None:
        self.sodium, self.may_connect = _sodium(), may_connect
        self.secret = z85.decode(secret)
        self.public: bytes = self.sodium.crypto_scalarmult_base(self.secret)


class CurveConnection:
    """The CURVE state of one connection.

    Args:
        server: The keys of the publisher.

    Attributes:
        key: The worker's public key, as 40 characters of Z85; empty until it is verified.
    """

    def __init__(self, server: CurveServer) -> None:
        self._server, self._sodium = server, server.sodium
        self.key = ""
        self._peer_key = b""  # the public key of C'
        self._secret = self._cookie = b""  # the secret key of S', and the cookie
        self._shared = b""  # the shared secret of C' and S; after INITIATE, of C' and S'
        self._last_received = self._last_sent = 0

    def answer(self, command: bytes, metadata: bytes) -> tuple[bytes, bytes | None]:
        """Return the reply to a command of the handshake.

        The second result is the worker's metadata once the handshake is complete, else None.

        Raises:
            CurveError: The handshake has failed.
        """
        if command.startswith(b"\x05HELLO") and not self._peer_key:
            return self._welcome(command), None
        if command.startswith(b"\x08INITIATE") and self._cookie:
            return self._ready(command, metadata)
        raise CurveError("a command out of order in the handshake")

    def _welcome(self, hello: bytes) -> bytes:
        # Return the command WELCOME, the reply to HELLO.
        if len(hello) != _HELLO or hello[6] != 1:
            raise CurveError("a malformed HELLO")
        self._peer_key = hello[80:112]
        self._shared = self._agree(self._peer_key, self._server.secret)
        self._open(b"CurveZMQHELLO---", hello[112:])
        ours, self._secret = self._sodium.crypto_box_keypair()
        self._cookie, nonce = os.urandom(_COOKIE), os.urandom(16)
        box = self._box(ours + self._cookie, b"WELCOME-" + nonce, self._shared)
        return b"\x07WELCOME" + nonce + box

    def _ready(self, initiate: bytes, metadata: bytes) -> tuple[bytes, bytes]:
        # Return the command READY, the reply to INITIATE, and the worker's metadata.
        if len(initiate) < _INITIATE:
            raise CurveError("a malformed INITIATE")
        if not hmac.compare_digest(initiate[9 : 9 + _COOKIE], self._cookie):
            raise CurveError("an INITIATE with another connection's cookie")
        self._shared, self._cookie = self._agree(self._peer_key, self._secret), b""
        plain = self._open(b"CurveZMQINITIATE", initiate[9 + _COOKIE :])
        theirs, nonce, vouch = plain[:32], plain[32:48], plain[48:128]
        vouched = self._unbox(vouch, b"VOUCH---" + nonce, self._agree(theirs, self._secret))
        if not hmac.compare_digest(vouched, self._peer_key + self._server.public):
            raise CurveError("an INITIATE with another connection's vouch")
        key = z85.encode(theirs).decode()
        if not self._server.may_connect(key):
            raise CurveError(f"the key {key} is not allowed", NOT_ALLOWED)  # K2
        self.key = key
        return b"\x05READY" + self._numbered(b"CurveZMQREADY---", metadata), plain[128:]

    def frame(self, body: Buffer, *, more: bool = False, command: bool = False) -> bytes:
        """Encrypt a frame for the worker; return the command MESSAGE."""
        flags = bytes([more * _INNER_MORE | command * _INNER_COMMAND])
        return b"\x07MESSAGE" + self._numbered(b"CurveZMQMESSAGES", b"".join((flags, body)))

    def decrypt(self, frame: bytes) -> tuple[bool, bool, bytes]:
        """Decrypt a frame of the worker; return (more frames follow, is a command, contents).

        Raises:
            CurveError: The frame is not from this connection, or is repeated.
        """
        if len(frame) < _MESSAGE or not frame.startswith(b"\x07MESSAGE"):
            raise CurveError("a frame that is not encrypted")
        plain = self._open(b"CurveZMQMESSAGEC", frame[8:])
        if plain[0] > _INNER_MORE | _INNER_COMMAND:
            raise CurveError(f"an encrypted frame with flags {plain[0]:#x}")
        return bool(plain[0] & _INNER_MORE), bool(plain[0] & _INNER_COMMAND), plain[1:]

    def _numbered(self, prefix: bytes, plain: bytes) -> bytes:
        self._last_sent += 1
        number = self._last_sent.to_bytes(8, "big")
        return number + self._box(plain, prefix + number, self._shared)

    def _open(self, prefix: bytes, numbered: bytes) -> bytes:
        number = int.from_bytes(numbered[:8], "big")
        if number <= self._last_received:
            raise CurveError("an encrypted frame that is repeated")
        plain = self._unbox(numbered[8:], prefix + numbered[:8], self._shared)
        self._last_received = number
        return plain

    def _agree(self, public: bytes, secret: bytes) -> bytes:
        try:
            found: bytes = self._sodium.crypto_box_beforenm(public, secret)
        except Exception as error:  # PyNaCl's RuntimeError, for a point of low order for example
            raise CurveError("an invalid public key") from error
        return found

    def _box(self, plain: bytes, nonce: bytes, shared: bytes) -> bytes:
        box: bytes = self._sodium.crypto_box_easy_afternm(plain, nonce, shared)
        return box

    def _unbox(self, box: bytes, nonce: bytes, shared: bytes) -> bytes:
        try:
            plain: bytes = self._sodium.crypto_box_open_easy_afternm(box, nonce, shared)
        except Exception as error:  # PyNaCl's CryptoError
            raise CurveError("a box that is damaged, forged, or for another key") from error
        return plain
