"""What a publisher seals, and with what: each chunk and layout once, whoever gets it. (E2 to E5)

The arena stays plain, since workers of this host copy from it. Sealed bytes lie in memory of their
own, as much as the version has, from the first chunk that goes out until the version is let go.
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
from .messages import (
    Announce,
    Beacon,
    Buffer,
    End,
    Message,
    Patch,
    PatchId,
    SealedChunk,
    SealedMessage,
    encode,
)


class ByteSource(Protocol):
    """The bytes of a version, which the sealer reads."""

    def bytes(self, begin: int, end: int) -> Buffer: ...


class Named(Protocol):
    """A version by its name."""

    model: str
    epoch: int
    version: int


class Sealable(Protocol):
    """A version, or a patch that leads to it (`publisher/version.py`)."""

    plan: ChunkPlan
    chunks: Chunks[object]
    patch: PatchId | None
    sealed: "SealedVersion | None"
    was_sealed: bool

    @property
    def target(self) -> Named:
        """The version."""
        ...

    @property
    def snapshot(self) -> ByteSource: ...


class SealedVersion:
    """What was sealed of a version, under one group key.

    Args:
        group: The group key.
        subject: The version.
        room: As much memory as its data section has.
        again: It was sealed before, perhaps under the same key: look whether it is still the same.
    """

    def __init__(
        self, group: GroupKey, subject: Subject, room: NDArray[np.uint8], *, again: bool
    ) -> None:
        self.group, self.subject, self._again = group, subject, again
        self._key = group.of_version(subject)
        self._room = room
        self._chunks: dict[int, tuple[str, memoryview]] = {}  # whoever sends refers to them weakly

    def chunk(self, version: Sealable, index: int) -> tuple[str, memoryview]:
        """Return a chunk's tag and its sealed bytes; the first time, seal and hash it in one walk.

        A nonce must never stand for two texts that anybody sees, so a chunk that has changed is
        given to nobody.

        Raises:
            AssertionError: It has; no publisher may go on with this version.
        """
        found = self._chunks.get(index)
        if found is not None:
            return found
        begin, end = version.plan.span(index)
        room = self._room.data[begin:end]
        data = self.subject.associated(CHUNK, index, end - begin)
        plain = version.snapshot.bytes(begin, end)
        known = version.chunks.crcs[index]
        look = None if self._again else known
        tag, crc = seal(self._key, nonce_of(CHUNK, index), data, plain, room, look)
        if known not in (None, crc):  # E3
            raise AssertionError(
                f"chunk {index} of {version.target.model} has changed since it was hashed"
            )
        version.chunks.put(index, crc)
        self._chunks[index] = tag.hex(), room
        return self._chunks[index]

    def is_of(self, group: GroupKey, version: Sealable) -> bool:
        """Return whether it was sealed under this key and the version's present name."""
        return self.group is group and self.subject.epoch == version.target.epoch


class InUseError(MemoryError):
    """As many sealed versions of a model are in use as there may be."""


class Sealer:
    """Seals what one publisher says.

    Args:
        draw: Draws 32 bytes that nobody can guess, for a group key.
        take: Takes memory for so many sealed bytes of a model.
        life: Seconds after which another group key takes the place of one; None: no bound.
        now: The time.

    Raises:
        SealError: Nothing can be sealed here.
    """

    def __init__(
        self,
        draw: Callable[[], bytes],
        take: Callable[[str, int], NDArray[np.uint8]],
        life: float | None = None,
        now: float = 0.0,
    ) -> None:
        ciphers()  # which may not be there
        self._draw, self._take, self._life = draw, take, life
        self._of = weakref.WeakSet[Sealable]()  # of which something was sealed under this key
        self.rekey(now)

    def rekey(self, now: float) -> None:
        """Have another group key: whoever is not told has none for what comes.

        What was sealed before is let go. So chunks that wait to be sent do not go out: whoever has
        the old key alone may be on the way.
        """  # E6
        for version in self._of:
            version.sealed = None
        self._of.clear()
        self._group, self._since = GroupKey(self._draw()), now
        self._count = 0  # of messages sealed under it
        self._layouts: dict[str, tuple[Subject, bytes, str]] = {}  # the last, by model

    def due(self, now: float) -> bool:
        """Return whether the group key is as old as one may be."""
        return self._life is not None and now - self._since >= self._life

    @property
    def keys(self) -> list[str]:
        """The group key as workers are told it, on connections that are encrypted."""
        return [self._group.key.hex()]

    def reserve(self, model: str, nbytes: int) -> None:
        """Have memory for so many sealed bytes of a model, which is free until they need it.

        Raises:
            MemoryError: There is none.
        """
        try:
            self._room_of(model, nbytes, None)
        except InUseError:  # for a moment: workers that need a chunk meanwhile ask again
            return

    def _room_of(self, model: str, nbytes: int, of: Sealable | None) -> NDArray[np.uint8]:
        """Take memory for a version; if all of it is in use, that of the oldest other version.

        What was sealed there is sealed again if a worker asks for it.

        Raises:
            MemoryError: There is none.
            InUseError: Sockets still send from all of it.
        """
        while True:
            try:
                return self._take(model, nbytes)
            except InUseError:
                others = [
                    each
                    for each in self._of
                    if each.sealed is not None and each is not of and each.patch is None
                    if each.target.model == model
                ]
                if not others:
                    raise
                oldest = min(others, key=lambda each: (each.target.epoch, each.target.version))
                oldest.sealed = None

    def chunk(self, version: Sealable, index: int) -> tuple[SealedChunk, memoryview]:
        """Return a sealed chunk; it is sealed once.

        Raises:
            MemoryError: There is none for what is sealed.
        """
        sealed, named = version.sealed, version.target
        if sealed is None or not sealed.is_of(self._group, version):
            plan, patch = version.plan, version.patch
            name = named.model, named.epoch, named.version
            room = self._room(version)
            subject = Subject(*name, plan.nbytes, plan.chunk_bytes, *_encoding_of(patch))
            again = version.was_sealed
            sealed = version.sealed = SealedVersion(self._group, subject, room, again=again)
            version.was_sealed = True
            self._of.add(version)
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

    def _room(self, version: Sealable) -> NDArray[np.uint8]:
        """Take memory for what is sealed: for each version as much; for a patch what it needs."""
        nbytes = version.plan.nbytes
        if version.patch is not None:
            return np.empty(nbytes, np.uint8)
        return self._room_of(version.target.model, nbytes, version)

    def whole(self, announce: Announce, chunk: SealedChunk) -> Announce:
        """Return an announcement that goes with its only chunk, which is sealed."""
        return msgspec.structs.replace(
            announce, encryption=AES_256_GCM, key=chunk.key, tag=chunk.tag
        )

    def addressed(self, message: Message, payload: Buffer | None) -> tuple[Message, Buffer | None]:
        """Return a message as it goes to one worker, on a connection that is encrypted."""
        if not isinstance(message, Announce) or message.tag is not None:
            return message, payload
        tag = None
        if payload is not None:
            payload, tag = self._layout(message, payload)
        key = self._group.id
        return msgspec.structs.replace(message, encryption=AES_256_GCM, key=key, tag=tag), payload

    def _layout(self, announce: Announce, header: Buffer) -> tuple[bytes, str]:
        last = self._layouts.get(announce.model)
        subject = subject_of(announce)
        if last is not None and last[0] == subject:
            return last[1:]
        sealed = bytearray(len(header))
        data = subject.associated(LAYOUT, 0, len(header))
        tag, _ = seal(self._group.of_version(subject), nonce_of(LAYOUT, 0), data, header, sealed)
        self._layouts[announce.model] = subject, bytes(sealed), tag.hex()
        return bytes(sealed), tag.hex()

    def published(self, message: Message, payload: Buffer | None) -> tuple[Message, Buffer | None]:
        """Return a message as it goes to all, on connections that everybody can read."""
        message, payload = self.addressed(message, payload)
        if not isinstance(message, Announce | End | Beacon):
            return message, payload  # a chunk, sealed by now
        self._count += 1
        sealed = self._group.seal_message(self._count, encode(message))
        return SealedMessage(key=self._group.id, count=self._count, sealed=sealed), payload


def _encoding_of(patch: PatchId | None) -> tuple[str, tuple[int, int]]:
    """Return an encoding, and the base that it builds on. (D12)"""
    return ("raw", (0, 0)) if patch is None else (patch.encoding, (patch.epoch, patch.version))


def subject_of(announce: Announce, patch: Patch | None = None) -> Subject:
    """Return what the key of an announced version is derived from, or of a patch to it."""
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
