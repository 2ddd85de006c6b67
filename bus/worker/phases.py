"""How the tables of a worker are used. All changes of state follow `tables.py`.

    announced ──> arriving ──> staged ──> ready ──> applying ──> running
        │             │           │         │           │           │
        └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected

An event without a transition from the current phase has no effect: messages arrive late, twice and
in any order. `docs/protocol/worker.md` has the same tables, and `tests/vectors/phases.json` has
every transition, and every pair without one, for all languages.

A version is `begun` once its memory is available; a version that needs only its segment is
`mapped`. An arriving version that is dropped for a newer one leaves its model `catching-up`;
otherwise a worker that is slower than its publisher would never complete a version. A worker that
is `turned away` warns its user and keeps sending hello, since the reason may pass (W20).
"""

from typing import Literal

from ..effects import (
    Connect,
    Copy,
    Decode,
    Effect,
    Joined,
    Open,
    Ready,
    Redial,
    Refused,
    Rejected,
    Renamed,
    Reserve,
    Subscribe,
    WholeStaged,
)
from ..messages import Applied, Failed, Staged
from ..structs import Message
from .tables import Change, Event, LackEvent, ModeEvent, Way

# The events of a version that arrives whole with its announcement, if nothing delays it.
STRAIGHT: tuple[Event, ...] = ("begun", "whole", "committed")

# The outcomes that may be reported of a version in `ready` without an earlier `taken`: the
# machine's own thread has applied the version, and no progress could be reported meanwhile.
AT_ONCE: set[Event] = {"applied", "declined", "failed", "torn", "stale"}

# Whether the deadline of an apply has passed. The user may still use an overdue version.
Time = Literal["in-time", "overdue"]

TIMES: dict[Time, dict[Literal["late"], Time]] = {
    "in-time": {"late": "overdue"},
    "overdue": {},
}

# The messages and effects that each event causes. Requests and repeated reports need no event.
EMITS: dict[
    Event | LackEvent | Way | Literal["late"] | ModeEvent | Change,
    tuple[type[Effect | Message], ...],
] = {
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
    "late": (Failed,),
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
