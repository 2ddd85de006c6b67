"""A worker's machine that is held against its tables: with an arrow goes out what they say."""

from collections.abc import Sequence
from typing import Any

from weightbus.bus.effects import (
    Connect,
    Copy,
    Decode,
    Effect,
    Examine,
    Flushed,
    Joined,
    Notice,
    Open,
    Prefault,
    Ready,
    Redial,
    Refused,
    Rejected,
    Renamed,
    Reserve,
    Send,
    Subscribe,
    WholeStaged,
)
from weightbus.bus.headers import Buffer
from weightbus.bus.lease import Lease
from weightbus.bus.messages import Applied, Bye, Failed, Fetch, Hello, Ping, Pong, Progress, Staged
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import LoopEvent, Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.tables import COMING, LACKS, MODES, SESSIONS, TRANSITIONS

# The messages and effects that each event causes. Requests and repeated reports need no event.
EMITS: dict[str, tuple[type[Effect | Message], ...]] = {
    "known": (Reserve,),
    "located": (Open,),
    "opened": (Reserve,),
    "freed": (Reserve,),
    "begun": (Subscribe,),  # to patches, or back to versions
    "mapped": (Ready,),
    "copy-started": (Copy,),
    "patched": (Decode,),
    "whole": (Staged, WholeStaged),
    "committed": (Ready,),
    "applied": (Applied,),
    "declined": (Failed, Rejected),
    "failed": (Failed, Rejected),
    "torn": (Failed,),
    "renamed": (Renamed, Applied),
    "replaced": (Subscribe,),
    "completed": (Subscribe,),
    "welcomed": (Joined, Connect, Subscribe, Reserve, Staged),
    "refused": (Refused,),
    "silent": (Redial,),
}

# What needs no arrow: what is asked for, or for some while again; and answers.
ASKED: set[type] = {Fetch, Hello, Ping, Pong, Notice, Flushed, Examine, Prefault}
HEARD: set[type] = {*ASKED, Connect, Refused, Progress, Failed, Rejected}  # to a ticket; to faults
DONE: set[type] = {*ASKED, Progress, Rejected, WholeStaged}  # to who wants one version and no other
REPEATED: set[type] = {*ASKED, Progress, Applied, Staged, Failed, Redial}

taken: list[Any] = []  # events that have led along an arrow since the last look


class _Arrows(dict[Any, Any]):
    """The arrows from a state: whoever asks for one takes it."""

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            taken.append(key)
        return super().get(key, default)


TABLES: tuple[dict[Any, Any], ...] = (TRANSITIONS, LACKS, COMING, MODES, SESSIONS)
for table in TABLES:
    table.update({state: _Arrows(arrows) for state, arrows in table.items()})


def _seen(effects: list[Effect], anyway: set[type]) -> list[Effect]:
    allowed = anyway.union(*(EMITS.get(event, ()) for event in taken))
    for effect in effects:
        kind = type(effect.message) if isinstance(effect, Send) else type(effect)
        assert kind in allowed, f"{kind.__name__} goes out, and what has happened is {taken}"
    taken.clear()
    return effects


class Watched(WorkerMachine):
    """The machine, watched."""

    def receive(self, frames: Sequence[Buffer], now: float) -> list[Effect]:
        return _seen(super().receive(frames, now), HEARD)

    def receive_published(self, arrived: Sequence[Buffer] | Lease, now: float) -> list[Effect]:
        return _seen(super().receive_published(arrived, now), HEARD)

    def happened(self, event: LoopEvent, now: float) -> list[Effect]:
        late = {Failed} if isinstance(event, Report) and event.still else set[type]()
        return _seen(super().happened(event, now), DONE | late)

    def tick(self, now: float) -> list[Effect]:
        return _seen(super().tick(now), REPEATED)

    def connected(self, now: float) -> list[Effect]:
        return _seen(super().connected(now), ASKED)

    def close(self) -> list[Effect]:
        return _seen(super().close(), {Applied, Bye})
