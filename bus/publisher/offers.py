"""Encodes a version as messages: announcement, chunks, end, commit and abort."""

from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from ...codecs.native import crc32c
from ..cut import piece_of
from ..effects import Notice, Send
from ..headers import Buffer, control_topic
from ..messages import Abort, Announce, Checksums, Chunk, Commit, End, Fetch, Piece, Whole
from ..sealer import Sealer
from .effects import (
    Broadcast,
    BroadcastChunk,
    BroadcastWhole,
    Effect,
    LoopEffect,
    MakeReclaimable,
    Release,
    SendChunk,
)
from .version import NO_TERMS, AnnouncedTerms, Chunked, Version, VersionOffer

Continuation = Callable[[float], list[Effect]]  # called with the time; returns the next effects

SLICE_BYTES = 2**22  # bytes of a version hashed between other work, in less than 1 ms


def announcement(
    version: Version, terms: AnnouncedTerms = NO_TERMS, whole: Whole | None = None
) -> Announce:
    """Return the announcement of a version.

    Args:
        version: The version to announce.
        terms: What the announcement asks of workers.
        whole: Checksum and digest of the version's bytes, if the bytes are in the same message.
    """
    commit, acknowledge, hash_ = terms
    return Announce(
        model=version.model,
        epoch=version.epoch,
        version=version.version,
        layout=version.layout.id,
        layout_bytes=len(version.layout.header),
        nbytes=version.layout.nbytes,
        chunk_bytes=version.plan.chunk_bytes,
        commit=commit,
        acknowledge=acknowledge,
        encoding="raw",
        shared=version.shared,
        hash=hash_,
        whole=whole,
        keep=version.keep,
        patches=[patch.offered for patch in version.patches] if version.patches else [],
        metadata=dict(version.metadata),
        sources=[*version.sources] if version.sources else [],
        companions=dict(version.companions),
    )


def commit_of(version: Version) -> Commit:
    """Return the `commit` message, which allows workers to apply a staged version."""
    return Commit(
        model=version.model,
        epoch=version.epoch,
        version=version.version,
        digest=version.chunks.digest,
    )


def abort_of(model: str, epoch: int, version: int, text: str) -> Abort:
    """Return the `abort` message, which makes workers drop a version."""
    return Abort(model=model, epoch=epoch, version=version, text=text)


def end_of(chunked: Chunked) -> End:
    """Return the `end` message, which follows the chunks of a version or of a patch."""
    version = chunked.target
    return End(
        model=version.model,
        epoch=version.epoch,
        version=version.version,
        digest=chunked.digest,
        patch=chunked.patch,
    )


def refusal_of(fetch: Fetch, version: Version | None) -> tuple[str, str]:
    """Return (error code, text) to refuse a fetch; both are empty if it can be served.

    `version` is the version to send, or None if it is gone.
    """
    if version is None:
        return "gone", f"version {fetch.version} of epoch {fetch.epoch} is not available here"
    last = fetch.first + fetch.count
    if fetch.count and (last > version.plan.count or fetch.version != version.version):
        return "range", (
            f"chunks {fetch.first} to {last - 1} of version {fetch.version} were asked for; "
            f"version {version.version} has {version.plan.count}"
        )
    return "", ""


def checksums_of(version: Version) -> tuple[Checksums, Buffer]:
    """Return the message with the CRC-32C of each chunk, which must be known, and its payload."""
    sums = np.array(version.chunks.checksums, "<u4").tobytes()
    message = Checksums(model=version.model, epoch=version.epoch, version=version.version)
    return message, sums


# The bytes of versions, for shells.


def hash_chunk(of: Chunked | VersionOffer, index: int) -> int:
    """Return a chunk's CRC-32C. The first call computes and stores it."""
    crc = of.chunks.crcs[index]
    if crc is None:
        crc = crc32c(of.snapshot.bytes(*of.chunks.plan.span(index)))
        of.chunks.put(index, crc)
    return crc


def chunk_of(chunked: Chunked, index: int) -> tuple[Chunk, Buffer]:
    """Return the `chunk` message for one chunk, and the chunk's bytes as its payload."""
    version, payload = chunked.target, chunked.snapshot.chunk(*chunked.plan.span(index))
    crc = chunked.chunks.crcs[index]
    if crc is None:
        crc = crc32c(payload)
        if chunked.chunks.whole:  # otherwise the code that receives the chunks adds checksums
            chunked.chunks.put(index, crc)
    chunk = Chunk(
        model=version.model,
        epoch=version.epoch,
        version=version.version,
        index=index,
        crc=crc,
        patch=chunked.patch,
    )
    return chunk, payload


def hash_all(version: Version) -> Iterator[int]:
    """Hash the unhashed chunks of a version, one per step; yield the bytes of a chunk each time."""
    for index in version.chunks.unhashed():
        hash_chunk(version, index)
        yield version.plan.chunk_bytes


class BackgroundHasher:
    """A queue of long jobs on versions, such as hashing, which run in small steps.

    Attributes:
        waiting: The queued jobs, as (version, steps, function to call at the end, function to call
            if a step raises).
    """

    def __init__(self) -> None:
        self.waiting = deque[tuple[Version, Iterator[int], Continuation, Continuation]]()

    def add(
        self, version: Version, steps: Iterator[int], done: Continuation, failed: Continuation
    ) -> None:
        """Queue a job on a version. Each of its `steps` yields how many bytes the step processed.

        `done` is called after the last step, `failed` if a step raises.
        """
        self.waiting.append((version, steps, done, failed))

    def give_up(self) -> Continuation:
        """Drop the first job, a step of which has raised; return its `failed`."""
        return self.waiting.popleft()[-1]

    def go_on(self, now: float) -> list[Effect]:
        """Do some steps of the first job; if it ends, return the effects of its `done`.

        If the version is gone, the job ends at once.
        """
        version, steps, done, _ = self.waiting[0]
        nbytes = 0
        while not version.gone and (step := next(steps, None)) is not None:
            nbytes += step
            if nbytes >= SLICE_BYTES:
                return []
        effects = done(now)
        self.waiting.popleft()
        return effects


def encode_for_worker(effect: SendChunk, sealer: Sealer | None = None) -> Send:
    """Return the message with a chunk for one worker, encrypted if there is a `sealer`.

    A chunk that is not encrypted is cut to the bytes that the worker needs.
    """
    if sealer is not None:
        return Send(*sealer.chunk(effect.version, effect.index), effect.to)
    chunk, payload = chunk_of(effect.version, effect.index)
    if effect.ranges:
        begin, _ = effect.version.plan.span(effect.index)
        cut = piece_of(payload, begin, effect.ranges)
        if cut is not None:
            piece, crc, rest = cut
            message = Piece(
                model=chunk.model,
                epoch=chunk.epoch,
                version=chunk.version,
                index=chunk.index,
                crc=crc,
                rest=rest,
            )
            return Send(message, piece.data, effect.to)
    return Send(chunk, payload, effect.to)


def encode_for_all(
    effect: BroadcastChunk | BroadcastWhole, sealer: Sealer | None = None
) -> Broadcast:
    """Return the message with a chunk for all subscribers, encrypted if there is a `sealer`."""
    if isinstance(effect, BroadcastChunk):
        chunk_for = chunk_of if sealer is None else sealer.chunk
        return Broadcast(effect.topic, *chunk_for(effect.version, effect.index))
    version, announce = effect.version, effect.announce
    if announce.whole is None:
        whole = Whole(crc=hash_chunk(version, 0), digest=version.chunks.digest)
        announce = msgspec.structs.replace(announce, whole=whole)
    if sealer is None:
        payload = version.snapshot.chunk(0, version.plan.nbytes)
    else:
        sealed, payload = sealer.chunk(version, 0)
        announce = sealer.add_tag(announce, sealed)
    return Broadcast(control_topic(version.model), announce, payload)


def _without_memory_to_seal(effect: SendChunk | BroadcastChunk | BroadcastWhole) -> LoopEffect:
    """Return what to do instead of `effect` if there is no memory to encrypt its chunk.

    The chunk is not sent. Workers that need the chunk fetch it until it arrives.
    """
    version = effect.version.target
    if isinstance(effect, BroadcastWhole):
        return Broadcast(control_topic(version.model), effect.announce)
    if isinstance(effect, BroadcastChunk):
        hash_chunk(effect.version, effect.index)  # the `end` needs the digest of all chunks
    text = (
        f"there is no memory to seal version {version.version} of {version.model} for the network "
        f"({version.layout.nbytes} bytes): workers wait for it until there is"
    )
    return Notice("full", text, warning=True)


def encode_effect(effect: Effect, sealer: Sealer | None) -> LoopEffect:
    """Return an effect for the loop, with chunks as messages. A sealer encrypts all messages."""
    if isinstance(effect, SendChunk | BroadcastChunk | BroadcastWhole):
        request = effect
        try:
            if isinstance(request, SendChunk):
                effect = encode_for_worker(request, sealer)
            else:
                effect = encode_for_all(request, sealer)
        except MemoryError:
            effect = _without_memory_to_seal(request)
    if sealer is not None:
        match effect:
            case Send():
                message, payload = sealer.seal_for_worker(effect.message, effect.payload)
                return Send(message, payload, effect.to)
            case Broadcast():
                return Broadcast(effect.topic, *sealer.seal_for_all(effect.message, effect.payload))
            case MakeReclaimable() | Release():
                effect.version.unseal()
            case _:
                pass
    return effect
