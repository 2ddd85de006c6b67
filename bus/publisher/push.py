"""Pushing versions' chunks on PUB, at the pace of the fastest worker.

PUB drops silently whatever does not fit into a subscriber's queue. So a push runs at most a window
ahead of what the fastest worker has reported: that worker loses nothing, workers as fast as it
lose nothing either, and slower ones lose chunks (which they fetch) rather than hold up the others.
When nobody reports anything for a while the push ends early: pulling always works.

A chunk that nobody has hashed is hashed when it is pushed, and few are pushed at a time, once some
connection has room: what goes out at once is still in the cache, and no more than a burst waits.
The end says what all of them hash to, so it goes out in the step after the last.

Of a version that is on its way here, a push goes as far as what is here.
"""

from ..limits import PUSH_CHUNKS
from ..messages import control_topic
from .effects import Broadcast, BroadcastChunk, Effect
from .offers import chunks_topic, end_of
from .version import Chunked

BURST_BYTES = 2**22  # pushed before other work gets a turn


class Push:
    """One version, or a patch that leads to it, on its way out on PUB."""

    def __init__(self, version: Chunked, now: float, patience: float, queue: int) -> None:
        self.version = version
        self.topic = chunks_topic(version)
        self.next, self._count = 0, version.plan.count
        self.done = False
        self.stalled = False  # nobody follows: it ends as soon as its digest is known
        self._reported = 0
        self._moved_at = now
        self._patience = patience
        self._burst = max(1, min(BURST_BYTES // version.plan.chunk_bytes, queue))  # in chunks

    def report(self, chunks: int, now: float) -> None:
        """Some worker has so many chunks."""
        if chunks > self._reported:
            self._reported, self._moved_at = chunks, now

    @property
    def ready(self) -> bool:
        """Whether a chunk, or the end, may go out now."""
        if self.stalled or self.next == self._count:
            return not self.done and bool(self.version.target.chunks.digest)
        chunks, within = self.version.chunks, self.next < self._reported + PUSH_CHUNKS
        return within and (chunks.whole or chunks.has(self.next))

    def step(self, now: float) -> list[Effect]:
        """Push the next chunks, or the end after the last or when nobody follows."""  # P7
        if not (self.stalled or self.next == self._count):
            chunks = self.version.chunks
            if not (chunks.whole or chunks.has(self.next)):
                self._moved_at = now  # nobody can follow
            self.stalled = now - self._moved_at >= self._patience
            return self._next(now)
        self.done = bool(self.version.target.chunks.digest)
        patch = self.version.patch is not None  # its end is none of all of the version (D7)
        topic = self.topic if patch else control_topic(self.version.target.model)
        return [Broadcast(topic, end_of(self.version))] if self.done else []

    @property
    def needs_digest(self) -> bool:
        """Whether it ends before all chunks went out, and so were hashed."""
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
            self._moved_at = now
        return [BroadcastChunk(self.version, i, self.topic) for i in range(first, self.next)]
