"""Manages the memory into which a publisher copies each version of a model (a snapshot).

Theory of operation: a block of memory is reused from version to version. It holds the snapshot of
one version at a time, and is always in one of five states. Only `Snapshot.state` computes the
state; all other code reads this property.

    state        owner                                ends by                  then
    free         the pool                             `Pool.take`              held
    held         the thread that fills the block,     `make_reclaimable`       reclaimable
                 then the publisher's machine         `release`                draining
    reclaimable  none                                 `take_back` (machine)    held
                                                      `reclaim` (next publish) draining
    draining     sockets that still send from it      the last one finishes    free
    kept         keepers, such as the disk's writer   the last `let_go`        (see below)

Three facts determine the state, all under the pool's lock: the snapshot's phase (`PHASES`), which
says whether the bytes belong to a version; the number of keepers; and a weak reference, which says
whether a socket still has a view of the bytes. A reclaimable block goes to the first caller of
`take_back` or `reclaim`. A kept block's phase may change; after the last `let_go`, phase and weak
reference give its state. The table does not show workers on this host: such a worker may still copy
from a block that is free here. Its file lock then makes `MemoryBlock.claim` return False.

The publisher's machine records another phase, that of each *version* (`publisher/phases.py`). The
two phases meet only in `Snapshot.take_back`: if it returns False, the block was reclaimed, and the
version is *overwritten*.

`Pool.take` returns a free block, the reclaimable block, or a new block, without waiting for another
thread. If the maximum number of blocks is in use, `take` asks the machine to evict a version, and
waits until that version's block is free.

In a steady state one block is enough: once every worker has its version, the next version
overwrites the block. If a worker is still receiving the old version, the next version goes into
another block. There are at most three blocks, not counting those that are kept. A message in a
socket's queue refers to its snapshot weakly. Once the snapshot is released, the socket skips such
messages; of a partly sent message, it copies the unsent part. So each block can be reclaimed soon.
"""

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ...codecs.overflow import LostValues
from ...codecs.state import State, Writer
from ..deadline import Deadline
from ..errors import DeadlineError
from ..headers import Buffer
from ..limits import SNAPSHOTS_MAX
from ..messages import Shared
from ..sealer import SealInUseError
from .pages import Check, memory_of
from .segment import Segment, unshared

if TYPE_CHECKING:
    from ...codecs.device_copies import Arriving

log = logging.getLogger("weightbus.publisher")

NEVER = Deadline(math.inf, "")
PATIENCE = 1.0  # seconds to wait until sockets release a snapshot or the machine evicts one
REUSE_PATIENCE = 0.05  # seconds to wait for the latest version's block before another is used
# deadline for a transfer from a device; a GiB takes some hundredths of a second
CROSSING_SECONDS = 60.0
_HANGS = f"a device has not handed over the bytes of a version within {CROSSING_SECONDS:g} s"
RETRY_SECONDS = 0.05  # seconds before the machine is asked again, if it evicted no version

# Whether the bytes of a snapshot belong to a version.
Phase = Literal["held", "reclaimable", "released"]
Event = Literal["no-readers", "taken-back", "reclaimed", "released"]

PHASES: dict[Phase, dict[Event, Phase]] = {
    "held": {
        "no-readers": "reclaimable",
        "released": "released",
    },
    "reclaimable": {
        "taken-back": "held",
        "reclaimed": "released",
        "released": "released",
    },
    "released": {},
}

BlockState = Literal["free", "held", "reclaimable", "draining", "kept"]


class MemoryBlock:
    """A block of memory of one size.

    Args:
        nbytes: The block's size.
        share: Whether workers on this host may read the block, if that is possible.
        second: Whether a state on one device is first copied to a second copy on that device, which
            workers there may read.
        check: Called between the steps of the allocation; may raise.

    Attributes:
        data: The memory.
        shared: The path and token by which workers on this host find the block, if it is shared.
        retired: Whether no further version may be written to the block.
        requested: Whether bytes were ever requested while only a second copy existed.
        late: Whether the state that was written last exists only in the second copy.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        share: bool,
        second: bool = False,
        check: Check = lambda: None,
    ) -> None:
        self.retired, self.requested, self._second = False, False, second
        self.late = False
        self._crossing = threading.Lock()
        self._segment = _segment(nbytes, check) if share else None
        self.shared = None if self._segment is None else self._segment.shared
        self.data = (
            memory_of(nbytes, touched=True, check=check)
            if self._segment is None
            else self._segment.data
        )
        self._writer: Writer | None = None

    def ready(self, state: State, layout: Layout) -> None:
        """Prepare to write states of this layout, so that the first write is fast."""
        self._new_writer(layout).ready(state)

    def _new_writer(self, layout: Layout) -> Writer:
        self._writer = Writer(layout, self.data, second=self._second)
        return self._writer

    def write(
        self, state: State, layout: Layout, check: Check, chunk_bytes: int, *, late: bool
    ) -> "NDArray[np.uint32] | Arriving":
        """Copy a state into the memory; see `Snapshot.write`."""
        writer = self._writer
        if writer is None or writer.section.layout is not layout:
            writer = self._new_writer(layout)
        late = late and self._segment is not None
        found = writer.begin(state, check, chunk_bytes, late=late)
        if self._second and self._segment is not None:
            self.late = late and not chunk_bytes and bool(writer.note)
            self._segment.note(writer.note)
        return found

    def count_lost(self, state: State) -> LostValues:
        """Return how many values of the last written state were lost in narrower dtypes."""
        return {} if self._writer is None else self._writer.count_lost(state)

    def arrive(self) -> None:
        """Transfer the bytes from the device, if they exist only in the second copy."""
        if not self.late:
            return
        with self._crossing:
            if self.late and self._writer is not None and self._segment is not None:
                self.requested = True  # so the next version is transferred immediately
                self._writer.cross(Deadline(time.monotonic() + CROSSING_SECONDS, _HANGS).check)
                self._segment.arrived()
                self.late = False

    def claim(self) -> bool:
        """Lock the block, to overwrite it; return False if a worker is copying from it."""
        if self._segment is not None and not self._segment.claim():
            return False
        self.late = False
        return True

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        """Stamp the block, so that workers may read it; return False if a worker copies from it."""
        if self._segment is None:
            return True
        if not self._segment.claim():
            return False
        self._segment.release(model, epoch, version, late=self.late)
        return True


def _segment(nbytes: int, check: Check) -> Segment | None:
    """Return a new segment; None, after a warning, if there is no shared memory."""
    try:
        return Segment(nbytes, check)
    except DeadlineError:  # which is an OSError, too
        raise
    except OSError as error:
        unshared.warn(error.strerror or error, time.monotonic())
        return None


class Snapshot:
    """The bytes of one version, from before they are written until their block is free.

    Args:
        block: The memory of the bytes.
        lock: The pool's lock, under which phase and keepers change. It is held only briefly.
        freed: A condition of that lock, notified when the block may be free. (`lock` is an argument
            of its own, since it is acquired faster than through the condition.)
    """

    def __init__(
        self, block: MemoryBlock, lock: threading.RLock, freed: threading.Condition
    ) -> None:
        self.shared = block.shared
        # Set to None at the release, since the pool owns the blocks.
        self._block: MemoryBlock | None = block
        self._lock, self._freed = lock, freed
        self._phase: Phase = "held"
        self._keepers = 0
        # A view of its own: sockets that send from it keep only the view alive.
        self._view: NDArray[np.uint8] | None = block.data.view()
        self._view_ref = weakref.ref(self._view)
        self._sent_views: dict[int, memoryview] = {}  # views for sending, by offset

    @property
    def state(self) -> BlockState:
        """The state of the block while this is the last snapshot in it."""
        if self._keepers:
            return "kept"
        if self._phase != "released":
            return self._phase
        return "free" if self._view_ref() is None else "draining"

    def _move(self, event: Event) -> bool:
        """Change the phase as the table says; return False if it has no such transition."""
        with self._lock:
            after = PHASES[self._phase].get(event)
            if after is None:
                return False
            self._phase = after
            if after == "released":
                self._block = self._view = None
                self._sent_views.clear()
                if (sent := self._view_ref()) is not None:  # sockets may drop the view at any time
                    self._view_ref = weakref.ref(sent, partial(_notify, self._freed))
                del sent
                self._freed.notify_all()
            return True

    # Methods for the owner: a publishing thread, then the publisher's thread.

    def _held(self) -> tuple[MemoryBlock, NDArray[np.uint8]]:
        if self._phase != "held" or self._block is None or self._view is None:
            raise AssertionError(f"the snapshot is {self._phase}: its bytes must not be used")
        return self._block, self._view

    @property
    def data(self) -> NDArray[np.uint8]:
        """The memory, which the owner may write."""
        return self._held()[0].data

    def write(
        self,
        state: State,
        layout: Layout,
        check: Check = lambda: None,
        chunk_bytes: int = 0,
        *,
        late: bool = False,
    ) -> "NDArray[np.uint32] | Arriving":
        """Copy a state into the snapshot. `check` is called between steps, and may raise.

        With `late`, only a second copy on a device is made, if that is possible. The bytes are
        transferred to this snapshot once some of them are requested.

        Returns:
            The CRC-32C of each chunk, if `chunk_bytes` is not 0. For a state on devices, an object
            that the caller must wait for before it uses this snapshot.
        """
        return self._held()[0].write(state, layout, check, chunk_bytes, late=late)

    def count_lost(self, state: State) -> LostValues:
        """Return how many finite values of a state are not finite in this snapshot."""
        return self._held()[0].count_lost(state)

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        """Let workers on this host read the snapshot; return False if a worker copies from it."""
        return self._held()[0].stamp(model, epoch, version)

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return a range of the bytes, for immediate use."""
        block, view = self._held()
        block.arrive()
        return view.data[begin:end]

    def chunk(self, begin: int, end: int) -> Buffer:
        """Return a view of a range of the bytes, to be sent.

        A queue must refer to the view weakly; the snapshot keeps the view alive.
        """
        block, whole = self._held()
        if block.late:
            block.arrive()
        return self._sent_views.setdefault(begin, whole.data[begin:end])

    def make_reclaimable(self) -> None:
        """Make the memory reclaimable by the next publish."""
        with self._lock:  # faster than `_move`, since each publish does this
            self._phase = PHASES[self._phase].get("no-readers", self._phase)

    def release(self) -> None:
        """Release the memory, whose bytes are not needed any more."""
        self._move("released")

    # Methods for the machine.

    @property
    def exists(self) -> bool:
        """True until the memory is released or reclaimed for another version."""
        return self._phase != "released"

    def take_back(self) -> bool:
        """End `make_reclaimable`: return False if the memory was reclaimed already."""
        return self._move("taken-back") or self._phase == "held"

    # Methods for a thread that needs memory (`reclaim`), and for any thread.

    def reclaim(self) -> bool:
        """Reclaim the memory if it is reclaimable and not kept; return whether it was reclaimed."""
        with self._lock:
            return not self._keepers and self._move("reclaimed")

    def keep(self) -> NDArray[np.uint8] | None:
        """Return the bytes, which stay unchanged until `let_go`; None if they were released.

        There may be any number of keepers. The publisher uses other memory meanwhile.
        """
        with self._lock:
            block = self._block
            if block is None:
                return None
            self._keepers += 1
        try:
            block.arrive()  # may wait for a device, so without the lock
        except BaseException:
            self.let_go()
            raise
        return block.data

    def let_go(self) -> None:
        """Undo one `keep`: afterwards the bytes may be overwritten."""
        with self._lock:
            self._keepers -= 1
            self._freed.notify_all()


def _notify(freed: threading.Condition, _view: object) -> None:
    with freed:
        freed.notify_all()


# Asks the machine to evict the version of one of these snapshots; returns whether it did. The
# arguments are those of `no_room`; `timeout` is in seconds.
MakeRoom = Callable[[Collection[Snapshot], bool, float], bool]


def no_room(_among: Collection[Snapshot], _replaces_latest: bool, _timeout: float) -> bool:
    """Evict nothing: a `MakeRoom` that returns False."""
    return False


class Pool:
    """The memory of one model. Only one thread at a time may call `take`.

    Args:
        model: The model's id.
        patience: Seconds to wait for memory if all of it is in use.
        share: Whether workers on this host may read the memory.
        second: Whether a state on one device is first copied to a second copy on that device.

    Attributes:
        second: The argument `second`.
    """

    def __init__(
        self,
        model: str,
        patience: float = PATIENCE,
        *,
        share: bool = False,
        second: bool = False,
    ) -> None:
        self._model, self._patience = model, patience
        self._share, self.second = share, second
        self._bytes_requested = False
        # each block, with the last snapshot in it; None: it was never filled
        self._blocks: dict[MemoryBlock, Snapshot | None] = {}
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._surplus = False  # whether some blocks may not be needed any more

    def __len__(self) -> int:
        return len(self._blocks)

    def shrink(self) -> None:
        """Free unused blocks now, and the latest version's block once there is a newer version."""
        for block in self._free():
            del self._blocks[block]
        self._surplus = True

    def reserve(self, state: State, layout: Layout) -> Shared | None:
        """Allocate a block for such states now, so that the first version need not wait.

        Returns:
            The path and token for workers on this host; None if memory is not shared, or if blocks
            exist already.
        """
        if self._blocks:
            return None
        nbytes = layout.nbytes
        block = self._block(nbytes, lambda: None)
        block.ready(state, layout)
        self._blocks[block] = None
        return block.shared

    def take(
        self,
        nbytes: int,
        make_room: MakeRoom = no_room,
        *,
        replaces_latest: bool,
        deadline: Deadline = NEVER,
    ) -> Snapshot:
        """Return memory of this size, which must be written before it is published.

        Args:
            nbytes: The size.
            make_room: Called to evict a version if all memory is in use.
            replaces_latest: Whether the new version is for every worker and needs no commit. Then
                it may overwrite the latest version, unless a worker is receiving that version.
            deadline: The time by which memory must be available.

        Raises:
            WeightBusError: All memory stayed in use.
            DeadlineError: The deadline has passed.
        """
        if self._surplus:
            self.shrink()
            self._surplus = False
        block = self._reuse(nbytes)
        if block is None and replaces_latest:
            block = self._reclaim_latest(nbytes)
        # Kept blocks do not count. Once they have no keeper, there may be too many blocks.
        while block is None and self._counted() >= SNAPSHOTS_MAX and not self._free():
            self._wait(make_room, replaces_latest, min(self._patience, deadline.left()))
            block = self._reuse(nbytes)
        if block is None:
            block = self._allocate(nbytes, deadline)
        snapshot = self._blocks[block] = Snapshot(block, self._lock, self._freed)
        return snapshot

    def retire(self) -> None:
        """Write no later version to existing blocks, so that processes that map them read none.

        Any thread may call this. A state that is being written now is still readable.
        """
        for block in list(self._blocks):
            block.retired = True

    def _block(self, nbytes: int, check: Check) -> MemoryBlock:
        return MemoryBlock(nbytes, share=self._share, second=self.second, check=check)

    @property
    def second_suffices(self) -> bool:
        """True if a new version may be in the second copy alone: no worker requested a segment."""
        requested = self._bytes_requested or any(block.requested for block in self._blocks)
        self._bytes_requested = requested
        return self.second and not requested

    def _used(self, *states: BlockState) -> list[Snapshot]:
        """Return the snapshots whose blocks are in these states."""
        return [s for s in self._blocks.values() if s is not None and s.state in states]

    def _counted(self) -> int:
        return len(self._blocks) - len(self._used("kept"))

    def _free(self) -> list[MemoryBlock]:
        return [b for b, s in self._blocks.items() if s is None or s.state == "free"]

    def _reuse(self, nbytes: int) -> MemoryBlock | None:
        """Return an unused block of this size, if any; free unused blocks of other sizes."""
        for block, snapshot in [*self._blocks.items()]:
            if snapshot is not None and snapshot.state != "free":
                continue
            if block.data.nbytes != nbytes or block.retired:
                del self._blocks[block]
            elif block.claim():
                return block
        return None

    def _reclaim_latest(self, nbytes: int) -> MemoryBlock | None:
        """Reclaim the block of the latest version, and return a free block of `nbytes` bytes.

        This is the reclaimed block if sockets release it soon, else another block. The result is
        None if no block is free.
        """
        for block, snapshot in self._blocks.items():
            if snapshot is not None and snapshot.reclaim():
                fits = block.data.nbytes == nbytes and not block.retired
                if fits and snapshot.state == "free" and block.claim():
                    return block
                other = self._reuse(nbytes)
                if other is None and snapshot.state != "free":
                    self._wait_until(self._any_free, min(REUSE_PATIENCE, self._patience))
                    other = self._reuse(nbytes)
                return other
        return None

    def _allocate(self, nbytes: int, deadline: Deadline) -> MemoryBlock:
        """Allocate a block. If there are too many, drop a free one, which a worker has locked."""
        if self._counted() >= SNAPSHOTS_MAX:
            del self._blocks[self._free()[0]]
        block = self._block(nbytes, deadline.check)
        self._blocks[block] = None
        block.claim()
        return block

    def _wait(self, make_room: MakeRoom, replaces_latest: bool, patience: float) -> None:
        """Wait until a block is free: sockets release one, or the machine evicts a version.

        Raises:
            WeightBusError: No block was free in time.
        """
        end = time.monotonic() + patience
        waiting = bool(self._used("draining"))
        while not self._any_free():
            left = max(0.0, end - time.monotonic())
            evicted = not waiting and make_room(
                self._used("held", "reclaimable"), replaces_latest, left
            )
            self._wait_until(
                self._any_free, min(left, patience / 4 if evicted or waiting else RETRY_SECONDS)
            )
            waiting = False  # next, ask for another block instead of waiting for sockets
            if not (evicted or left or self._any_free()):
                raise WeightBusError(
                    f"all {len(self._blocks)} copies of {self._model!r} are in use: slow workers "
                    "are still receiving them, or they wait for a commit; publish less often, or "
                    "wait for the publishes under way"
                )

    def _any_free(self) -> bool:
        return bool(self._free())

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        with self._freed:
            return self._freed.wait_for(condition, seconds)


class _SealedBlock:
    """Memory for the encrypted bytes of one version."""

    def __init__(self, nbytes: int) -> None:
        self.memory = memory_of(nbytes)
        self.surplus = False  # whether the last allocation did not need this block
        self._view: weakref.ref[NDArray[np.uint8]] | None = None

    @property
    def free(self) -> bool:
        """True if no view of the memory exists any more."""
        return self._view is None or self._view() is None

    def take(self) -> NDArray[np.uint8]:
        """Return a view of the memory. Once the view is garbage-collected, the block is free."""
        view = self.memory.view()
        self._view, self.surplus = weakref.ref(view), False
        return view


class SealedMemory:
    """Reusable memory for the encrypted versions of each model of one publisher.

    Each model has at most as many blocks (`_SealedBlock`) as snapshots. An unused block is freed at
    the second allocation that does not need it.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, list[_SealedBlock]] = {}

    def take(self, model: str, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of this size, which is free again once no reference to it is left.

        Raises:
            MemoryError: There is not enough memory.
            SealInUseError: The maximum number of blocks is in use.
        """
        before = self._blocks.get(model, [])
        used = [block for block in before if not block.free]
        free = [block for block in before if block.free and block.memory.nbytes == nbytes]
        if not free and len(used) >= SNAPSHOTS_MAX:
            raise SealInUseError(
                f"sealed bytes of {SNAPSHOTS_MAX} versions of {model!r} are being sent: publish "
                "less often, or wait until slow workers have them"
            )
        taken = free.pop(0) if free else _SealedBlock(nbytes)
        kept = [block for block in free if not block.surplus]
        for block in kept:
            block.surplus = True
        self._blocks[model] = [taken, *used, *kept]
        return taken.take()
