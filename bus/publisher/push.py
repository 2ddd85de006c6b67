"""Pushing a version's chunks on PUB, at the pace of the fastest worker.

PUB drops silently whatever does not fit into a subscriber's queue. So a push runs at most a window
ahead of what the fastest worker has reported: that worker loses nothing, workers as fast as it
lose nothing either, and slower ones lose chunks (which they fetch) rather than hold up the others.
When nobody reports anything for a while the push ends early: pulling always works.

A chunk is hashed when it is pushed, and few are pushed at a time, as connections have room for
them: no hashed byte waits for others to be hashed, and it is still in the cache when it is sent.
"""

from ..limits import PUSH_CHUNKS
from ..memory.version import Retired, Version
from ..messages import control_topic, data_topic
from .effects import Broadcast, Effect
from .offers import chunk_of, end_of

BURST_BYTES = 2**20  # pushed before other work gets a turn


class Push:
    """One version on its way out on PUB."""

    def __init__(self, version: Version, now: float, patience: float) -> None:
        self.version = version
        self.topic = data_topic(version.model)
        self.next = 0
        self.done = False
        self._reported = 0
        self._moved_at = now
        self._patience = patience
        self._burst = max(1, BURST_BYTES // version.plan.chunk_bytes)  # in chunks

    def report(self, chunks: int, now: float) -> None:
        """Some worker has so many chunks."""
        if chunks > self._reported:
            self._reported, self._moved_at = chunks, now

    @property
    def ready(self) -> bool:
        """Whether a chunk, or the end, may go out now."""
        return not self.done and (self.next < self._limit() or self.next == self.version.plan.count)

    def _limit(self) -> int:
        return min(self.version.plan.count, self._reported + PUSH_CHUNKS)

    def step(self, now: float) -> list[Effect]:
        """Push the next chunks, and the end after the last or when nobody follows."""
        v, effects = self.version, list[Effect]()
        stalled = now - self._moved_at >= self._patience
        try:
            for index in range(self.next, min(self.next + self._burst, self._limit())):
                effects.append(Broadcast(self.topic, *chunk_of(v, index)))
                self.next, self._moved_at = index + 1, now
            if self.next == v.plan.count or stalled:
                self.done = True
                effects.append(Broadcast(control_topic(v.model), end_of(v)))
        except Retired:
            self.done = True
        return effects
