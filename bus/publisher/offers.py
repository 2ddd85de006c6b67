"""What a publisher says of a version: the messages that announce, carry, close and commit it."""

import msgspec

from ...codecs.native import crc32c
from ..effects import Send
from ..messages import (
    Abort,
    Announce,
    Buffer,
    Chunk,
    Commit,
    End,
    Fetch,
    Whole,
    control_topic,
    data_topic,
)
from .effects import Broadcast, BroadcastChunk, BroadcastWhole, SendChunk
from .publication import Publication
from .version import Version


def announcement(version: Version, publication: Publication | None) -> Announce:
    """Return the announcement of a version; a committed one is for everybody to apply at once."""
    together = publication is not None and publication.commit == "together"
    staged = publication is not None and (together or publication.wait == "staged")
    return Announce(
        model=version.model,
        epoch=version.epoch,
        version=version.version,
        layout=version.layout.id,
        layout_bytes=len(version.layout.header),
        nbytes=version.layout.nbytes,
        chunk_bytes=version.plan.chunk_bytes,
        commit="together" if together else "auto",
        acknowledge="staged" if staged else "applied",
        encoding="raw",
        shared=version.shared,
        hash=publication is not None and publication.hash,
    )


def commit_of(version: Version) -> Commit:
    """Return the message that lets workers apply a version."""
    return Commit(
        model=version.model, epoch=version.epoch, version=version.version, digest=version.digest
    )


def abort_of(model: str, epoch: int, version: int, text: str) -> Abort:
    """Return the message that makes workers drop a version."""
    return Abort(model=model, epoch=epoch, version=version, text=text)


def end_of(version: Version) -> End:
    """Return the message that closes a version."""
    return End(
        model=version.model, epoch=version.epoch, version=version.version, digest=version.digest
    )


def refusal_of(fetch: Fetch, version: Version | None) -> tuple[str, str]:
    """Return the code and the words by which a fetch of chunks is refused; no code if it is not."""
    if version is None:
        return "gone", f"version {fetch.version} of epoch {fetch.epoch} is not to be had here"
    last = fetch.first + fetch.count
    if fetch.count and (last > version.plan.count or fetch.version != version.version):
        return "range", (
            f"chunks {fetch.first} to {last - 1} of version {fetch.version} were asked for; "
            f"version {version.version} has {version.plan.count}"
        )
    return "", ""


# What shells do with a version's bytes.


def hash_chunk(version: Version, index: int) -> int:
    """Return a chunk's CRC-32C; each chunk is hashed once."""
    crc = version.crc(index)
    if crc is None:
        crc = crc32c(version.snapshot.bytes(*version.plan.span(index)))
        version.hashed(index, crc)
    return crc


def chunk_of(version: Version, index: int) -> tuple[Chunk, Buffer]:
    """Return a chunk and its payload."""
    crc = hash_chunk(version, index)
    chunk = Chunk(
        model=version.model, epoch=version.epoch, version=version.version, index=index, crc=crc
    )
    return chunk, version.snapshot.chunk(*version.plan.span(index))


def for_one(effect: SendChunk) -> Send:
    """Return the message to one worker that an effect asks for."""
    return Send(*chunk_of(effect.version, effect.index), to=effect.to)


def for_all(effect: BroadcastChunk | BroadcastWhole) -> Broadcast:
    """Return the message to all that an effect asks for."""
    version = effect.version
    if isinstance(effect, BroadcastChunk):
        return Broadcast(data_topic(version.model), *chunk_of(version, effect.index))
    chunk, payload = chunk_of(version, 0)
    whole = Whole(crc=chunk.crc, digest=version.digest)
    announce = msgspec.structs.replace(effect.announce, whole=whole)
    return Broadcast(control_topic(version.model), announce, payload)
