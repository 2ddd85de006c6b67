"""What a publisher says of a version: the messages that announce, carry, close and commit it."""

from collections.abc import Iterable, Iterator

import msgspec

from ...codecs.native import crc32c
from ..effects import Notice, Send
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
from ..sealer import Sealer
from .effects import (
    Broadcast,
    BroadcastChunk,
    BroadcastWhole,
    Effect,
    Lend,
    Release,
    SendChunk,
    Worded,
)
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


def for_one(effect: SendChunk, sealer: Sealer | None = None) -> Send:
    """Return the message to one worker that an effect asks for."""
    chunk_for = chunk_of if sealer is None else sealer.chunk
    chunk, payload = chunk_for(effect.version, effect.index)
    return Send(chunk, payload, effect.to)


def for_all(effect: BroadcastChunk | BroadcastWhole, sealer: Sealer | None = None) -> Broadcast:
    """Return the message to all that an effect asks for."""
    version = effect.version
    if isinstance(effect, BroadcastChunk):
        chunk_for = chunk_of if sealer is None else sealer.chunk
        return Broadcast(data_topic(version.model), *chunk_for(version, effect.index))
    announce = effect.announce
    if sealer is None:
        _, payload = chunk_of(version, 0)
    else:
        sealed, payload = sealer.chunk(version, 0)
        announce = sealer.whole(announce, sealed)
    whole = Whole(crc=hash_chunk(version, 0), digest=version.digest)
    announce = msgspec.structs.replace(announce, whole=whole)
    return Broadcast(control_topic(version.model), announce, payload)


def _message_of(
    effect: SendChunk | BroadcastChunk | BroadcastWhole, sealer: Sealer | None
) -> Worded:
    """Return the message that an effect asks for.

    Where there is no memory to seal its bytes they do not go out, as if they were lost on the way:
    whoever needs them asks, and asks again.
    """
    try:
        return for_one(effect, sealer) if isinstance(effect, SendChunk) else for_all(effect, sealer)
    except MemoryError:
        version = effect.version
    if isinstance(effect, BroadcastWhole):
        return Broadcast(control_topic(version.model), effect.announce)
    if isinstance(effect, BroadcastChunk):
        hash_chunk(version, effect.index)  # the end says what all of them hash to
    text = (
        f"there is no memory to seal version {version.version} of {version.model} for the network "
        f"({version.layout.nbytes} bytes): workers wait for it until there is"
    )
    return Notice("full", text, warning=True)


def worded(effects: Iterable[Effect], sealer: Sealer | None) -> Iterator[Worded]:
    """Yield effects, with messages in place of what asks for them; sealed where that is done."""
    for effect in effects:
        match effect:
            case SendChunk() | BroadcastChunk() | BroadcastWhole():
                said: Worded = _message_of(effect, sealer)
            case _:
                said = effect
        if sealer is not None and isinstance(said, Send):
            message, payload = sealer.addressed(said.message, said.payload)
            said = Send(message, payload, said.to)
        elif sealer is not None and isinstance(said, Broadcast):
            said = Broadcast(said.topic, *sealer.published(said.message, said.payload))
        elif isinstance(said, Lend | Release):
            said.version.sealed = None  # its memory serves the next version
        yield said
