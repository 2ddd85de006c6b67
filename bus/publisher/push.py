"""Pushes the chunks of versions on the data socket, at the pace of the fastest worker.

The data socket silently drops what does not fit into a subscriber's queue. So a push runs at most a
window ahead of the chunks that the fastest worker has reported: workers of that speed lose nothing,
and slower ones lose chunks, which they fetch, instead of delaying the others. If no worker reports
anything for a while, the push ends early; workers fetch the rest.

An unhashed chunk is hashed when it is pushed. Chunks are pushed in small bursts, when a connection
has room: so their bytes are still in the cache when they are sent, and at most a burst is queued.
The end has the digest of all chunks, so it is sent in the step after the last chunk.

A push of a version that is still arriving goes as far as the chunks that have arrived.
"""

from ..limits import PUSH_CHUNKS
from ..messages import control_topic
from .effects import Broadcast, BroadcastChunk, Effect
from .offers import chunks_topic, end_of
from .version import Chunked

BURST_BYTES = 2**22  # pushed at once, between other work


class Push:
    """The push of one version, or of a patch to it."""

    def __init__(self, version: Chunked, now: float, patience: float, queue: int) -> None:
        self.version = version
        self.topic = chunks_topic(version)
        self.next, self._count = 0, version.plan.count
        self.done = False
        self.stalled = False  # no worker reports progress: it ends once the digest is known
        self._reported = 0
        self._progress_at = now
        self._patience = patience
        self._burst = max(1, min(BURST_BYTES // version.plan.chunk_bytes, queue))  # in chunks

    def report(self, chunks: int, now: float) -> None:
        """Note that a worker has this many chunks."""
        if chunks > self._reported:
            self._reported, self._progress_at = chunks, now

    @property
    def ready(self) -> bool:
        """True if a chunk, or the end, can be sent now."""
        if self.stalled or self.next == self._count:
            return not self.done and bool(self.version.target.chunks.digest)
        chunks, within = self.version.chunks, self.next < self._reported + PUSH_CHUNKS
        return within and (chunks.whole or chunks.has(self.next))

    def step(self, now: float) -> list[Effect]:
        """Push the next chunks; after the last, or if the push stalls, the end."""  # P7
        if not (self.stalled or self.next == self._count):
            chunks = self.version.chunks
            if not (chunks.whole or chunks.has(self.next)):
                self._progress_at = now  # it waits for the chunk, not for workers
            self.stalled = now - self._progress_at >= self._patience
            return self._next(now)
        self.done = bool(self.version.target.chunks.digest)
        patch = self.version.patch is not None  # then the end is only for that patch (D7)
        topic = self.topic if patch else control_topic(self.version.target.model)
        return [Broadcast(topic, end_of(self.version))] if self.done else []

    @property
    def needs_digest(self) -> bool:
        """True if it stalled before all chunks were hashed."""
        hashed = self.next == self._count or bool(self.version.target.chunks.digest)
        return self.stalled and not hashed

    def _next(self, now: float) -> list[Effect]:
        first, chunks = self.next, self.version.chunks
        last = min(first + self._burst, self._count, self._reported + PUSH_CHUNKS)
        if chunks.whole:
            self.next = last
        while self.next < last and chunks.has(self.next):
            self.next += 1
        if self.next > first:
            self._progress_at = now
        return [BroadcastChunk(self.version, i, self.topic) for i in range(first, self.next)]
