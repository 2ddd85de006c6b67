"""The versions of one model that are here, each in its phase, and the memory that they take."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..memory.staging import Buffers
from ..messages import Announce, Running
from ..staged import StagedVersion
from .phases import ARROWS, Event, Phase
from .transfer import Transfer

Key = tuple[int, int]

REJECTED_KEPT = 8  # versions remembered that could not be taken here
IN_MEMORY: set[Phase] = {"arriving", "staged", "ready", "applying"}  # a buffer is needed for these


@dataclass(slots=True, eq=False)
class Held:
    """A version that is here, and what there is of it in its phase."""

    key: Key
    announce: Announce
    phase: Phase = "announced"
    buffer: NDArray[np.uint8] | None = None
    transfer: Transfer | None = None
    staged: StagedVersion | None = None
    running: Running | None = None


class Holdings:
    """The versions of one model."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        # Could not be taken; not tried again. An older one still may be: what was rejected may
        # have been aborted, or meant for few, and the latest for all be one that was missed.
        self.rejected: deque[Key] = deque(maxlen=REJECTED_KEPT)
        self._live: dict[Phase, dict[Key, Held]] = {p: {} for p, arrows in ARROWS.items() if arrows}

    def at(self, phase: Phase) -> Held | None:
        """Return the version in a phase, the oldest if there are several."""
        return next(iter(self._live[phase].values()), None)

    def all(self, *phases: Phase) -> list[Held]:
        """Return the versions in some phases."""
        return [held for phase in phases for held in self._live[phase].values()]

    @property
    def newest(self) -> Key:
        """The newest version that needs no announcement any more."""
        keys = (key for p in ("staged", "ready", "applying", "running") for key in self._live[p])
        return max(keys, default=(0, 0))

    def expect(self, announce: Announce) -> Held:
        """Take note of a version that was announced, in place of any that was only announced."""
        for older in self.all("announced"):
            self.move(older, "newer")
        held = Held((announce.epoch, announce.version), announce)
        self._live["announced"][held.key] = held
        return held

    def take_memory(self, held: Held) -> bool:
        """Give a version a staging buffer; False if all are in use.

        Raises:
            MemoryError: There is no memory.
        """
        held.buffer = self.buffers.take(held.announce.nbytes)
        return held.buffer is not None

    def rename(self, held: Held, key: Key) -> None:
        """Have a version of another name in the place of one that runs."""
        if self.move(held, "renamed"):
            running = self._live["running"]
            running[key] = running.pop(held.key)
            held.key = key

    def move(self, held: Held | None, event: Event) -> bool:
        """Let something happen to a version; return whether it has an arrow for that."""
        after = ARROWS[held.phase].get(event) if held is not None else None
        if held is None or after is None:
            return False
        del self._live[held.phase][held.key]
        held.phase = after
        if after in self._live:
            self._live[after][held.key] = held
        elif after == "rejected":
            self.rejected.append(held.key)
        if after not in IN_MEMORY and held.buffer is not None:
            if held.transfer is not None:
                held.transfer.revoke()
            self.buffers.give_back(held.buffer)
            held.buffer = None
        return True
