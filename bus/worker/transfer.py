"""Receives one version chunk by chunk; pushed and fetched chunks may arrive in any order.

Theory of operation: each chunk is here, requested, leased, or missing.

    missing             ──fetch────────────> requested ──overdue──> missing
    missing, requested  ──lease────────────> leased ──damaged, cut off──> missing
    any of these three  ──arrives──────────> here

A `Chunks` object records which chunks are here. It belongs to the receiving memory, and outlives
the transfer. A chunk is leased while its bytes are received directly into that memory: meanwhile,
other copies of the chunk are ignored, since two writers must not share memory. While the version
is copied from shared memory, no chunk is accepted.

Pushed chunks arrive in order, so a chunk missing below the highest pushed one was dropped and is
fetched immediately. A chunk above the highest pushed one may still be pushed: the worker fetches
such a chunk after `end`, or when nothing has arrived for a while. The number of chunks in flight is
limited by a window. If an answer is overdue, all requested chunks are missing again, and the
timeout doubles until something arrives. Answers come in the order of the requests: if a ping was
sent after a request, and is not answered yet, the answer to the request may still be on its way.

A patch may arrive instead of the version. It arrives in separate memory, and the version is decoded
from it.

A version may have sources, other servers of some of its chunks. Other threads fetch these chunks
from the sources and write them into the memory. Meanwhile, the chunks are accepted from nowhere
else.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...codecs.checksum import digest
from ...codecs.native import crc32c
from ...codecs.sealing import Opening
from ..chunks import Chunks, Memory
from ..cut import Cut
from ..headers import Buffer
from ..lease import Lease
from ..limits import Timing
from ..messages import Announce, AnyChunk, Chunk, Patch, PatchId, Piece, SealedChunk
from ..protocol_limits import LABEL_MAX, PROGRESS_CHUNKS, TRIES_MAX, WINDOW_CHUNKS
from ..staged import Base, Copying, Patching, SharedMemory, SourceFetch, indexes_of
from .keyring import Keyring
from .tables import COMING, Coming, Way

NONE = (-1, 0)  # no chunk is leased
ANNOUNCEMENT, CHECKSUMS = (0, 0), (-1, 0)  # results of `wants` that are not ranges of chunks
DAMAGED_MAX = 16  # damaged chunks that are requested again immediately; per source: in all


def put_chunk(
    memory: Memory,
    place: tuple[int, int],
    proof: int | Opening | Piece | None,
    data: Buffer,
    cut: tuple[Cut, int] | None = None,
) -> int | None:
    """Copy an intact chunk to its offset in memory; return its CRC-32C, or None if it is damaged.

    Args:
        memory: The memory of the version, or of the part that the worker takes of the version.
        place: Begin and end of the chunk in the version.
        proof: What verifies the chunk: its CRC-32C; for an encrypted chunk, the `Opening` that
            decrypts it; for a piece of the chunk, its message. None: no known key decrypts it.
        data: The bytes that arrived.
        cut: How to cut the version's chunks to the part, and the chunk's index. None: the worker
            takes whole versions.
    """  # W9
    begin, end = place
    if isinstance(proof, Piece):
        if cut is None:
            return None
        return cut[0].put_piece(memory, proof.index, data, proof.crc, proof.rest)
    if proof is None or len(data) != end - begin:
        return None
    to = memory[begin:end] if cut is None else np.empty(end - begin, np.uint8)
    if isinstance(proof, Opening):
        crc = proof.decrypt(data, to)  # E4
    elif crc32c(data) == proof:
        np.copyto(to, np.frombuffer(data, np.uint8))
        crc = proof
    else:
        return None
    if cut is not None and crc is not None:
        cut[0].put(memory, cut[1], to)
    return crc


class Transfer:
    """The transfer of one version into memory.

    Args:
        announce: The announcement of the version.
        chunks: The memory that receives the version or the patch, and its chunks, of which none
            has arrived.
        now: The time.
        timing: The timeouts and intervals.
        keyring: Decrypts the chunks; None if they are not encrypted.
        patch: The patch that arrives instead of the version, into memory of the patch's size.
        base: The base of the patch.
        why: If patches were offered, why none of them is used.
        cut: How the chunks are cut, if the worker takes a part; None: it takes whole versions.
        pieces: Whether the publisher sends parts, so that not all chunks need to be fetched.

    Attributes:
        offered: The patch that arrives, as it was announced; None: the version arrives whole.
        base: The base of the patch, until the patch is decoded.
        arrival: How the version arrives (`tables.COMING`).
    """

    def __init__(
        self,
        announce: Announce,
        chunks: Chunks[Memory],
        now: float,
        timing: Timing,
        keyring: Keyring | None = None,
        patch: Patch | None = None,
        base: Base | None = None,
        why: str = "",
        cut: Cut | None = None,
        *,
        pieces: bool = False,
    ) -> None:
        self.announce, self.chunks, self.cut = announce, chunks, cut
        # The chunks that this worker does not fetch, since they have no bytes of its part.
        self._unneeded = cut.unneeded if cut is not None and pieces else frozenset[int]()
        self._pieces: bool = pieces
        self._sums: list[int] | None = None  # the checksums of all chunks, from `checksums`
        self._sums_requested = False
        self.patch: PatchId | None = None
        if patch is not None:
            self.patch = PatchId(patch.encoding, patch.epoch, patch.version)
        self.why = why[:LABEL_MAX]
        self.base = base
        self.arrival: Coming = "received"
        self.tries = 0  # consecutive timeouts on this connection
        self.offered = patch
        self._job: Copying | Patching | None = None  # the copy or decode that uses the memory now
        self._source_fetch: SourceFetch | None = None  # the job that fetches from sources now
        self._at_sources = set[int]()  # the missing chunks that this job fetches
        self.key = (announce.epoch, announce.version)
        self.damaged = 0  # chunks whose bytes did not match their checksum
        self.restarts = 0  # how often the version did not match its digest
        self.digest: str | None = None  # from `end`
        self._reported_at = now  # when progress was reported last
        self._requested = set[int]()  # the indexes of chunks in flight
        self._cursor = 0  # no chunk below this index is missing
        self._pushed = 0  # all chunks below this index were pushed, or dropped on the way
        self._timing, self._keyring = timing, keyring
        self._heard_at = now  # when something of the version arrived last
        self._requested_at = now  # when something was requested last
        self._answered_ping_at = -math.inf  # when the last answered ping was sent
        self._timeout = timing.patience
        self._gap = 0.0  # the longest recent time between two chunks, in seconds
        self._end_requested = False
        self._lease: Lease | None = None  # the lease of the chunk whose bytes are being received
        self._leased = NONE  # index of the leased chunk, and its bytes at the last call of `wants`

    @property
    def progress(self) -> int:
        """The number of chunks that have arrived or, during a copy, are copied."""
        return self._job.count if isinstance(self._job, Copying) else self.chunks.here

    def take(self, chunk: AnyChunk, payload: Buffer | Lease, now: float, *, pushed: bool) -> bool:
        """Process a chunk; return whether to report progress to the publisher. (W23)

        Chunks of other patches are ignored. So are encrypted chunks if versions are not encrypted,
        and plain chunks if they are.
        """
        proof = chunk.crc if isinstance(chunk, Chunk) else chunk
        if self._keyring is None if isinstance(chunk, SealedChunk) else self._keyring is not None:
            return False
        if (None if isinstance(chunk, Piece) else chunk.patch) != self.patch:  # D9
            return False
        stored = self.store(chunk.index, proof, payload, now, pushed=pushed)
        slow = now - self._reported_at >= self._timing.report
        if not (stored and pushed and (slow or self.chunks.here % PROGRESS_CHUNKS == 0)):
            return False
        self._reported_at = now
        return True

    def store(
        self,
        index: int,
        proof: int | SealedChunk | Piece,
        payload: Buffer | Lease,
        now: float,
        *,
        pushed: bool,
    ) -> bool:
        """Store a chunk if it is new and intact; return whether it was stored.

        If the payload is a live lease, the chunk's bytes are in the version's memory already.

        Args:
            index: The chunk's index.
            proof: The chunk's CRC-32C; the sealed chunk, whose tag authenticates the payload; or
                the message with the piece of the chunk.
            payload: The chunk's bytes, or the lease that received them.
            now: The time.
            pushed: True if the chunk was published, false if it was requested.
        """
        chunks = self.chunks
        if index >= chunks.plan.count:
            return False
        if pushed:
            self._pushed = max(self._pushed, index + 1)
        if isinstance(payload, Lease) and payload.live:
            self._lease, self._leased = None, NONE
            if not payload.end(proof if isinstance(proof, int) else None):
                self._reject(index)
                return False
            crc = payload.crc
        elif (
            chunks.crcs[index] is not None
            or index == self._leased[0]
            or self._job is not None
            or index in self._at_sources
        ):
            return False
        else:
            found = self._put(index, proof, b"" if isinstance(payload, Lease) else payload)
            if found is None or (self._sums is not None and found != self._sums[index]):
                self._reject(index)
                return False
            crc = found
            self._requested.discard(index)
        chunks.put(index, crc)
        self.tries = 0
        # Wait in proportion to the time between chunks, for slow links.
        self._gap = max(now - self._heard_at, self._gap * 7 / 8)  # W32
        self._timeout = min(max(self._timing.patience, 4 * self._gap), self._timing.patience_max)
        self._heard_at = now
        return True

    def _put(self, index: int, proof: int | SealedChunk | Piece, data: Buffer) -> int | None:
        """Copy an intact chunk into memory; return its CRC-32C, or None if it is damaged."""
        verifies = self._opening(proof, len(data)) if isinstance(proof, SealedChunk) else proof
        cut, span = None if self.cut is None else (self.cut, index), self.chunks.plan.span(index)
        return put_chunk(self.chunks.memory, span, verifies, data, cut)

    def _opening(self, chunk: SealedChunk, size: int) -> Opening | None:
        keyring = self._keyring
        if keyring is None:
            return None
        return keyring.opening(self.announce, chunk, size, self.offered)

    def lend(self, chunk: AnyChunk, size: int) -> Lease | None:
        """Return a lease of the memory for a chunk of this size.

        Pass the lease to `take` once the chunk is complete. The result is None if the chunk is not
        needed, or cannot be received directly into the version's memory.
        """
        index, chunks = chunk.index, self.chunks
        if index >= chunks.plan.count or chunks.crcs[index] is not None:
            return None
        if self.cut is not None or isinstance(chunk, Piece):  # `put_chunk` cuts it
            return None
        if index == self._leased[0] or self._job is not None or index in self._at_sources:
            return None
        if chunk.patch != self.patch:
            return None
        begin, end = chunks.plan.span(index)
        if size != end - begin or isinstance(chunk, SealedChunk) != (self._keyring is not None):
            return None
        opening = self._opening(chunk, size) if isinstance(chunk, SealedChunk) else None
        if opening is None and self._keyring is not None:
            return None
        if self._lease is not None:
            self._end_lease()
        self._requested.discard(index)
        self._leased = index, 0
        view = chunks.memory.data[begin:end]
        self._lease = Lease(view, chunk, self._end_lease, opening=opening)
        return self._lease

    def revoke(self) -> bool:
        """Stop writes into the buffer. Return False while another thread may still write there."""
        self._end_lease()
        job = self._job or self._source_fetch
        if job is not None:
            job.cancel()
        return job is None

    def _end_lease(self) -> bool:
        """End the lease, if there is one: its chunk is missing again. The result is always True."""
        if self._lease is not None:
            self._lease.end()
            self._cursor = min(self._cursor, self._leased[0])
            self._lease, self._leased = None, NONE
        return True

    def end(self, digest: str) -> None:
        """Set the version's digest, received after the last pushed chunk."""
        self.digest = digest
        if self.patch is not None:
            self.chunks.set_end_digest(digest)
        self._change_way("unpushed")

    def copy(self, memory: SharedMemory) -> Copying:
        """Begin to copy the version from shared memory; return the job."""
        self._change_way("copy-started")
        to, plan = self.chunks.memory, self.chunks.plan
        job = self._job = Copying(self.announce.model, self.key, memory, to, plan, self.cut)
        return job

    @property
    def exhausted(self) -> bool:
        """True if requests were repeated too often and no valid chunk arrived."""
        return self.arrival in ("received", "pulled") and self.tries >= TRIES_MAX

    def decode(self, base: Base, buffer: NDArray[np.uint8]) -> Patching:
        """Begin to decode the complete patch, with its base, into a buffer; return the job."""
        model, digest = self.announce.model, self.digest or ""
        self._change_way("patched")
        patch = self.chunks.memory
        job = self._job = Patching(model, self.key, base, patch, buffer, digest)
        return job

    def decoded(self) -> None:
        """Drop the job and the base, since the patch is decoded."""
        self._job = self.base = None

    def copied(self, crcs: NDArray[np.uint32] | None, now: float) -> None:
        """Process the end of a copy. `crcs`: checksums of the chunks; None: the copy failed."""
        self._change_way("copy-ended")
        self._job = None
        if crcs is not None:
            self.chunks.put_all(crcs.tolist())
        self._heard_at, self.tries = now, 0  # the copy may have taken long

    def fetch_from_sources(self) -> SourceFetch | None:
        """Begin to fetch chunks from the version's sources; return the job.

        The result is None if no source has a chunk that is missing and needed.
        """
        announce, plan, assigned = self.announce, self.chunks.plan, set[int]()
        sources = list[tuple[str, list[int]]]()
        for source in announce.sources:
            missing = [i for i in indexes_of(source, plan) if self.chunks.crcs[i] is None]
            wanted = [i for i in dict.fromkeys(missing) if i not in self._unneeded]
            indexes = [i for i in wanted if i not in assigned]
            assigned.update(indexes)
            if indexes:
                sources.append((source.address, indexes))
        if not sources:
            return None
        self._at_sources = assigned
        self._source_fetch = SourceFetch(announce, sources, self.chunks.memory, plan, self.cut)
        return self._source_fetch

    def fetched(self, chunks: Sequence[tuple[int, int]], now: float, *, over: bool) -> None:
        """Record chunks that were fetched from sources; `over`: the job has ended.

        Chunks that are still missing then are fetched like any other chunk. (N3)
        """
        self._at_sources.difference_update(index for index, _ in chunks)
        for index, crc in chunks:
            if self._sums is None or crc == self._sums[index]:
                self.chunks.put(index, crc)
            else:
                self._reject(index)
        if chunks:
            self.tries, self._heard_at = 0, now
        job = self._source_fetch
        if job is not None and (over or not self._at_sources):
            if not self._at_sources:
                job.end()
            if self._at_sources:
                self._cursor = min(self._cursor, *self._at_sources)
            self._source_fetch, self._heard_at = None, now
            self._at_sources = set[int]()

    def take_checksums(self, data: Buffer, now: float) -> None:
        """Record the checksums of all chunks, if they match the version's digest. (T4)

        A chunk that has arrived with another checksum is fetched again.
        """
        chunks, announce, sums = self.chunks, self.announce, np.frombuffer(data, "<u4").tolist()
        if self.cut is None or self.digest is None or len(sums) != chunks.plan.count:
            return
        if digest(announce.layout, announce.chunk_bytes, sums) != self.digest:
            self.damaged += 1
            return
        self._sums, self.tries, self._heard_at = sums, 0, now
        for index, crc in enumerate(sums):
            if index in self._unneeded:
                chunks.put(index, crc)
            elif chunks.crcs[index] not in (None, crc):
                chunks.drop(index)
                self._reject(index)

    def pull(self) -> None:
        """From now on, fetch all missing chunks, since no more are expected to be pushed."""
        self._change_way("unpushed")

    def _change_way(self, way: Way) -> None:
        self.arrival = COMING[self.arrival].get(way, self.arrival)

    def answered(self, sent_at: float) -> None:
        """Record that the ping sent at `sent_at`, and every earlier request, was answered."""
        self._answered_ping_at = sent_at

    def requests(self, first: int, count: int) -> list[tuple[int, int, list[int]]]:
        """Return the fields (first, count, `ranges`) of each message that fetches these chunks."""
        if self.cut is None or not self._pieces or not count:
            return [(first, count, [])]
        return self.cut.requests(first, count)

    def wants(self, now: float) -> list[tuple[int, int]]:
        """Return ranges of chunks to request now, as (first, count).

        The result may also have `ANNOUNCEMENT`, to request the announcement and `end`, and
        `CHECKSUMS`, to request the checksums of all chunks.
        """
        wanted: list[tuple[int, int]] = []
        if self.arrival == "decoded":
            return wanted
        if self._lease is not None and self._lease.count > self._leased[1]:
            self._leased, self._heard_at = (self._leased[0], self._lease.count), now
        silent = now - self._heard_at
        if silent >= self._timing.quiet:  # W30
            self.pull()
        # Until a ping sent after the requests is answered, the answers may still be on their way.
        ping_answered = self._answered_ping_at > self._requested_at
        timeout = self._timeout if ping_answered else self._timing.patience_max
        # While only sources send chunks, the publisher is not late. Sources have a deadline.
        if silent >= timeout and (self._source_fetch is None or self._requested):  # W12
            self.tries += 1
            self._request_again(now)
            self._timeout = min(2 * self._timeout, self._timing.patience_max)  # W32
        if self.digest is None and self.arrival != "received" and not self._end_requested:
            self._end_requested = True
            wanted.append(ANNOUNCEMENT)
        if self._unneeded and self.digest is not None and self._sums is None:
            if not self._sums_requested:
                wanted.append(CHECKSUMS)
            self._sums_requested = True
        crcs = self.chunks.crcs
        limit = len(crcs) if self.arrival == "pulled" else self._pushed  # W10, W30
        while self._cursor < limit and (
            crcs[self._cursor] is not None
            or self._cursor in self._at_sources
            or self._cursor in self._unneeded
        ):
            self._cursor += 1
        if (
            self._cursor < limit
            and self._job is None
            and len(self._requested) <= WINDOW_CHUNKS // 2
        ):
            wanted += self._ranges(limit)
        if wanted:
            self._requested_at = now
        return wanted

    def restart(self) -> None:
        """Fetch the whole version again, since its bytes or the received digest are wrong."""
        self.restarts += 1
        self.chunks.clear()
        self._requested.clear()
        self.digest, self._end_requested, self._cursor = None, False, 0
        self._sums, self._sums_requested = None, False
        self.pull()

    def reconnected(self, now: float, *, pieces: bool = False) -> None:
        """Request again on a new connection what was requested on the old one.

        `pieces`: whether the publisher sends parts.
        """
        if pieces != self._pieces and self.cut is not None:
            self._unneeded = self.cut.unneeded if pieces else frozenset[int]()
            self._pieces, self._cursor = pieces, 0
        self._request_again(now)
        self.tries = 0
        self.pull()

    def _ranges(self, limit: int) -> list[tuple[int, int]]:
        """Return ranges of missing chunks below an index, as far as the window allows."""
        ranges: list[tuple[int, int]] = []
        while self._cursor < limit and len(self._requested) < WINDOW_CHUNKS:  # W11
            index, self._cursor = self._cursor, self._cursor + 1
            if self.chunks.crcs[index] is not None or index in (self._leased[0], *self._requested):
                continue
            if index in self._at_sources or index in self._unneeded:
                continue
            self._requested.add(index)
            first, count = ranges.pop() if ranges and sum(ranges[-1]) == index else (index, 0)
            ranges.append((first, count + 1))
        return ranges

    def _reject(self, index: int) -> None:
        """Fetch a damaged chunk again: the first `DAMAGED_MAX` at once, others after a timeout."""
        self.damaged += 1
        if self.damaged <= DAMAGED_MAX:
            self._requested.discard(index)
        if index not in self._requested:
            self._cursor = min(self._cursor, index)

    def _request_again(self, now: float) -> None:
        self._cursor = min(self._cursor, *self._requested) if self._requested else self._cursor
        self._requested.clear()
        self._end_requested = self._sums_requested = False
        self._heard_at = now


def lease_for(announce: Announce, size: int, buffer: bytearray) -> Lease | None:
    """Return a lease for an announcement's payload: of `buffer` for data, else of new memory.

    The result is None if the payload has another size than announced.
    """
    if announce.whole is None:
        memory, fits = bytearray(size), size == announce.layout_bytes
    else:
        memory, fits = buffer, size == announce.nbytes <= len(buffer)
    return Lease(memoryview(memory)[:size], announce, hashed=False) if fits else None
