"""Encrypts ("seals") versions and messages, once for all holders of a group key. (E1 to E4)

The cipher is AES-256-GCM. A group key is random, new at each start, and never stored. HKDF-SHA256
derives a key for each version from the group key and the version's name and encoding. A nonce under
that key consists of a purpose and an index. Each nonce is used for one plaintext only, since a
version never changes. Messages have a key of their own, and nonces with a counter.

    group key ──> id                              identifies the group key
              ├─> key of messages ──> nonce: MESSAGE, count
              └─> key of a version ─> nonce: CHUNK, index | LAYOUT, 0

`cryptography` is imported at the first use, since it is not needed without keys.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

from .errors import SealError
from .native import crc32c

if TYPE_CHECKING:
    from .numpy_tensors import Memory

AES_256_GCM: Final = "aes-256-gcm"  # the cipher's name in an announcement
KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
SHORT_BYTES: Final = 2**15  # up to this size, one call that copies is faster than pieces in place
PIECE_BYTES: Final = 2**18  # bytes encrypted at once, which are then in the cache for the checksum
CHUNK, LAYOUT, MESSAGE = 1, 2, 3  # the purposes of nonces


@cache
def ciphers() -> tuple[Any, Any, type[Exception]]:
    """Return the cipher for short texts, the cipher for pieces, and the error for a wrong tag.

    Raises:
        SealError: `cryptography` is not installed.
    """
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.ciphers.modes import GCM
    except ImportError as error:
        raise SealError(
            "a publisher or worker with keys needs the package cryptography, which is not "
            "installed: pip install 'weightbus[keys]'"
        ) from error

    def pieces(key: bytes, nonce: bytes) -> Any:
        return Cipher(algorithms.AES(key), GCM(nonce))

    return AESGCM, pieces, InvalidTag


def _expand(secret: bytes, info: bytes) -> bytes:
    """Return one block of HKDF-Expand (RFC 5869) with SHA-256: 32 bytes, as long as a key."""
    return hmac.digest(secret, info + b"\1", hashlib.sha256)


class GroupKey:
    """The secret that a publisher shares with all of its workers.

    Args:
        key: 32 random bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a group key of {len(key)} bytes; it has {KEY_BYTES}")
        self.key = key
        self._secret = hmac.digest(b"weightbus 1", key, hashlib.sha256)  # HKDF-Extract
        self.id = _expand(self._secret, b"id")[:8].hex()
        self.message_key = _expand(self._secret, b"messages")
        self._messages = ciphers()[0](self.message_key)

    def __repr__(self) -> str:
        return f"<GroupKey {self.id}>"

    def seal_message(self, count: int, plain: bytes) -> bytes:
        """Encrypt the message with the number `count`; return it, followed by its tag."""  # E5
        data = struct.pack("<I2Q", MESSAGE, count, len(plain))
        sealed: bytes = self._messages.encrypt(nonce_of(MESSAGE, count), plain, data)
        return sealed

    def open_message(self, count: int, sealed: bytes) -> bytes | None:
        """Decrypt the message with this number; return None if it is not authentic."""
        size = len(sealed) - TAG_BYTES
        if size < 0:
            return None
        data = struct.pack("<I2Q", MESSAGE, count, size)
        try:
            plain: bytes = self._messages.decrypt(nonce_of(MESSAGE, count), sealed, data)
        except ciphers()[2]:
            return None
        return plain

    def version_key(self, subject: "Subject") -> bytes:
        """Return the key of a version, or of a patch to it."""
        return _expand(self._secret, b"version" + subject.names)


@dataclass(frozen=True)
class Subject:
    """What names a version in one encoding, from which its key is derived.

    Attributes:
        model, epoch, version: The version's model id, epoch and number.
        nbytes, chunk_bytes: Bytes of the data section, and of a chunk.
        encoding: The encoding of its chunks.
        base: Epoch and number of the base, if the version is sent as a patch; else zeros.
    """

    model: str
    epoch: int
    version: int
    nbytes: int
    chunk_bytes: int
    encoding: str = "raw"
    base: tuple[int, int] = (0, 0)

    @cached_property
    def names(self) -> bytes:
        """The bytes from which the version's key is derived."""
        model, encoding = self.model.encode(), self.encoding.encode()
        numbers = struct.pack("<4Q", self.epoch, self.version, *self.base)
        return bytes([len(model)]) + model + bytes([len(encoding)]) + encoding + numbers

    def associated(self, purpose: int, index: int, size: int) -> bytes:
        """Return the associated data that the tag of a payload of `size` bytes covers."""
        sizes = struct.pack("<I4Q", purpose, index, size, self.nbytes, self.chunk_bytes)
        return self.names + sizes


def nonce_of(purpose: int, index: int) -> bytes:
    """Return a nonce of 12 bytes. Each nonce is used only once with a key."""
    return struct.pack("<IQ", purpose, index)


def seal(
    key: bytes,
    nonce: bytes,
    associated: bytes,
    plain: "Memory",
    to: "Memory",
    crc: int | None = None,
) -> tuple[bytes, int]:
    """Encrypt `plain` into `to`, which has the same size; return (tag, CRC-32C of `plain`).

    The tag also authenticates `associated`. This takes one pass: each piece is hashed while it is
    in the cache. If `crc` is given, nothing is hashed, and `crc` is returned.
    """
    short, in_pieces, _ = ciphers()
    source, target = memoryview(plain).cast("B"), memoryview(to).cast("B")  # type: ignore[arg-type]
    if len(source) <= SHORT_BYTES:
        sealed: bytes = short(key).encrypt(nonce, source, associated)
        target[:] = sealed[:-TAG_BYTES]
        return sealed[-TAG_BYTES:], crc32c(source) if crc is None else crc
    context = in_pieces(key, nonce).encryptor()
    context.authenticate_additional_data(associated)
    found = 0
    for begin in range(0, len(source), PIECE_BYTES):
        piece = source[begin : begin + PIECE_BYTES]
        context.update_into(piece, target[begin : begin + len(piece)])
        found = crc32c(piece, found) if crc is None else crc
    context.finalize()
    return context.tag, found


class Opening:
    """Decrypts one encrypted payload, piece by piece as it arrives.

    The plaintext is not authentic until `proves` has returned True.
    """

    def __init__(self, key: bytes, nonce: bytes, associated: bytes, tag: bytes) -> None:
        self._short, self._in_pieces, self._forged = ciphers()
        self._key, self._nonce, self._associated, self._tag = key, nonce, associated, tag
        self._context: Any = None

    def decrypt_next(self, sealed: "Memory", to: "Memory") -> None:
        """Decrypt the next piece into `to`, which has the same size and may be the same memory."""
        if self._context is None:
            self._context = self._in_pieces(self._key, self._nonce).decryptor()
            self._context.authenticate_additional_data(self._associated)
        self._context.update_into(sealed, to)

    def proves(self) -> bool:
        """Return whether the tag matches all pieces. Call this once, after the last piece."""
        try:
            self._context.finalize_with_tag(self._tag)
        except self._forged:
            return False
        return True

    def decrypt(self, sealed: "Memory", to: "Memory") -> int | None:
        """Decrypt a whole payload; return the plaintext's CRC-32C, or None for a wrong tag."""
        source, target = memoryview(sealed).cast("B"), memoryview(to).cast("B")  # type: ignore[arg-type]
        if len(source) <= SHORT_BYTES:
            return self._decrypt_short(source, target)
        crc = 0
        for begin in range(0, len(source), PIECE_BYTES):
            end = min(begin + PIECE_BYTES, len(source))
            self.decrypt_next(source[begin:end], target[begin:end])
            crc = crc32c(target[begin:end], crc)
        return crc if self.proves() else None

    def _decrypt_short(self, source: memoryview, target: memoryview) -> int | None:
        sealed = bytes(source) + self._tag
        try:
            target[:] = self._short(self._key).decrypt(self._nonce, sealed, self._associated)
        except self._forged:
            return None
        return crc32c(target)
