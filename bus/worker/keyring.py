"""Holds the group keys of a worker's session and decrypts sealed messages and chunks with them.

During a key rotation a worker has two keys; the older one expires soon after. Published messages
other than chunks carry a counter, which increases with each message under a key: a message whose
counter is not above the last accepted one is a replay.
"""

import math
from collections.abc import Sequence

from ...codecs.sealing import (
    CHUNK,
    LAYOUT,
    GroupKey,
    Opening,
    Subject,
    ciphers,
    nonce_of,
)
from ..errors import ProtocolError
from ..headers import Buffer, from_publisher
from ..messages import Announce, Beacon, End, Patch, PublisherMessage, SealedChunk, SealedMessage
from ..protocol_limits import GROUP_KEYS_MAX
from ..sealer import subject_of

_NO_SECRET: tuple[str, bytes, bytes] = "", b"", b""  # id of the key, subject, version key


class Keyring:
    """The group keys of one worker. A worker with a keyring accepts only sealed messages.

    Raises:
        SealError: The cryptography library is missing.
    """

    def __init__(self) -> None:
        ciphers()  # raises SealError without the library
        self._keys: dict[str, GroupKey] = {}  # by id, the newest last
        self._counts: dict[str, int] = {}  # the highest accepted counter, by id of the key
        self._old_keys_expire_at = math.inf  # when all but the newest key expire
        self._secret = _NO_SECRET  # the version key that was derived last
        self._key_missing = False  # whether a message was sealed with an unknown key

    def begin(self, keys: Sequence[str], until: float = math.inf) -> None:
        """Set the keys of a new session; all but the newest expire at `until`.

        Counters of known keys are kept; otherwise replays would be accepted.
        """
        self._keys = {key.id: key for key in map(_group_key, keys)}
        self._counts = {i: count for i, count in self._counts.items() if i in self._keys}
        self._old_keys_expire_at, self._key_missing, self._secret = until, False, _NO_SECRET

    def add(self, keys: Sequence[str], until: float) -> None:
        """Add keys after a rotation; all but the newest expire at `until`.

        `keys` lists the oldest first. A key listed before a known key is older, and ignored.
        """  # E6
        self._key_missing = False
        received = [_group_key(key) for key in keys]
        known = [index for index, key in enumerate(received) if key.id in self._keys]
        for key in received[max(known, default=-1) + 1 :]:
            self._keys[key.id] = key
            self._old_keys_expire_at = until
        self._keep_newest(GROUP_KEYS_MAX)

    def lacks(self, now: float) -> bool:
        """Drop expired keys; return whether a message was sealed with an unknown key."""
        if now >= self._old_keys_expire_at:
            self._old_keys_expire_at = math.inf
            self._keep_newest(1)
        return self._key_missing

    def _find(self, key_id: str | None) -> GroupKey | None:
        found = self._keys.get(key_id or "")
        self._key_missing |= found is None
        return found

    def _keep_newest(self, count: int) -> None:
        for old in list(self._keys)[:-count]:
            del self._keys[old]
            self._counts.pop(old, None)
            self._secret = _NO_SECRET

    def opening(
        self, announce: Announce, chunk: SealedChunk, size: int, patch: Patch | None = None
    ) -> Opening | None:
        """Return what decrypts a chunk of a version or patch; None if its key is unknown."""
        subject = subject_of(announce, patch)
        return self._opening(subject, CHUNK, chunk.index, size, chunk.key, chunk.tag)

    def payload(self, announce: Announce, sealed: Buffer) -> Buffer | None:
        """Return the decrypted layout or data of an announcement.

        If it cannot be decrypted, the result is None for a layout and empty for data. The data is
        then fetched, like any damaged chunk.
        """
        size = len(sealed)
        purpose = LAYOUT if announce.whole is None else CHUNK
        subject = subject_of(announce)
        opening = self._opening(subject, purpose, 0, size, announce.key, announce.tag)
        in_place = isinstance(sealed, memoryview) and not sealed.readonly
        plain = sealed if in_place else bytearray(size)
        if opening is None or opening.decrypt(sealed, plain) is None:
            return None if announce.whole is None else b""
        return plain

    def _opening(
        self,
        subject: Subject,
        purpose: int,
        index: int,
        size: int,
        key_id: str | None,
        tag: str | None,
    ) -> Opening | None:
        key = self._find(key_id)
        if key is None or tag is None:
            return None
        if self._secret[:2] != (key.id, subject.names):
            self._secret = key.id, subject.names, key.version_key(subject)
        data = subject.associated(purpose, index, size)
        return Opening(self._secret[2], nonce_of(purpose, index), data, bytes.fromhex(tag))

    def published(
        self, message: PublisherMessage, payloads: Sequence[Buffer], *, counts: bool = True
    ) -> PublisherMessage | None:
        """Return a published message, decrypted; None if it is unsealed, not authentic or a replay.

        A sealed chunk is returned as it is. If `counts` is false, the payload has not arrived yet,
        and the message does not count as accepted: it is no replay when it is complete.
        """  # E4, E5
        if not isinstance(message, SealedMessage):
            return message if isinstance(message, SealedChunk) else None
        return self._message(message, payloads, counts=counts)

    def count(self, message: PublisherMessage) -> None:
        """Record that a message was accepted: the same message is a replay from now on."""
        if isinstance(message, SealedMessage):
            self._counts[message.key] = message.count

    def _message(
        self, sealed: SealedMessage, payloads: Sequence[Buffer], *, counts: bool
    ) -> PublisherMessage | None:
        """Return the decrypted message; None if it is not authentic, or a replay."""
        key, count = self._find(sealed.key), sealed.count
        if key is None or count <= self._counts.get(key.id, 0):  # E5
            return None
        plain = key.open_message(count, sealed.sealed)
        if plain is None:
            return None
        if counts:
            self.count(sealed)
        try:
            message, _ = from_publisher([plain, *payloads])
        except ProtocolError:
            return None
        return message if isinstance(message, Announce | Beacon | End) else None


def _group_key(key: str) -> GroupKey:
    return GroupKey(bytes.fromhex(key))
