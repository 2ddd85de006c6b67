"""The memory that a publisher snapshots a model into, used again from version to version.

In a steady state one arena is enough: when every worker has the version it holds, the next version
is written over it. A worker that is still receiving the old one gets its time: the next version
then goes into an arena of its own. There are at most three. The third gives out copies of its
chunks only, so that it can always be taken back; a version that is still being received is given
up last, and never the latest one unless it is being replaced.
"""

import threading
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..codecs.errors import WeightBusError
from ..codecs.layout import Layout
from ..codecs.state import State, Writer
from .limits import ARENAS_MAX
from .version import Version

PATIENCE = 1.0  # seconds that sockets get to let go of a version, or the machine to take one in
REUSE_PATIENCE = 0.05  # seconds of it that are spent before another arena is made
LOOK = 0.005  # seconds between two looks at versions that were handed over a moment ago

# What may be given up for the next version, the least needed first.
_RANK = {"old": 1, "targeted": 2, "latest": 3, "pending": 4}


@dataclass(slots=True, eq=False)
class Arena:
    """A block of memory and the version in it."""

    data: NDArray[np.uint8]
    version: Version | None = None
    writer: Writer | None = None  # of the layout that was written last

    def write(self, state: State, layout: Layout) -> None:
        """Copy a state into the memory."""
        known = self.writer.section if self.writer is not None else None
        if known is None or known.layout is not layout or known.data is not self.data:
            self.writer = Writer(layout, self.data)
        self.writer.write(state)  # type: ignore[union-attr] # set just above

    @property
    def free(self) -> bool:
        """Whether it may be overwritten."""
        return self.version is None or not (self.version.alive or self.version.in_hands)


class Arenas:
    """The arenas of one model. Call it from one thread at a time.

    Args:
        model: Its name.
        chunk_bytes: Bytes of a chunk.
        patience: Seconds to wait for memory that is in use.
    """

    def __init__(self, model: str, chunk_bytes: int, patience: float = PATIENCE) -> None:
        self._model, self._chunk_bytes, self._patience = model, chunk_bytes, patience
        self._arenas: list[Arena] = []
        self._released = threading.Condition()

    def __len__(self) -> int:
        return len(self._arenas)

    def take(self, layout: Layout, *, replaces_latest: bool) -> tuple[Version, Arena]:
        """Return a new version and its arena, which is to be written before it is published.

        Args:
            layout: What will lie there.
            replaces_latest: The new version is for every worker and needs no commit, so the
                latest one may be overwritten if nobody is receiving it.

        Raises:
            WeightBusError: All arenas stayed in use.
        """
        self._arenas = [a for a in self._arenas if not a.free or a.data.nbytes == layout.nbytes]
        arena = self._reuse(replaces_latest) or self._grow(layout.nbytes)
        if arena is None:
            arena = self._evict(replaces_latest)
        if arena.data.nbytes != layout.nbytes:
            arena.data = np.empty(layout.nbytes, np.uint8)
        copied = self._arenas.index(arena) >= ARENAS_MAX - 1
        arena.version = Version(
            self._model,
            layout,
            arena.data,
            self._chunk_bytes,
            copied=copied,
            on_release=self._notify,
        )
        return arena.version, arena

    def _reuse(self, replaces_latest: bool) -> Arena | None:
        for arena in self._arenas:
            version = arena.version
            if version is not None and version.alive:
                idle = version.role == "latest" and not version.receivers
                if not (replaces_latest and idle):
                    continue
                version.retire()
                self._wait(arena, time.monotonic() + min(REUSE_PATIENCE, self._patience))
            if arena.free:
                return arena
        return None

    def _grow(self, nbytes: int) -> Arena | None:
        if len(self._arenas) >= ARENAS_MAX:
            return None
        self._arenas.append(Arena(np.empty(nbytes, np.uint8)))
        return self._arenas[-1]

    def _evict(self, replaces_latest: bool) -> Arena:
        deadline = time.monotonic() + self._patience
        while True:
            arena = self._evict_now(replaces_latest, deadline)
            if arena is not None:
                return arena
            if time.monotonic() >= deadline:
                break
            # The trainer may be faster than the machine, which takes these versions in only now.
            with self._released:
                self._released.wait(LOOK)
        raise WeightBusError(
            f"all {len(self._arenas)} copies of {self._model!r} are in use: slow workers are still "
            "receiving them, or they wait for a commit; publish less often, or wait for the "
            "publishes under way"
        )

    def _evict_now(self, replaces_latest: bool, deadline: float) -> Arena | None:
        def rank(arena: Arena) -> tuple[int, int]:
            version = arena.version
            if version is None or not version.alive:
                return 0, 0
            return _RANK[version.role], -version.version

        for arena in sorted(self._arenas, key=rank):
            if rank(arena)[0] >= (4 if replaces_latest else 3):
                break
            if arena.version is not None:
                arena.version.retire()
            if self._wait(arena, deadline):
                return arena
        return None

    def _wait(self, arena: Arena, deadline: float) -> bool:
        with self._released:
            self._released.wait_for(lambda: arena.free, deadline - time.monotonic())
        return arena.free

    def _notify(self) -> None:
        with self._released:
            self._released.notify_all()
