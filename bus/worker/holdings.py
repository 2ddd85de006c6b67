"""The versions of one model that are here, each in its phase, and the memory that they take.

There are at most two buffers. One holds a version that is complete and waits to be applied, the
other the version that is arriving. They are kept and used again, so that a steady stream of
versions touches no fresh memory. Where patches may come, a third holds what runs. (D3)
"""

from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...codecs.layout import Layout
from ..lease import Lease
from ..limits import BUFFERS_MAX
from ..messages import Announce, Buffer, Running
from ..staged import Base, SharedMemory, StagedVersion
from .phases import ARROWS, MODES, Event, Mode, Phase, Turn
from .transfer import Transfer

Key = tuple[int, int]
Memory = NDArray[np.uint8]

REJECTED_KEPT = 8  # versions remembered that could not be taken here
IN_MEMORY: set[Phase] = {"arriving", "staged", "ready", "applying"}  # a buffer is needed for these


@dataclass(slots=True, eq=False)
class Held:
    """A version that is here, and what there is of it in its phase."""

    key: Key
    announce: Announce
    pushed: bool = False  # its chunks follow without being asked for
    payload: Buffer | None = None  # what came along; good until the next message
    layout: Layout | None = None
    memory: SharedMemory | None = None  # where it can be copied from
    phase: Phase = "announced"
    buffer: NDArray[np.uint8] | None = None
    transfer: Transfer | None = None
    staged: StagedVersion | None = None
    running: Running | None = None
    waits: str = ""  # who keeps the user from applying it, since when
    fate: Event | None = None  # it has failed, and what that means once the user lets go of it

    def brings(self, other: Announce) -> bool:
        """Return whether another announcement of it says the same of what arrives."""
        ours, theirs = self.announce, other
        same = (ours.layout, ours.nbytes) == (theirs.layout, theirs.nbytes)
        return same and ours.chunk_bytes == theirs.chunk_bytes


class Holdings:
    """The versions of one model.

    Attributes:
        at: By phase, the version in it; of several, that which came to it first.
    """

    def __init__(self) -> None:
        self.mode: Mode = "following"
        self._free: list[NDArray[np.uint8]] = []
        self._nbytes = 0  # of each of these: as much as the version that was begun last
        self._taken = 0  # buffers that versions have, or that are being filled for nobody (yet)
        self._lent: tuple[Lease, NDArray[np.uint8]] | None = None  # one that is, the last
        self.base: Base | None = None  # what patches may build on
        # Could not be taken; not tried again. An older one still may be: what was rejected may
        # have been aborted, or meant for few, and the latest for all be one that was missed.
        self.rejected: deque[Key] = deque(maxlen=REJECTED_KEPT)
        self._live: dict[Phase, dict[Key, Held]] = {p: {} for p, arrows in ARROWS.items() if arrows}
        self.at: dict[Phase, Held | None] = dict.fromkeys(self._live)

    def all(self, *phases: Phase) -> list[Held]:
        """Return the versions in some phases."""
        return [held for phase in phases for held in self._live[phase].values()]

    def find(self, key: Key | None, *phases: Phase) -> Held | None:
        """Return a version that is in one of some phases."""
        for phase in phases:
            if key in self._live[phase]:
                return self._live[phase][key]
        return None

    @property
    def newest(self) -> Key:
        """The newest version that needs no announcement any more."""
        live = self._live
        keys = *live["staged"], *live["ready"], *live["applying"], *live["running"]
        return max(keys, default=(0, 0))

    def has(self, key: Key) -> bool:
        """Return whether a version is here."""
        return any(key in held for held in self._live.values())

    def expect(self, announce: Announce, *, pushed: bool, payload: Buffer | None) -> Held:
        """Take note of a version that was announced, in place of any that was only announced."""
        older = self.at["announced"]
        if older is not None:
            self.move(older, "newer")
        held = Held((announce.epoch, announce.version), announce, pushed, payload)
        self._live["announced"][held.key] = self.at["announced"] = held
        return held

    def answered(self, sent_at: float) -> None:
        """A ping that was sent then was answered, and whatever was asked before it. (W12)"""
        for held in self.all("arriving"):
            if held.transfer is not None:
                held.transfer.answered(sent_at)

    # Memory.

    @property
    def full(self) -> bool:
        """Whether all buffers are in use."""
        return self._taken >= BUFFERS_MAX

    @property
    def bare(self) -> bool:
        """Whether there is no buffer yet."""
        return not self._taken and not self._free

    def lend(self, announce: Announce) -> Lease | None:
        """Lend a buffer to what comes with an announcement, which need not be copied there then."""
        if self.full or not self._free or announce.nbytes != self._nbytes:
            return None
        buffer = self._free.pop()
        self._taken += 1
        lease = Lease(buffer.data, announce, partial(self.give_back, buffer), hashed=False)
        self._lent = lease, buffer
        return lease

    def reuse(self, held: Held) -> bool:
        """Give a version a buffer that was used before; return whether one is of its size.

        If it was received in one, that is its own.
        """
        lease, buffer = self._lent or (None, None)
        if lease is not None and lease.live and held.payload is lease.view:
            lease.live, self._lent, held.buffer = False, None, buffer
            return True
        if self.full:
            return False
        if self._nbytes != held.announce.nbytes:
            self._free.clear()  # the model has changed its size: the old memory will not fit again
            self._nbytes = held.announce.nbytes
        if not self._free:
            return False
        held.buffer = self._free.pop()
        self._taken += 1
        return True

    def give(self, held: Held, buffer: NDArray[np.uint8]) -> None:
        """Give a version a buffer."""
        held.buffer = buffer
        self._taken += 1

    def keep(self, buffer: NDArray[np.uint8]) -> None:
        """Have a buffer for a version that will come, unless there is one by now."""
        if self.bare:
            self._nbytes = buffer.nbytes
            self._free.append(buffer)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Nobody uses a buffer any more."""
        self._taken -= 1
        self._spare(buffer)

    def let_go(self, held: Held) -> None:
        """The user goes on using the buffer of a version: it is ours no more."""
        if held.buffer is not None:
            self._taken -= 1
            held.buffer = None

    def _spare(self, buffer: NDArray[np.uint8]) -> None:
        if buffer.nbytes == self._nbytes:
            self._free.append(buffer)

    # What patches build on.

    def rebase(self, held: Held | None, running: Running | None, data: Memory | None) -> bool:
        """What runs is another version: keep its bytes in place of those of the one before.

        But if these are still needed, they stay until the next version runs; then return False.
        """
        if self.base is not None and self.base.users:
            return False
        own = held is not None and data is not None and data is held.buffer
        if self.base is not None and self.base.own and (held is None or own):
            self._spare(self.base.data)  # else it was needed for this alone
        self.base = None
        if held is None or running is None or data is None or held.layout is None:
            return True
        if own:
            held.buffer = None
            self._taken -= 1
        self.base = Base(running, held.layout, data, own)
        return True

    def release(self, base: Base) -> None:
        """A patch no longer needs what it builds on; if that runs no more, nobody does."""
        base.users -= 1
        runs = self.at["running"]
        if base is self.base and (runs is None or runs.running != base.running):
            surplus = runs is not None and not runs.announce.keep
            self.rebase(runs if surplus else None, None, None)

    # Phases.

    def rename(self, held: Held, key: Key) -> None:
        """Have a version of another name in the place of one that runs."""
        if self.move(held, "renamed"):
            running = self._live["running"]
            running[key] = running.pop(held.key)
            held.key = key

    def turn(self, turn: Turn) -> bool:
        """Let something happen to the model; return whether its mode is another one now. (W26)"""
        mode = MODES[self.mode].get(turn)
        self.mode = mode or self.mode
        return mode is not None

    def move(self, held: Held | None, event: Event) -> bool:
        """Let something happen to a version; return whether it has an arrow for that."""
        after = ARROWS[held.phase].get(event) if held is not None else None
        if held is None or after is None:
            return False
        phase, transfer = held.phase, held.transfer
        del self._live[phase][held.key]
        self.at[phase] = next(iter(self._live[phase].values()), None)
        held.phase = after
        if after in self._live:
            self._live[after][held.key] = held
            self.at[after] = self.at[after] or held
        elif after == "rejected":
            self.rejected.append(held.key)
        if after not in IN_MEMORY and held.buffer is not None:
            if transfer is None or transfer.revoke():
                if transfer is not None and transfer.base is not None:
                    self.release(transfer.base)
                self._taken -= 1
                self._spare(held.buffer)
            held.buffer = None
        if after == "running":
            held.transfer = None  # and so the memory that a patch came into
        return True
