"""The memory that a publisher snapshots a model into, used again from version to version.

Theory of operation: a block of memory holds one snapshot, and a snapshot is in one pair of hands.

    held <──> lent         by the thread that fills it, which hands it over to the publisher's
     │          │          machine; by nobody: whoever publishes next may write over it
     └──────────┴──> over  its block is free once no socket sends from it

`take` gives a thread a block that is free, or the one that is lent, or another one, without asking
anybody. Only where as many are in use as there may be does it ask for one to be given up, which the
machine decides, and waits until it is let go.

In a steady state one block is enough: when every worker has the version in it, the next version is
written over it. A worker that is still receiving the old one gets its time: the next version then
goes into a block of its own. There are at most three. Messages that wait in sockets refer to a
snapshot weakly, and sockets copy what is half sent of one that is over: so each of the three can be
taken back, and soon. Whoever reads a snapshot for long, such as the disk, keeps its block; that one
does not count.
"""

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ...codecs.overflow import Found
from ...codecs.state import State, Writer
from ..deadline import Deadline
from ..errors import DeadlineError
from ..event_log import RateLimitedWarning
from ..limits import SNAPSHOTS_MAX
from ..messages import Buffer, Shared
from ..sealer import InUseError
from .pages import Check, memory_of
from .segment import Segment

if TYPE_CHECKING:
    from ...codecs.device_copies import Arriving

log = logging.getLogger("weightbus.publisher")
_unshared = RateLimitedWarning(
    log, "no shared memory (%s): workers on this host use the network too"
)

NEVER = Deadline(math.inf, "")
PATIENCE = 1.0  # seconds that sockets get to let go of a snapshot, or the machine to give one up
REUSE_PATIENCE = 0.05  # seconds of it that are spent before another block is made
CROSSING_SECONDS = 60.0  # that a device gets for bytes that are there; a GiB takes some hundredths
_HANGS = f"a device has not handed over the bytes of a version within {CROSSING_SECONDS:g} s"
LOOK = 0.05  # seconds until the machine is asked again where it could give none up

Phase = Literal["held", "lent", "over"]


class MemoryBlock:
    """Memory of one size.

    Args:
        nbytes: Its size.
        share: Whether workers on this host may read it; it is private if there is no way.
        second: Whether a state of one device is copied by way of a second copy there, from which
            workers on that device may read it.
        check: Called between the steps of taking it; may raise.

    Attributes:
        data: The memory.
        shared: Where workers on this host find it.
        retired: Nothing is to be written there any more.
        asked: Somebody has wanted bytes of which there was only a second copy.
        late: There is only a second copy of what was written last.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        share: bool,
        second: bool = False,
        check: Check = lambda: None,
    ) -> None:
        self.retired, self.asked, self._second = False, False, second
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
        """Do once what can be done before such a state is written."""
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

    def lost(self, state: State) -> Found:
        """Count the values of a state, as it was just written, that its dtype here cannot hold."""
        return {} if self._writer is None else self._writer.lost(state)

    def arrive(self) -> None:
        """Have the bytes here, if there is only a second copy of them."""
        if not self.late:
            return
        with self._crossing:
            if self.late and self._writer is not None and self._segment is not None:
                self.asked = True  # so the next one crosses at once
                self._writer.cross(Deadline(time.monotonic() + CROSSING_SECONDS, _HANGS).check)
                self._segment.arrived()
                self.late = False

    def claim(self) -> bool:
        """Take it to be overwritten; False if a worker is copying from it this moment."""
        if self._segment is not None and not self._segment.claim():
            return False
        self.late = False
        return True

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        """Let workers read it by this name; False if one is copying from it by another."""
        if self._segment is None:
            return True
        if not self._segment.claim():
            return False
        self._segment.release(model, epoch, version, late=self.late)
        return True


def _segment(nbytes: int, check: Check) -> Segment | None:
    try:
        return Segment(nbytes, check)
    except DeadlineError:  # it is an OSError, too
        raise
    except OSError as error:
        _unshared.warn(error.strerror or error, time.monotonic())
        return None


class Snapshot:
    """The bytes of one version, from the moment when somebody may write them.

    Args:
        block: Where they lie.
        lock: Held by whoever takes, keeps or releases it; taken sooner than by the condition.
        let_go: Of that lock: notified whenever they may have been let go, by any thread.
    """

    def __init__(
        self, block: MemoryBlock, lock: threading.RLock, let_go: threading.Condition
    ) -> None:
        self.shared = block.shared
        # The pool knows both: neither holds the other for long.
        self._block: MemoryBlock | None = block
        self._lock, self._let_go = lock, let_go
        self._phase: Phase = "held"
        # While it is lent, what one thread alone can pop: that has it then, and nobody waits.
        self._offered = deque[None]()
        self._keepers = 0
        # A view of our own: sockets that send from it keep it alive, and only it.
        self._view: NDArray[np.uint8] | None = block.data.view()
        self._in_hands = weakref.ref(self._view)
        self._watched: weakref.ref[NDArray[np.uint8]] | None = None
        self._given: dict[int, memoryview] = {}  # what was given out, by where it begins

    # For whoever holds it: a thread that publishes, and from then on the machine's shell.

    def _held(self) -> tuple[MemoryBlock, NDArray[np.uint8]]:
        if self._phase != "held" or self._block is None or self._view is None:
            raise AssertionError(f"the bytes of a snapshot that is {self._phase} are not ours")
        return self._block, self._view

    @property
    def data(self) -> NDArray[np.uint8]:
        """The memory, to be written to."""
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
        """Copy a state here; `check` is called between steps.

        If it may be `late`, a second copy on a device is all that is made, if there is one: the
        bytes come here once somebody asks for some.

        Returns:
            The CRC-32C of each chunk of so many bytes, 0: none. Of a state on devices, what must
            arrive before anything else is done with this.
        """
        return self._held()[0].write(state, layout, check, chunk_bytes, late=late)

    def lost(self, state: State) -> Found:
        """Count the values that were finite in a state, and no longer are as it was copied here."""
        return self._held()[0].lost(state)

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        """Let workers of this host read it by this name; False if one holds on to another."""
        return self._held()[0].stamp(model, epoch, version)

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return some of the bytes, to be looked at here and now."""
        block, view = self._held()
        block.arrive()
        return view.data[begin:end]

    def chunk(self, begin: int, end: int) -> Buffer:
        """Return some of the bytes, to be sent.

        Whoever may have to wait with them refers to them weakly: they are kept here.
        """
        block, whole = self._held()
        if block.late:
            block.arrive()
        return self._given.setdefault(begin, whole.data[begin:end])

    def lend(self) -> None:
        """Let whoever publishes next take the memory."""
        if self._phase == "held":
            self._phase = "lent"
            self._offered.append(None)

    def release(self) -> None:
        """Nobody needs the bytes any more."""
        with self._lock:
            self._phase, self._block, self._view = "over", None, None
            self._offered.clear()
            self._given.clear()
            if (held := self._in_hands()) is not None:  # by sockets, which let it go at any time
                self._watched = weakref.ref(held, partial(_notify, self._let_go))
            del held
            self._let_go.notify_all()

    # For the machine.

    @property
    def there(self) -> bool:
        """Whether nobody has taken the memory since it was lent."""
        return self._phase != "over"

    def take_back(self) -> bool:
        """Have what was lent again; False if somebody has taken it. It never waits."""
        try:
            self._offered.pop()
        except IndexError:
            return self._phase == "held"
        self._phase = "held"
        return True

    # For whoever needs memory, and for any other thread.

    def take(self) -> bool:
        """Take the memory if it is lent and nobody keeps it."""
        with self._lock:
            if self._keepers:
                return False
            try:
                self._offered.pop()
            except IndexError:
                return False
            self.release()
            return True

    def keep(self) -> NDArray[np.uint8] | None:
        """Return the bytes, which nobody overwrites until `let_go`; None if it is too late.

        Any number may keep them. The publisher takes other memory meanwhile.
        """
        with self._lock:
            if self._block is None:
                return None
            self._keepers += 1
            self._block.arrive()
            return self._block.data

    def let_go(self) -> None:
        """The bytes may be overwritten as far as whoever kept them is concerned."""
        with self._lock:
            self._keepers -= 1
            self._let_go.notify_all()

    @property
    def kept(self) -> bool:
        """Whether somebody keeps the bytes."""
        return self._keepers > 0

    @property
    def draining(self) -> bool:
        """Whether it is over, but sockets still send from it."""
        return self._phase == "over" and self._in_hands() is not None

    @property
    def in_use(self) -> bool:
        """Whether anybody needs the bytes, sockets included."""
        return self._phase != "over" or self._keepers > 0 or self._in_hands() is not None


def _notify(let_go: threading.Condition, _view: object) -> None:
    with let_go:
        let_go.notify_all()


# Asks for one of some snapshots to be given up, for one that replaces the latest or not; waits for
# the answer for so many seconds, and returns whether one was.
MakeRoom = Callable[[Collection[Snapshot], bool, float], bool]


def nobody(_among: Collection[Snapshot], _replaces_latest: bool, _timeout: float) -> bool:
    """Give nothing up."""
    return False


class Pool:
    """The memory of one model. One thread at a time may take some.

    Args:
        model: Its name.
        patience: Seconds to wait for memory where all of it is in use.
        share: Whether workers on this host may read it.
        second: Whether states of a device are copied by way of a second copy there.

    Attributes:
        second: The same.
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
        self._asked = False
        self._blocks: dict[MemoryBlock, Snapshot | None] = {}  # and what was written there last
        self._lock = threading.RLock()
        self._let_go = threading.Condition(self._lock)
        self._surplus = False  # some was needed for what is kept no more

    def __len__(self) -> int:
        return len(self._blocks)

    def shrink(self) -> None:
        """Give back what nobody needs: now, and of the latest version when there is another."""
        for block in self._free():
            del self._blocks[block]
        self._surplus = True

    def reserve(self, state: State, layout: Layout) -> Shared | None:
        """Make a block for such a state now, so that the first version need not wait for it.

        Returns:
            Where workers on this host find it; None if they do not, or there are blocks already.
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
        make_room: MakeRoom = nobody,
        *,
        replaces_latest: bool,
        deadline: Deadline = NEVER,
    ) -> Snapshot:
        """Return memory of this size, which is to be written before it is published.

        Args:
            nbytes: How many bytes.
            make_room: Asks for some to be given up where all of it is in use.
            replaces_latest: What will lie there is for every worker and needs no commit, so the
                latest version may be overwritten if nobody is receiving it.
            deadline: When memory must be there.

        Raises:
            WeightBusError: All of it stayed in use.
            DeadlineError: There was no time to take it.
        """
        if self._surplus:
            self.shrink()
            self._surplus = False
        block = self._reuse(nbytes)
        if block is None and replaces_latest:
            block = self._take_lent(nbytes)
        # What was kept counts again once it is let go: there may be more than one too many.
        while block is None and self._counted() >= SNAPSHOTS_MAX and not self._free():
            self._wait(make_room, replaces_latest, min(self._patience, deadline.left()))
            block = self._reuse(nbytes)
        if block is None:
            block = self._another(nbytes, deadline)
        snapshot = self._blocks[block] = Snapshot(block, self._lock, self._let_go)
        return snapshot

    def retire(self) -> None:
        """Write nothing more to what there is: somebody who has it mapped is to read no more.

        Any thread may call this. What is being written this moment is still read.
        """
        for block in list(self._blocks):
            block.retired = True

    def _block(self, nbytes: int, check: Check) -> MemoryBlock:
        return MemoryBlock(nbytes, share=self._share, second=self.second, check=check)

    @property
    def late(self) -> bool:
        """Whether the second copy is all that need be made: nobody has asked for more so far."""
        self._asked = self._asked or any(block.asked for block in self._blocks)
        return self.second and not self._asked

    def _counted(self) -> int:
        return sum(not (snapshot and snapshot.kept) for snapshot in self._blocks.values())

    def _free(self) -> list[MemoryBlock]:
        return [b for b, snapshot in self._blocks.items() if not (snapshot and snapshot.in_use)]

    def _reuse(self, nbytes: int) -> MemoryBlock | None:
        """Return a block that nobody needs; let go of those that are of no use any more."""
        for block, snapshot in [*self._blocks.items()]:
            if snapshot is not None and snapshot.in_use:
                continue
            if block.data.nbytes != nbytes or block.retired:
                del self._blocks[block]
            elif block.claim():
                return block
        return None

    def _take_lent(self, nbytes: int) -> MemoryBlock | None:
        """Take the latest version's memory if it is lent, once sockets have let go of it."""
        for block, snapshot in self._blocks.items():
            if snapshot is not None and snapshot.take():
                fits = block.data.nbytes == nbytes and not block.retired
                if fits and not snapshot.in_use and block.claim():
                    return block
                other = self._reuse(nbytes)
                if other is None and snapshot.in_use:
                    self._wait_until(self._any_free, min(REUSE_PATIENCE, self._patience))
                    other = self._reuse(nbytes)
                return other
        return None

    def _another(self, nbytes: int, deadline: Deadline) -> MemoryBlock:
        """Make another block, in place of one that a stopped worker holds on to if need be."""
        if self._counted() >= SNAPSHOTS_MAX:
            del self._blocks[self._free()[0]]
        block = self._block(nbytes, deadline.check)
        self._blocks[block] = None
        block.claim()
        return block

    def _wait(self, make_room: MakeRoom, replaces_latest: bool, patience: float) -> None:
        """Wait until some block is free: for sockets first, then for what is given up.

        Raises:
            WeightBusError: None was in time.
        """
        end = time.monotonic() + patience
        waiting = any(snapshot and snapshot.draining for snapshot in self._blocks.values())
        while not self._any_free():
            left = max(0.0, end - time.monotonic())
            given = not waiting and make_room(self._used(), replaces_latest, left)
            self._wait_until(self._any_free, min(left, patience / 4 if given or waiting else LOOK))
            waiting = False  # for sockets no longer: another one may do
            if not (given or left or self._any_free()):
                raise WeightBusError(
                    f"all {len(self._blocks)} copies of {self._model!r} are in use: slow workers "
                    "are still receiving them, or they wait for a commit; publish less often, or "
                    "wait for the publishes under way"
                )

    def _used(self) -> list[Snapshot]:
        """Return what the machine may give up to some effect."""
        return [s for s in self._blocks.values() if s is not None and s.there and not s.kept]

    def _any_free(self) -> bool:
        return bool(self._free())

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        with self._let_go:
            return self._let_go.wait_for(condition, seconds)


class _Room:
    """Memory for the sealed bytes of one version."""

    def __init__(self, nbytes: int) -> None:
        self.memory = memory_of(nbytes)
        self.spare = False  # nobody needed it when memory was taken last
        self._given: weakref.ref[NDArray[np.uint8]] | None = None

    @property
    def free(self) -> bool:
        """Whether nobody refers to what was given of it."""
        return self._given is None or self._given() is None

    def give(self) -> NDArray[np.uint8]:
        """Return the memory, as a view of its own; the room is free again once that has ended."""
        view = self.memory.view()
        self._given, self.spare = weakref.ref(view), False
        return view


class SealedMemory:
    """The memory for sealed bytes of one publisher, by model: used again once nobody sends it.

    There is as much for a model as there may be snapshots of it. What nobody needs is given back,
    at the second time that memory is taken without a use for it.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, list[_Room]] = {}

    def take(self, model: str, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of this size, which is free again once nobody refers to it.

        Raises:
            MemoryError: There is none.
            InUseError: As many rooms are in use as there may be.
        """
        before = self._rooms.get(model, [])
        used = [room for room in before if not room.free]
        free = [room for room in before if room.free and room.memory.nbytes == nbytes]
        if not free and len(used) >= SNAPSHOTS_MAX:
            raise InUseError(
                f"sealed bytes of {SNAPSHOTS_MAX} versions of {model!r} are being sent: publish "
                "less often, or wait until slow workers have them"
            )
        taken = free.pop(0) if free else _Room(nbytes)
        kept = [room for room in free if not room.spare]
        for room in kept:
            room.spare = True
        self._rooms[model] = [taken, *used, *kept]
        return taken.give()
