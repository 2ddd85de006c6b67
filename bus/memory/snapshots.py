"""The memory that a publisher snapshots a model into, used again from version to version.

In a steady state one arena is enough: when every worker has the version it holds, the next version
is written over it. A worker that is still receiving the old one gets its time: the next version
then goes into an arena of its own. There are at most three. The third gives out copies of its
chunks only, so that it can always be taken back; a version that is still being received is given
up last, and never the latest one unless it is being replaced.
"""

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ...codecs.state import State, Writer
from ..complaints import Complaints
from ..deadline import Deadline
from ..errors import DeadlineError
from ..limits import ARENAS_MAX
from ..messages import Shared
from .segment import Segment
from .staging import Check, memory_of
from .version import Version

log = logging.getLogger("weightbus.publisher")
_unshared = Complaints(log, "no shared memory (%s): workers on this host use the network too")

NEVER = Deadline(math.inf, "")
PATIENCE = 1.0  # seconds that sockets get to let go of a version, or the machine to take one in
REUSE_PATIENCE = 0.05  # seconds of it that are spent before another arena is made
LOOK = 0.005  # seconds between two looks at versions that were handed over a moment ago

# What may be given up for the next version, the least needed first.
_RANK = {"old": 1, "targeted": 2, "latest": 3, "pending": 4}


class Arena:
    """A block of memory and the version in it.

    Args:
        nbytes: Its size.
        share: Whether workers on this host may read it; it is private if there is no way.
        check: Called between the steps of taking it; may raise.
    """

    def __init__(self, nbytes: int, *, share: bool, check: Check = lambda: None) -> None:
        self.version: Version | None = None
        self._segment = _segment(nbytes, check) if share else None
        self.data = (
            memory_of(nbytes, touched=True, check=check)
            if self._segment is None
            else self._segment.data
        )
        self._writer: Writer | None = None
        self._claimed = threading.Lock()  # no version is numbered anew while its memory is claimed

    def write(self, state: State, layout: Layout, check: Check = lambda: None) -> None:
        """Copy a state into the memory; `check` is called between steps."""
        if self._writer is None or self._writer.section.layout is not layout:
            self._writer = Writer(layout, self.data)
        self._writer.write(state, check)

    @property
    def shared(self) -> Shared | None:
        """Where workers on this host find the memory."""
        return self._segment.shared if self._segment is not None else None

    def release(self, version: Version) -> None:
        """The version in it has its number, or another one: let workers read it by that."""
        with self._claimed:
            if self._segment is None or version.shared is None:
                return
            if not version.alive or not self._segment.claim():
                version.shared = (
                    None  # the old number stays: it is read over the network by the new
                )
                return
            self._segment.release(version.model, version.epoch, version.version)

    def releaser(self) -> Callable[[Version], None]:
        """Return `release` for a version to call: weakly, since the version is held here."""
        known = weakref.WeakMethod(self.release)

        def release(version: Version) -> None:
            method = known()
            if method is not None:
                method(version)

        return release

    @property
    def held(self) -> bool:
        """Whether somebody copies from it who may take long: nobody waits for it."""
        return self.version is not None and self.version.held

    @property
    def free(self) -> bool:
        """Whether neither the publisher nor its sockets need it."""
        return self.version is None or not (self.version.alive or self.version.in_hands)

    def claim(self) -> bool:
        """Take it to be overwritten; False if a worker is copying from it this moment."""
        with self._claimed:
            return self._segment is None or self._segment.claim()


def _segment(nbytes: int, check: Check) -> Segment | None:
    try:
        return Segment(nbytes, check)
    except DeadlineError:  # it is an OSError, too
        raise
    except OSError as error:
        _unshared.warn(error.strerror or error, time.monotonic())
        return None


class Arenas:
    """The arenas of one model. Call it from one thread at a time.

    Args:
        model: Its name.
        chunk_bytes: Bytes of a chunk.
        patience: Seconds to wait for memory that is in use.
        share: Whether workers on this host may read it.
    """

    def __init__(
        self, model: str, chunk_bytes: int, patience: float = PATIENCE, *, share: bool = False
    ) -> None:
        self._model, self._chunk_bytes, self._patience = model, chunk_bytes, patience
        self._share = share
        self._arenas: list[Arena] = []
        self._released = threading.Condition()

    def __len__(self) -> int:
        return len(self._arenas)

    def reserve(self, nbytes: int) -> Arena | None:
        """Make an arena of this size now, so that the first version need not wait for it.

        Returns:
            It; None if there are arenas already.
        """
        if self._arenas:
            return None
        self._arenas.append(Arena(nbytes, share=self._share))
        return self._arenas[0]

    def take(
        self,
        layout: Layout,
        *,
        replaces_latest: bool,
        chunk_bytes: int | None = None,
        deadline: Deadline = NEVER,
    ) -> tuple[Version, Arena]:
        """Return a new version and its arena, which is to be written before it is published.

        Args:
            layout: What will lie there.
            chunk_bytes: Bytes of its chunks, if they are not to be those of other versions.
            replaces_latest: The new version is for every worker and needs no commit, so the
                latest one may be overwritten if nobody is receiving it.
            deadline: When memory must be there.

        Raises:
            WeightBusError: All arenas stayed in use.
            DeadlineError: There was no time to take the memory.
        """
        arena = self._reuse(layout.nbytes, replaces_latest)
        if arena is None and sum(not arena.held for arena in self._arenas) >= ARENAS_MAX:
            arena = self._evict(replaces_latest, min(self._patience, deadline.left()))
            if arena.data.nbytes != layout.nbytes or not arena.claim():
                self._arenas.remove(arena)
                arena = None
        if arena is None:
            arena = Arena(layout.nbytes, share=self._share, check=deadline.check)
            self._arenas.append(arena)
            arena.claim()
        copied = self._arenas.index(arena) >= ARENAS_MAX - 1
        arena.version = Version(
            self._model,
            layout,
            arena.data,
            chunk_bytes or self._chunk_bytes,
            copied=copied,
            shared=arena.shared,
            on_number=arena.releaser(),
            on_release=partial(_notify, self._released),  # no method: it would hold all arenas
        )
        return arena.version, arena

    def _reuse(self, nbytes: int, replaces_latest: bool) -> Arena | None:
        for arena in list(self._arenas):
            version = arena.version
            if arena.held:
                continue
            if version is not None and version.alive:
                idle = version.role == "latest" and not version.receivers
                if not (replaces_latest and idle):
                    continue
                version.retire()
                self._wait(arena, time.monotonic() + min(REUSE_PATIENCE, self._patience))
            if arena.free and arena.data.nbytes != nbytes:
                self._arenas.remove(arena)  # of no use
            elif arena.free and arena.claim():
                return arena
        return None

    def _evict(self, replaces_latest: bool, patience: float) -> Arena:
        deadline = time.monotonic() + patience
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

        for arena in sorted((a for a in self._arenas if not a.held), key=rank):
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


def _notify(released: threading.Condition) -> None:
    with released:
        released.notify_all()
