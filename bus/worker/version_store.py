"""Stores the versions of one model at a worker: the phase of each version, and the memory.

There are at most two buffers: one holds a complete version that waits to be applied, the other the
version that is arriving. Buffers are reused, so a steady stream of versions allocates no memory.
If patches may arrive, a third buffer holds the running version. (D3)

In a relay, the relay's own publisher sends from the worker's buffers (`Chunks.lend`). A buffer that
no version here needs any more, but that the publisher may still send from, is *on loan*. It is free
again once the publisher and its sockets have dropped their references to the bytes. The store
checks this whenever it needs a buffer, so no other thread changes the store.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypedDict, cast, overload

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...codecs.layout import Layout
from ..chunks import Chunks, Memory, plan_of
from ..cut import Cut
from ..headers import Buffer
from ..lease import Lease
from ..limits import BUFFERS_MAX, SNAPSHOTS_MAX
from ..messages import Announce, Running, Whole
from ..staged import Base, SharedMemory, StagedVersion
from .phases import DISPLACED, STRAIGHT
from .tables import LACKS, MODES, TRANSITIONS, Event, Lack, LackEvent, Mode, ModeEvent, Phase
from .transfer import Transfer

Key = tuple[int, int]

REJECTED_KEPT = 8  # the number of rejected versions to remember
COMPLETE: tuple[Phase, ...] = ("staged", "ready", "applying", "running")
IN_MEMORY: set[Phase] = {"arriving", "staged", "ready", "applying"}  # these need a buffer


class AnnouncedEntry(Struct, eq=False):
    """A version that was announced, and still lacks its layout, segment or memory (`lacks`)."""

    key: Key
    announce: Announce
    pushed: bool  # its chunks follow without a request
    phase: Phase = "announced"
    lacks: Lack = "layout"
    layout: Layout | None = None  # if the worker takes a part: the layout of its slices
    cut: Cut | None = None  # how to cut the chunks to the part; None: the worker takes all
    payload: Buffer | None = None  # arrived with the announcement; valid until the next message
    memory: SharedMemory | None = None  # the segment to copy the version from
    chunks: Chunks[Memory] | None = None  # its buffer, which it has just before it is `arriving`

    def resolve(
        self,
        event: LackEvent,
        layout: Layout | None = None,
        payload: Buffer | None = None,
        memory: SharedMemory | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Apply an event of `tables.LACKS`, and store the layout or segment found by it."""
        self.lacks = LACKS[self.lacks].get(event, self.lacks)
        if layout is not None:
            self.layout, self.payload, self.cut = layout, payload, cut
        if memory is not None:
            self.memory = memory
        if self.lacks == "buffer":
            self.payload = None  # the message is no longer valid when a buffer is free

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the version, or the part of it, needs."""
        return self.announce.nbytes if self.cut is None else self.cut.nbytes

    def set_buffer(self, buffer: Memory) -> None:
        """Give the version an empty buffer."""
        about = self.announce
        plan = plan_of(about.nbytes, about.chunk_bytes)
        self.chunks = Chunks(plan, buffer, [None] * plan.count, about.layout)


class ArrivingEntry(Struct, eq=False):
    """A version whose chunks arrive."""

    key: Key
    announce: Announce
    layout: Layout
    transfer: Transfer
    chunks: Chunks[Memory]  # its buffer, and which chunks have arrived
    memory: SharedMemory | None = None  # the segment that the version is copied from
    phase: Phase = "arriving"

    def update_announcement(self, announce: Announce) -> bool:
        """Replace the announcement by a newer one; return False if it describes other bytes."""
        ours, theirs = self.announce, announce
        same = (ours.layout, ours.nbytes) == (theirs.layout, theirs.nbytes)
        same = same and ours.chunk_bytes == theirs.chunk_bytes
        self.announce = theirs if same else ours
        return same

    def set_transfer(self, transfer: Transfer) -> None:
        """Replace the transfer by another one."""
        self.transfer = transfer


class WholeEntry(Struct, eq=False):
    """A complete and verified version: staged, ready, being applied or running."""

    key: Key
    announce: Announce
    staged: StagedVersion
    memory: SharedMemory | None = None  # the segment that the version was copied from
    # Its buffer. None: the version is mapped or running, or the user owns the buffer.
    chunks: Chunks[Memory] | None = None
    phase: Phase = "staged"
    committed: bool = False  # while the version is staged: it only waits for its companions
    blocked_by: str = ""  # what delays the apply, and since when
    text: str = ""  # a remark to report while the version runs
    deferred_outcome: Event | None = None  # of an overdue apply: the event when the user is done

    @property
    def layout(self) -> Layout:
        """Name, dtype, shape and position of each tensor."""
        return self.staged.layout

    def remark(self, text: str) -> None:
        """Set a remark, which is reported with the running version."""
        self.text = text

    def commit(self) -> None:
        """Record that the version may be applied, once its companions are here."""
        self.committed = True

    def set_blocked(self, by: str) -> bool:
        """Set what delays the apply; return True if nothing delayed the apply before."""
        before, self.blocked_by = self.blocked_by, by
        return not before

    def set_overdue(self, deferred_outcome: Event) -> None:
        """Record that the apply's deadline has passed, and the user still uses the version."""
        self.deferred_outcome = deferred_outcome


class RunningEntry(WholeEntry, kw_only=True, eq=False):
    """The running version; `running` is what the worker reports of it."""

    running: Running


WholePhase = Literal["staged", "ready", "applying", "running"]
Received = ArrivingEntry | WholeEntry
ReceivedPhase = Literal["arriving", WholePhase]
VersionEntry = AnnouncedEntry | Received


class InPhase(TypedDict):
    """The version in each phase, or None; of several versions, the first that entered the phase."""

    announced: AnnouncedEntry | None
    arriving: ArrivingEntry | None
    staged: WholeEntry | None
    ready: WholeEntry | None
    applying: WholeEntry | None
    running: RunningEntry | None


class VersionStore:
    """The versions of one model."""

    def __init__(self) -> None:
        self.mode: Mode = "following"
        self.newest_known: Key = (0, 0)
        self._free: list[Memory] = []
        self._claim: Callable[[Memory], bool] | None = None
        self._nbytes = 0  # size of each free buffer, as of the version that was begun last
        self._in_use = 0  # number of buffers that are neither free nor on loan
        self._on_loan: list[Chunks[Memory]] = []  # buffers that only a publisher still uses
        self._leased: tuple[Lease, Memory] | None = None  # the buffer that was leased last
        self.base: Base | None = None  # the bytes that patches build on
        # Rejected versions, which are not tried again. An older version may still be accepted: the
        # rejected version may have been aborted or sent to few workers, and this worker may have
        # missed the latest version for all workers.
        self.rejected: deque[Key] = deque(maxlen=REJECTED_KEPT)
        # Whether a version for named workers was announced, which happens only in a relay.
        self._named = False
        # The newest version for all workers that was ready or in a later phase, and was dropped.
        self._newest_dropped: Key = (0, 0)
        self._live: dict[Phase, dict[Key, VersionEntry]] = {
            p: {} for p, transitions in TRANSITIONS.items() if transitions
        }
        self._first: dict[Phase, VersionEntry | None] = dict.fromkeys(self._live)
        self.in_phase = cast("InPhase", self._first)  # `move` stores the right class per phase

    @overload
    def all(self, *phases: Literal["arriving"]) -> Sequence[ArrivingEntry]: ...
    @overload
    def all(self, *phases: WholePhase) -> Sequence[WholeEntry]: ...
    @overload
    def all(self, *phases: ReceivedPhase) -> Sequence[Received]: ...
    @overload
    def all(self, *phases: Phase) -> Sequence[VersionEntry]: ...
    def all(self, *phases: Phase) -> Sequence[VersionEntry]:
        """Return the versions in the given phases."""
        return [entry for phase in phases for entry in self._live[phase].values()]

    @overload
    def find(self, key: Key | None, *phases: Literal["arriving"]) -> ArrivingEntry | None: ...
    @overload
    def find(self, key: Key | None, *phases: WholePhase) -> WholeEntry | None: ...
    @overload
    def find(self, key: Key | None, *phases: Phase) -> VersionEntry | None: ...
    def find(self, key: Key | None, *phases: Phase) -> VersionEntry | None:
        """Return the version with this key if it is in one of the given phases, else None."""
        for phase in phases:
            if key in self._live[phase]:
                return self._live[phase][key]
        return None

    @property
    def newest(self) -> Key:
        """The newest version that is staged or in a later phase; (0, 0) if there is none."""
        live = self._live
        keys = *live["staged"], *live["ready"], *live["applying"], *live["running"]
        return max(keys, default=(0, 0))

    def hear(self, key: Key, *, named: bool = False) -> bool:
        """Record that a version exists; return whether it is new and was not rejected.

        A relay that has a version for named workers needs an older version for its other workers.
        So a version for all workers (not `named`) is new unless a newer version for all is here.
        """
        self.newest_known = max(self.newest_known, key)
        newest = self.newest
        if self._named and not named:
            for_all = [entry.key for entry in self.all(*COMPLETE) if not entry.announce.workers]
            newest = max([self._newest_dropped, *for_all])
        return key > newest and key not in self.rejected

    def forgive(self, key: Key) -> None:
        """Allow a rejected version to be tried again."""
        if key in self.rejected:
            self.rejected.remove(key)

    def has(self, key: Key) -> bool:
        """Return whether a version is here, in any phase."""
        return any(key in entry for entry in self._live.values())

    def expect(self, announce: Announce, *, pushed: bool) -> AnnouncedEntry:
        """Add an announced version; drop another version that is still only announced."""
        older = self.in_phase["announced"]
        if older is not None:
            self.move(older, "newer")
        self._named |= bool(announce.workers)
        entry = AnnouncedEntry((announce.epoch, announce.version), announce, pushed)
        self._live["announced"][entry.key] = self._first["announced"] = entry
        return entry

    def reconnected(self, epoch: int, now: float, *, pieces: bool = False) -> None:
        """Begin a session of this epoch: drop the versions that do not continue. (W28)

        The arriving version continues, and its requests are repeated. `pieces`: whether the
        publisher sends parts.
        """
        for entry in self.all("announced", "arriving", "staged"):
            if isinstance(entry, AnnouncedEntry) or entry.key[0] != epoch:
                self.move(entry, "fenced")
            elif isinstance(entry, ArrivingEntry):
                entry.transfer.reconnected(now, pieces=pieces)
        self.rejected.clear()
        if self.newest_known[0] != epoch:  # this epoch may be lower than the last one
            self.newest_known = (0, 0)

    # Memory.

    @property
    def has_no_buffer(self) -> bool:
        """True if no buffer is allocated."""
        return not (self._in_use or self._free or self._on_loan)

    def _collect(self) -> None:
        """Make those buffers on loan free from which the publisher no longer sends."""
        before, self._on_loan = self._on_loan, []
        for chunks in before:
            self._recycle(chunks.memory, chunks)

    def lend(self, announce: Announce) -> Lease | None:
        """Return a lease of a free buffer for an announcement's data; None if no buffer fits."""
        if self._on_loan:
            self._collect()
        if self._in_use >= BUFFERS_MAX or not self._free or announce.nbytes != self._nbytes:
            return None
        buffer = self._free.pop() if self._claim is None else self._take_claimed(self._claim)
        if buffer is None:
            return None
        self._in_use += 1
        lease = Lease(buffer.data, announce, partial(self.give_back, buffer), hashed=False)
        self._leased = lease, buffer
        return lease

    def reuse(self, entry: AnnouncedEntry) -> bool:
        """Give a version an existing buffer of its size; return whether there is one.

        If the version's payload was received into a buffer, that buffer is used. If the result is
        False, `entry.lacks` is `memory` or, if all buffers are in use, `buffer`.
        """
        buffer = self._received_in(entry.payload)
        if buffer is not None:
            entry.set_buffer(buffer)
            return True
        if self._on_loan:
            self._collect()
        loaned_out = not self._free and len(self._on_loan) > SNAPSHOTS_MAX
        if self._in_use >= BUFFERS_MAX or loaned_out:
            entry.resolve("full")
            return False
        if entry.lacks == "buffer":
            entry.resolve("freed")
        if self._nbytes != entry.nbytes:
            self._free.clear()  # the size has changed: the old buffers do not fit
            self._nbytes = entry.nbytes
        if not self._free:
            return False
        buffer = self._free.pop() if self._claim is None else self._take_claimed(self._claim)
        if buffer is None:
            return False
        self._in_use += 1
        entry.set_buffer(buffer)
        return True

    def set_claim(self, claim: Callable[[Memory], bool]) -> None:
        """Set a function that returns whether a free buffer may be overwritten now.

        The function returns False while another process copies from the buffer.
        """
        self._claim = claim

    def _take_claimed(self, claim: Callable[[Memory], bool]) -> Memory | None:
        """Take the longest free buffer that `claim` allows; return None if it allows none."""
        for index, buffer in enumerate(self._free):
            if claim(buffer):
                del self._free[index]
                return buffer
        if len(self._free) + len(self._on_loan) + self._in_use >= SNAPSHOTS_MAX + BUFFERS_MAX:
            del self._free[:1]  # the caller allocates another buffer instead
        return None

    def _received_in(self, payload: Buffer | None) -> Memory | None:
        # Return the buffer that the payload was received into by the last lease, if any.
        lease, buffer = self._leased or (None, None)
        if lease is None or not lease.live or payload is not lease.view:
            return None
        lease.end()
        self._leased = None
        return buffer

    def accept_whole(
        self, announce: Announce, whole: Whole, payload: Buffer, layout: Layout
    ) -> StagedVersion | None:
        """Add a version that arrived whole, in the phase `ready`; None if no buffer is free.

        The payload is copied into a buffer, unless it was received there.
        """
        buffer = self._received_in(payload)
        if buffer is None:
            if self._on_loan:
                self._collect()
            if self._in_use >= BUFFERS_MAX or self._nbytes != len(payload) or not self._free:
                return None
            buffer = self._free.pop() if self._claim is None else self._take_claimed(self._claim)
            if buffer is None:
                return None
            self._in_use += 1
            np.copyto(buffer, np.frombuffer(payload, np.uint8))
        key, plan = (announce.epoch, announce.version), plan_of(len(payload), announce.chunk_bytes)
        chunks = Chunks(plan, buffer, [whole.crc], layout.id, 1, True, whole.digest)
        about = announce.model, key, layout, buffer, whole.digest
        staged = StagedVersion(*about, metadata=announce.metadata)
        phase: Phase = "announced"
        for event in STRAIGHT:
            phase = TRANSITIONS[phase].get(event, phase)
        entry = WholeEntry(key, announce, staged, chunks=chunks, phase=phase)
        self._live[phase][key] = entry
        self._first[phase] = self._first[phase] or entry
        return staged

    def give(self, entry: AnnouncedEntry, buffer: Memory) -> None:
        """Give a version a newly allocated buffer."""
        self._in_use += 1
        entry.set_buffer(buffer)

    def keep(self, buffer: Memory) -> None:
        """Keep a new buffer for a later version; drop it if its size is outdated or one is free."""
        if self.has_no_buffer:
            self._nbytes = buffer.nbytes
        if not self._free and buffer.nbytes == self._nbytes:
            self._free.append(buffer)

    def give_back(self, buffer: Memory) -> None:
        """Take back a buffer that is no longer used."""
        self._in_use -= 1
        self._recycle(buffer)

    def detach_buffer(self, entry: WholeEntry) -> None:
        """Detach the buffer of a version: the user, or the base of patches, owns the buffer now."""
        if entry.chunks is not None:
            self._in_use -= 1
            entry.chunks = None

    def _recycle(self, buffer: Memory, chunks: Chunks[Memory] | None = None) -> None:
        """Make a buffer free, or on loan if a publisher sends from it; drop other sizes."""
        if chunks is not None and chunks.view is not None and chunks.in_use:
            self._on_loan.append(chunks)
        elif buffer.nbytes == self._nbytes:
            self._free.append(buffer)

    # The base of patches.

    def set_patch_base(
        self, entry: WholeEntry | None, running: Running | None, data: Memory | None
    ) -> bool:
        """Replace the base by the running version's bytes `data`, or by None.

        Return False, and replace nothing, while a patch on the base is arriving or being decoded.
        """
        if self.base is not None and self.base.users:
            return False
        chunks = entry.chunks if entry is not None else None
        own = chunks if chunks is not None and data is chunks.memory else None
        if self.base is not None and self.base.chunks is not None and (entry is None or own):
            self._recycle(self.base.data, self.base.chunks)  # else no later base needs the buffer
        self.base = None
        if entry is None or running is None or data is None:
            return True
        if own is not None:
            self.detach_buffer(entry)
        self.base = Base(running, entry.layout, data, own)
        return True

    def hold(self, base: Base) -> Base:
        """Hold the base for a patch until `release`, and return it."""
        base.hold()
        return base

    def release(self, base: Base) -> None:
        """Release the base of a patch; drop a base that is not the running version any more."""
        base.release()
        running = self.in_phase["running"]
        if base is self.base and (running is None or running.running != base.running):
            surplus = running is not None and not running.announce.keep
            self.set_patch_base(running if surplus else None, None, None)

    # Phases.

    def rename(self, entry: RunningEntry, running: Running) -> None:
        """Give the running version the epoch and number in `running`."""
        if self.base is not None and self.base.running == entry.running:
            self.base.rename(running)
        if self.move(entry, "renamed"):
            del self._live["running"][entry.key]
            entry.key, entry.running = (running.epoch, running.version), running
            if entry.announce.workers:  # the new name is of a version for all workers
                entry.announce = replace(entry.announce, workers=[])
            self._live["running"][entry.key] = entry

    def change_mode(self, event: ModeEvent) -> bool:
        """Apply an event to the model; return whether its mode has changed. (W26)"""
        mode = MODES[self.mode].get(event)
        self.mode = mode or self.mode
        return mode is not None

    def move(self, entry: VersionEntry | None, event: Event, into: Received | None = None) -> bool:
        """Apply an event to a version, and drop the versions that it displaces.

        Return False, and change nothing, if the version is None or its phase has no transition for
        the event. `into` replaces the entry, if entries of the next phase have another class.
        """
        after = TRANSITIONS[entry.phase].get(event) if entry is not None else None
        if entry is None or after is None:
            return False
        for phase in DISPLACED.get(event, ()):
            older = self._first[phase]
            # A relay accepts a version for all workers even after a newer one for named workers.
            if older is not None and (event != "whole" or older.key < entry.key):
                self.move(older, "newer")
        before, moved = entry.phase, into or entry
        moved.phase = after
        del self._live[before][entry.key]
        self._first[before] = next(iter(self._live[before].values()), None)
        if after in self._live:
            self._live[after][entry.key] = moved
            self._first[after] = self._first[after] or moved
        elif after == "rejected":
            self.rejected.append(entry.key)
        elif before in ("ready", "applying", "running") and not entry.announce.workers:
            self._newest_dropped = max(self._newest_dropped, entry.key)
        if after not in IN_MEMORY and entry.chunks is not None:
            transfer = entry.transfer if isinstance(entry, ArrivingEntry) else None
            if transfer is None or transfer.revoke():
                if transfer is not None and transfer.base is not None:
                    self.release(transfer.base)
                self._in_use -= 1
                self._recycle(entry.chunks.memory, entry.chunks)
        return True
