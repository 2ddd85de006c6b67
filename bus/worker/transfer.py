"""One version arriving chunk by chunk, pushed and fetched in any order.

Theory of operation: a chunk is here, asked for, lent, or none of these.

    missing ──fetch──> asked ──┐
       │                 │     ├──> here
       ├─────push────────┼─────┤
       └─────lend────────┴─> lent ──damaged, cut off──> missing

Which are here is in the map of the memory that they come into (`Chunks`), which stays when the
transfer ends. A chunk is lent while its bytes are being received straight into their place:
whatever else comes of it meanwhile is ignored, since nobody may write there twice. All are while
the version is copied from shared memory.

Pushed chunks come in order, so whatever lies below the highest pushed one was dropped and is
fetched at once. What lies above may still be pushed: it is fetched after `end`, or when nothing has
arrived for a while. At most a window of chunks is asked for; if an answer does not come in time all
of them are missing again, and the patience doubles until something arrives. But answers come
in the order of what was asked: as long as no later ping was answered, they are on their way.

What arrives may be a patch instead, into memory of its own: then the version is decoded from that.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ...codecs.native import crc32c
from ...codecs.sealing import Opening
from ..chunks import Chunks, Memory
from ..lease import Lease
from ..limits import LABEL_MAX, PROGRESS_CHUNKS, TRIES_MAX, WINDOW_CHUNKS, Timing
from ..messages import Announce, Buffer, Chunk, Patch, PatchId, SealedChunk
from ..staged import Base, Copying, Patching, SharedMemory
from .keyring import Keyring
from .phases import COMING, Coming, Way

NONE = (-1, 0)  # is lent
DAMAGED_MAX = 16  # damaged chunks that are asked for again at once, before patience decides


class Transfer:
    """A version on its way into memory.

    Args:
        announce: What the publisher said of the version.
        chunks: Where it comes to, of which nothing is here.
        now: The time.
        timing: How long to wait.
        keyring: What opens its chunks; None: they come in the clear.
        patch: What arrives in place of the version, into memory of its own size.
        base: What the patch builds on.
        why: Why no patch arrives, though there are some.

    Attributes:
        base: What the patch builds on, for as long as that is needed.
        comes: How it comes (`phases.COMING`).
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
    ) -> None:
        self.announce, self.chunks = announce, chunks
        self.patch: PatchId | None = None
        if patch is not None:
            self.patch = PatchId(patch.encoding, patch.epoch, patch.version)
        self.why = why[:LABEL_MAX]
        self.base = base
        self.comes: Coming = "received"
        self.tries = 0  # times that nothing came for too long, though the connection is the same
        self._offered = patch
        self._job: Copying | Patching | None = None  # of whoever else writes, or reads the patch
        self.key = (announce.epoch, announce.version)
        self.damaged = 0  # chunks whose bytes did not match their checksum
        self.restarts = 0  # times the whole did not match its digest
        self.digest: str | None = None  # from `end`
        self._reported_at = now  # when the publisher was told last how far this is
        self._asked = set[int]()
        self._cursor = 0  # nothing below it is missing
        self._pushed = 0  # everything below it was pushed, or dropped on the way
        self._timing, self._keyring = timing, keyring
        self._heard_at = self._asked_at = now
        self._answered = -math.inf  # when the last ping was sent that was answered
        self._patience = timing.patience
        self._gap = 0.0  # seconds between two chunks, the longest lately
        self._end_asked = False
        self._lease: Lease | None = None  # of the chunk that is lent
        self._lent = NONE  # which chunk, and how much of it was here when we looked last

    @property
    def progress(self) -> int:
        """Chunks that are here, and sound as far as it is known."""
        return self._job.count if isinstance(self._job, Copying) else self.chunks.here

    def take(
        self, chunk: Chunk | SealedChunk, payload: Buffer | Lease, now: float, *, pushed: bool
    ) -> bool:
        """Take a chunk as it came: sealed if the version is, else in the clear.

        Return whether the publisher is to be told how far this is. (W23)
        """
        proof = chunk.crc if isinstance(chunk, Chunk) else chunk
        if self._keyring is None if isinstance(chunk, SealedChunk) else self._keyring is not None:
            return False
        if chunk.patch != self.patch:  # D9
            return False
        fresh = self.add(chunk.index, proof, payload, now, pushed=pushed)
        slow = now - self._reported_at >= self._timing.report
        if not (fresh and pushed and (slow or self.chunks.here % PROGRESS_CHUNKS == 0)):
            return False
        self._reported_at = now
        return True

    def add(
        self,
        index: int,
        proof: int | SealedChunk,
        payload: Buffer | Lease,
        now: float,
        *,
        pushed: bool,
    ) -> bool:
        """Take a chunk; return whether it is new and sound. A chunk that is neither is ignored.

        A lease that lives is the one of this very chunk: it lies in its place.

        Args:
            index: Which chunk.
            proof: Its CRC-32C, or what it was sealed with.
            payload: Its bytes.
            now: The time.
            pushed: Whether it was published.
        """
        chunks = self.chunks
        if index >= chunks.plan.count:
            return False
        if pushed:
            self._pushed = max(self._pushed, index + 1)
        if isinstance(payload, Lease) and payload.live:
            self._lease, self._lent = None, NONE
            if not payload.end(proof if isinstance(proof, int) else None):
                self._reject(index)
                return False
            crc = payload.crc
        elif chunks.crcs[index] is not None or index == self._lent[0] or self._job is not None:
            return False
        else:
            sound = self._place(index, proof, b"" if isinstance(payload, Lease) else payload)
            if sound is None:
                self._reject(index)
                return False
            crc = sound
            self._asked.discard(index)
        chunks.put(index, crc)
        self.tries = 0
        # Be patient in proportion to how long it took, for slow links.
        self._gap = max(now - self._heard_at, self._gap * 7 / 8)  # W32
        self._patience = min(max(self._timing.patience, 4 * self._gap), self._timing.patience_max)
        self._heard_at = now
        return True

    def _place(self, index: int, proof: int | SealedChunk, data: Buffer) -> int | None:
        """Put a chunk that is sound into its place; return its CRC-32C, None if it is not."""  # W9
        begin, end = self.chunks.plan.span(index)
        place = self.chunks.memory[begin:end]
        if len(data) != end - begin:
            return None
        if isinstance(proof, SealedChunk):
            opening = self._opening(proof, len(data))
            return None if opening is None else opening.opens(data, place)  # E4
        if crc32c(data) != proof:
            return None
        np.copyto(place, np.frombuffer(data, np.uint8))
        return proof

    def _opening(self, chunk: SealedChunk, size: int) -> Opening | None:
        keyring = self._keyring
        if keyring is None:
            return None
        return keyring.opening(self.announce, chunk, size, self._offered)

    def lend(self, chunk: Chunk | SealedChunk, size: int) -> Lease | None:
        """Return the place of a chunk of this size, to receive it there; None if it has none.

        `add` takes it once it is complete.
        """
        index, chunks = chunk.index, self.chunks
        if index >= chunks.plan.count or chunks.crcs[index] is not None:
            return None
        if index == self._lent[0] or self._job is not None:
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
            self.revoke()
        self._asked.discard(index)
        self._lent = index, 0
        place = chunks.memory.data[begin:end]
        self._lease = Lease(place, chunk, self.revoke, opening=opening)
        return self._lease

    def revoke(self) -> bool:
        """Nobody may write into the buffer any more; return False if somebody will, until told."""
        if self._job is not None:
            self._job.live = False
            return False
        if self._lease is not None:
            self._lease.end()
            self._cursor = min(self._cursor, self._lent[0])
            self._lease, self._lent = None, NONE
        return True

    def end(self, digest: str) -> None:
        """Take the digest of the whole: no more chunks will be pushed."""
        self.digest = digest
        self._change_way("unpushed")

    def copy(self, memory: SharedMemory) -> Copying:
        """Lend the whole, of which nothing is here, to whoever copies it from shared memory."""
        self._change_way("lent")
        to, plan = self.chunks.memory, self.chunks.plan
        job = self._job = Copying(self.announce.model, self.key, memory, to, plan)
        return job

    @property
    def hopeless(self) -> bool:
        """Whether nothing that fits comes, though it was asked for again and again."""
        return self.comes in ("received", "pulled") and self.tries >= TRIES_MAX

    def decode(self, base: Base, buffer: NDArray[np.uint8]) -> Patching:
        """Lend a buffer, and what the patch builds on, to whoever decodes it: it is here, whole."""
        model, digest = self.announce.model, self.digest or ""
        self._change_way("patched")
        patch = self.chunks.memory
        job = self._job = Patching(model, self.key, base, patch, buffer, digest)
        return job

    def decoded(self) -> None:
        """The patch is decoded: nobody needs what it builds on, and nobody writes any more."""
        self._job = self.base = None

    def copied(self, crcs: NDArray[np.uint32] | None, now: float) -> None:
        """The copy has ended, with these checksums; without: all of it is to be fetched."""
        self._change_way("returned")
        self._job = None
        if crcs is not None:
            self.chunks.put_all(crcs.tolist())
        self._heard_at, self.tries = now, 0  # however long it took

    def pull(self) -> None:
        """Nothing more will be pushed, as far as we can tell: fetch at once."""
        self._change_way("unpushed")

    def _change_way(self, way: Way) -> None:
        self.comes = COMING[self.comes].get(way, self.comes)

    def answered(self, sent_at: float) -> None:
        """A ping that was sent then was answered, and whatever was asked before it."""
        self._answered = sent_at

    def wants(self, now: float) -> list[tuple[int, int]]:
        """Return what to fetch now, as (first, count); (0, 0) asks for announcement and `end`."""
        wanted: list[tuple[int, int]] = []
        if self.comes == "decoded":
            return wanted
        if self._lease is not None and self._lease.count > self._lent[1]:
            self._lent, self._heard_at = (self._lent[0], self._lease.count), now
        silent = now - self._heard_at
        if silent >= self._timing.quiet:  # W30
            self.pull()
        passed = self._answered > self._asked_at  # else what was asked is still on its way
        if silent >= (self._patience if passed else self._timing.patience_max):  # W12
            self.tries += 1
            self._ask_again(now)
            self._patience = min(2 * self._patience, self._timing.patience_max)  # W32
        if self.digest is None and self.comes != "received" and not self._end_asked:
            self._end_asked = True
            wanted.append((0, 0))
        crcs = self.chunks.crcs
        limit = len(crcs) if self.comes == "pulled" else self._pushed  # W10, W30
        while self._cursor < limit and crcs[self._cursor] is not None:
            self._cursor += 1
        if self._cursor < limit and self._job is None and len(self._asked) <= WINDOW_CHUNKS // 2:
            wanted += self._ranges(limit)
        if wanted:
            self._asked_at = now
        return wanted

    def start_over(self) -> None:
        """The whole is not what was published, or somebody has said that it hashes otherwise."""
        self.restarts += 1
        self.chunks.clear()
        self._asked.clear()
        self.digest, self._end_asked, self._cursor = None, False, 0
        self.pull()

    def reconnected(self, now: float) -> None:
        """The connection is new: what was asked on the old one will not come."""
        self._ask_again(now)
        self.tries = 0
        self.pull()

    def _ranges(self, limit: int) -> list[tuple[int, int]]:
        """Ask for what is missing below a limit, as far as the window goes."""
        asked: list[tuple[int, int]] = []
        while self._cursor < limit and len(self._asked) < WINDOW_CHUNKS:  # W11
            index, self._cursor = self._cursor, self._cursor + 1
            if self.chunks.crcs[index] is not None or index in (self._lent[0], *self._asked):
                continue
            self._asked.add(index)
            first, count = asked.pop() if asked and sum(asked[-1]) == index else (index, 0)
            asked.append((first, count + 1))
        return asked

    def _reject(self, index: int) -> None:
        """A chunk came damaged: fetch it (again), at once for the first few, else in due time."""
        self.damaged += 1
        if self.damaged <= DAMAGED_MAX:
            self._asked.discard(index)
        if index not in self._asked:
            self._cursor = min(self._cursor, index)

    def _ask_again(self, now: float) -> None:
        self._cursor = min(self._cursor, *self._asked) if self._asked else self._cursor
        self._asked.clear()
        self._end_asked = False
        self._heard_at = now


def place_for(announce: Announce, size: int, buffer: bytearray) -> Lease | None:
    """Say where what comes with an announcement belongs: all data in the buffer, a layout anywhere.

    None: it is not as long as it should be.
    """
    if announce.whole is None:
        memory, fits = bytearray(size), size == announce.layout_bytes
    else:
        memory, fits = buffer, size == announce.nbytes <= len(buffer)
    return Lease(memoryview(memory)[:size], announce, hashed=False) if fits else None
