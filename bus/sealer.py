"""Encrypts ("seals") a publisher's data: each chunk and layout once, for all workers. (E2 to E5)

Versions in shared memory are not encrypted, since workers of this host copy them. The encrypted
bytes of a version are in separate memory of the same size: from when the version's first chunk is
sent until the version is released.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codecs.sealing import (
    AES_256_GCM,
    CHUNK,
    LAYOUT,
    GroupKey,
    Subject,
    ciphers,
    nonce_of,
    seal,
)
from .chunks import ChunkPlan, Chunks
from .headers import Buffer, encode
from .messages import Announce, Beacon, End, Patch, PatchId, SealedChunk, SealedMessage
from .structs import Message


class ByteSource(Protocol):
    """The unencrypted bytes of a version or patch."""

    def bytes(self, begin: int, end: int) -> Buffer: ...


class VersionKey(Protocol):
    """The model, epoch and number that name a version."""

    model: str
    epoch: int
    version: int


class Sealable(Protocol):
    """A version, or a patch to it (`publisher/version.py`)."""

    plan: ChunkPlan
    chunks: Chunks[object]
    patch: PatchId | None
    sealed: "SealedVersion | None"
    was_sealed: bool

    @property
    def target(self) -> VersionKey:
        """The version itself; for a patch, the version that the patch leads to."""
        ...

    @property
    def snapshot(self) -> ByteSource: ...


class SealedVersion:
    """The encrypted chunks of a version or patch, all under one group key.

    Args:
        group: The group key, from which the version's own key derives.
        subject: The names and sizes of the version or patch, which go into that key.
        buffer: Memory for the encrypted bytes, as large as the unencrypted bytes.
        crcs: By index, the CRC-32C of each chunk that was encrypted under this group key. This dict
            outlives this object, whose buffer another version may need.
        again: Whether chunks of the version were encrypted before, perhaps under another key. If
            so, each chunk is checked to have the same bytes as before.
    """

    def __init__(
        self,
        group: GroupKey,
        subject: Subject,
        buffer: NDArray[np.uint8],
        crcs: dict[int, int],
        *,
        again: bool,
    ) -> None:
        self.group, self.subject, self._crcs, self._again = group, subject, crcs, again
        self._key = group.version_key(subject)
        self._buffer = buffer
        self._chunks: dict[int, tuple[str, memoryview]] = {}  # send queues hold weak references

    def chunk(self, version: Sealable, index: int) -> tuple[str, memoryview]:
        """Return a chunk's authentication tag in hexadecimal digits, and its encrypted bytes.

        The first call for a chunk encrypts and hashes it. A nonce must never be used for two
        plaintexts, so a chunk that has changed is not sent. It may have changed because a trainer
        wrote to it, or because a relay received it again with different bytes.

        Raises:
            AssertionError: The chunk has changed, so the publisher must not send this version.
        """
        known, before = version.chunks.crcs[index], self._crcs.get(index)
        if before is not None and known not in (None, before):
            raise _changed(version, index)
        found = self._chunks.get(index)
        if found is not None:
            return found
        begin, end = version.plan.span(index)
        buffer = self._buffer.data[begin:end]
        data = self.subject.associated(CHUNK, index, end - begin)
        plain = version.snapshot.bytes(begin, end)
        known_crc = None if self._again else known
        tag, crc = seal(self._key, nonce_of(CHUNK, index), data, plain, buffer, known_crc)
        if any(each not in (None, crc) for each in (known, before)):  # E3
            raise _changed(version, index)
        self._crcs[index] = crc
        if known is None and version.chunks.whole:  # else the relay's worker records checksums
            version.chunks.put(index, crc)
        self._chunks[index] = tag.hex(), buffer
        return self._chunks[index]

    def is_of(self, group: GroupKey, version: Sealable) -> bool:
        """True if these chunks were sealed under this group key and the version's current epoch."""
        return self.group is group and self.subject.epoch == version.target.epoch


def _changed(version: Sealable, index: int) -> AssertionError:
    return AssertionError(
        f"chunk {index} of {version.target.model} has changed since it was hashed"
    )


class SealInUseError(MemoryError):
    """All memory for sealed versions of a model is in use."""


class Sealer:
    """Encrypts the data and messages of one publisher.

    Args:
        draw: Returns 32 unguessable bytes for a group key.
        take: Returns memory for encrypted bytes; called with the model and the number of bytes.
        life: Seconds after which a group key is replaced; None: it is never replaced.
        now: The present time in seconds.

    Raises:
        SealError: The ciphers are not available.
    """

    def __init__(
        self,
        draw: Callable[[], bytes],
        take: Callable[[str, int], NDArray[np.uint8]],
        life: float | None = None,
        now: float = 0.0,
    ) -> None:
        ciphers()  # raises an error if there are none
        self._draw, self._take, self._life = draw, take, life
        # By version or patch, the CRC-32Cs of the chunks that were sealed under the group key.
        self._sealed_versions = weakref.WeakKeyDictionary[Sealable, dict[int, int]]()
        self.rekey(now)

    def rekey(self, now: float) -> None:
        """Replace the group key; workers without the new key cannot decrypt later versions.

        All chunks that were encrypted under the old key are dropped, also from send queues.
        """  # E6
        for version in self._sealed_versions:
            version.sealed = None
        self._sealed_versions.clear()
        self._group, self._since = GroupKey(self._draw()), now
        self._count = 0  # number of messages sealed under the key
        self._layouts: dict[str, tuple[Subject, bytes, str]] = {}  # by model, the last sealed one

    def due(self, now: float) -> bool:
        """True if the group key is at least `life` seconds old, so it should be replaced."""
        return self._life is not None and now - self._since >= self._life

    @property
    def keys(self) -> list[str]:
        """The group key in hexadecimal digits, sent only on encrypted connections."""
        return [self._group.key.hex()]

    def reserve(self, model: str, nbytes: int) -> None:
        """Allocate memory for `nbytes` encrypted bytes of a model before a version needs it.

        Raises:
            MemoryError: There is not enough memory.
        """
        try:
            self._take_buffer(model, nbytes, None)
        except (
            SealInUseError
        ):  # temporary: workers that lack a chunk fetch it until there is memory
            return

    def _take_buffer(self, model: str, nbytes: int, of: Sealable | None) -> NDArray[np.uint8]:
        """Return memory for the version `of`; if all is in use, that of the oldest other version.

        The other version's chunks are encrypted again when a worker fetches them.

        Raises:
            MemoryError: There is not enough memory.
            SealInUseError: Sockets still send from all of the memory.
        """
        while True:
            try:
                return self._take(model, nbytes)
            except SealInUseError:
                others = [
                    each
                    for each in self._sealed_versions
                    if each.sealed is not None and each is not of and each.patch is None
                    if each.target.model == model
                ]
                if not others:
                    raise
                oldest = min(others, key=lambda each: (each.target.epoch, each.target.version))
                oldest.sealed = None

    def chunk(self, version: Sealable, index: int) -> tuple[SealedChunk, memoryview]:
        """Return the message with an encrypted chunk, and the encrypted bytes as its payload.

        Each chunk is encrypted once under a group key.

        Raises:
            MemoryError: There is not enough memory for encrypted bytes.
        """
        sealed, named = version.sealed, version.target
        if sealed is None or not sealed.is_of(self._group, version):
            plan, patch = version.plan, version.patch
            name = named.model, named.epoch, named.version
            buffer = self._buffer_for(version)
            subject = Subject(*name, plan.nbytes, plan.chunk_bytes, *_encoding_of(patch))
            again = version.was_sealed
            crcs = self._sealed_versions.setdefault(version, {})
            sealed = SealedVersion(self._group, subject, buffer, crcs, again=again)
            version.sealed, version.was_sealed = sealed, True
        tag, payload = sealed.chunk(version, index)
        chunk = SealedChunk(
            model=named.model,
            epoch=named.epoch,
            version=named.version,
            index=index,
            key=self._group.id,
            tag=tag,
            patch=version.patch,
        )
        return chunk, payload

    def _buffer_for(self, version: Sealable) -> NDArray[np.uint8]:
        """Return memory for encrypted bytes: a model's buffer or, for a patch, a new array."""
        nbytes = version.plan.nbytes
        if version.patch is not None:
            return np.empty(nbytes, np.uint8)
        return self._take_buffer(version.target.model, nbytes, version)

    def add_tag(self, announce: Announce, chunk: SealedChunk) -> Announce:
        """Return the announcement of a version whose only chunk is sent in the same message."""
        return msgspec.structs.replace(
            announce, encryption=AES_256_GCM, key=chunk.key, tag=chunk.tag
        )

    def seal_for_worker(
        self, message: Message, payload: Buffer | None
    ) -> tuple[Message, Buffer | None]:
        """Return message and payload in the form for one worker, on an encrypted connection."""
        if not isinstance(message, Announce) or message.tag is not None:
            return message, payload
        tag = None
        if payload is not None:
            payload, tag = self._layout(message, payload)
        key = self._group.id
        return msgspec.structs.replace(message, encryption=AES_256_GCM, key=key, tag=tag), payload

    def _layout(self, announce: Announce, header: Buffer) -> tuple[bytes, str]:
        """Encrypt a layout (`header`) once per version; return (encrypted bytes, tag)."""
        last = self._layouts.get(announce.model)
        subject = subject_of(announce)
        if last is not None and last[0] == subject:
            return last[1:]
        sealed = bytearray(len(header))
        data = subject.associated(LAYOUT, 0, len(header))
        tag, _ = seal(self._group.version_key(subject), nonce_of(LAYOUT, 0), data, header, sealed)
        self._layouts[announce.model] = subject, bytes(sealed), tag.hex()
        return bytes(sealed), tag.hex()

    def seal_for_all(
        self, message: Message, payload: Buffer | None
    ) -> tuple[Message, Buffer | None]:
        """Return message and payload in the form for all workers, on unencrypted connections."""
        message, payload = self.seal_for_worker(message, payload)
        if not isinstance(message, Announce | End | Beacon):
            return message, payload  # a sealed chunk
        self._count += 1
        sealed = self._group.seal_message(self._count, encode(message))
        return SealedMessage(key=self._group.id, count=self._count, sealed=sealed), payload


def _encoding_of(patch: PatchId | None) -> tuple[str, tuple[int, int]]:
    """Return (encoding, (epoch, version) of the base) of a patch (None: a whole version). (D12)"""
    return ("raw", (0, 0)) if patch is None else (patch.encoding, (patch.epoch, patch.version))


def subject_of(announce: Announce, patch: Patch | None = None) -> Subject:
    """Return the subject of an announced version or its patch, from which the key is derived."""
    encoding, base = _encoding_of(patch)
    return Subject(
        announce.model,
        announce.epoch,
        announce.version,
        announce.nbytes if patch is None else patch.nbytes,
        announce.chunk_bytes,
        announce.encoding if patch is None else encoding,
        base,
    )
