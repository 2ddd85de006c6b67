"""Pushes the chunks of versions on the data socket, at the pace of the fastest worker.

The data socket silently drops chunks that do not fit into a subscriber's queue. So a push runs at
most `PUSH_CHUNKS` ahead of the chunks that the fastest worker has reported. Workers of that speed
lose no chunk. Slower workers lose chunks, which they fetch later, instead of delaying the others.
If no worker reports progress for a while, the push ends early, and workers fetch what they lack.

An unhashed chunk is hashed when it is pushed. Chunks are pushed in small bursts, when a connection
has room. So a chunk's bytes are still in the cache when they are sent, and at most one burst is
queued. The `end` message has the digest of all chunks, so it follows in the step after the last
chunk.

A version that is still arriving from another publisher is pushed up to its first missing chunk. Of
a version with sources, only the chunks that have arrived are pushed. (N4)
"""

from collections.abc import Iterable

from ..headers import control_topic, data_topic, patch_topic
from ..protocol_limits import PUSH_CHUNKS
from .effects import Broadcast, BroadcastChunk, Effect
from .offers import end_of
from .version import Chunked

BURST_BYTES = 2**22  # most bytes that one step pushes, so that other work is not delayed


class Push:
    """The push of one version, or of a patch to it."""

    def __init__(self, version: Chunked, now: float, patience: float, queue: int) -> None:
        self.version = version
        topic_of = data_topic if version.patch is None else patch_topic
        self.topic = topic_of(version.target.model)
        self.next, self._count = 0, version.plan.count
        self.done = False
        self.stalled = False  # whether the push ends early, since no worker reports progress
        self._skips = bool(version.target.sources)  # whether to skip chunks that are not here
        self._reported = 0  # chunks that the fastest worker has reported
        self._progress_at = now
        self._patience = patience
        # the most chunks that one step pushes
        self._burst = max(1, min(BURST_BYTES // version.plan.chunk_bytes, queue))

    def report(self, chunks: int, now: float) -> None:
        """Record a worker's report of how many chunks it has received."""
        if chunks > self._reported:
            self._reported, self._progress_at = chunks, now

    @property
    def ready(self) -> bool:
        """True if `step` can send a chunk or the `end` now."""
        if self.stalled or self.next == self._count:
            return not self.done and bool(self.version.digest)
        chunks, within = self.version.chunks, self.next < self._reported + PUSH_CHUNKS
        return within and (chunks.whole or self._skips or chunks.has(self.next))

    def step(self, now: float) -> list[Effect]:
        """Send the next chunks, or after the last chunk or a stall the `end`."""  # P7
        if not (self.stalled or self.next == self._count):
            chunks = self.version.chunks
            if not (chunks.whole or self._skips or chunks.has(self.next)):
                self._progress_at = now  # the push waits for the chunk, not for workers
            self.stalled = now - self._progress_at >= self._patience
            return self._next(now)
        self.done = bool(self.version.digest)
        patch = self.version.patch is not None  # a patch's `end` is sent on its own topic (D7)
        topic = self.topic if patch else control_topic(self.version.target.model)
        return [Broadcast(topic, end_of(self.version))] if self.done else []

    @property
    def needs_digest(self) -> bool:
        """True if the push stalled before all chunks were hashed."""
        hashed = self.next == self._count or bool(self.version.digest)
        return self.stalled and not hashed

    def _next(self, now: float) -> list[Effect]:
        first, chunks = self.next, self.version.chunks
        last = min(first + self._burst, self._count, self._reported + PUSH_CHUNKS)
        if chunks.whole or self._skips:
            self.next = last
        while self.next < last and chunks.has(self.next):
            self.next += 1
        if self.next > first:
            self._progress_at = now
        indexes: Iterable[int] = range(first, self.next)
        if self._skips:
            indexes = filter(chunks.has, indexes)
        return [BroadcastChunk(self.version, i, self.topic) for i in indexes]
