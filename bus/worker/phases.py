"""The state tables of a worker: phase and event to next phase. All changes follow them.

    announced ──> arriving ──> staged ──> ready ──> applying ──> running
        │             │           │         │           │           │
        └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected

An event without a transition from the current phase has no effect: messages arrive late, twice and
in any order. `docs/PROTOCOL.md` (section 8) has the same tables, and `tests/vectors/phases.json`
has every transition, and every pair without one, for all languages.
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
from ..messages import Applied, Failed, Message, Staged

Phase = Literal[
    "announced",  # known; its layout or its memory is missing
    "arriving",  # its chunks are being received
    "staged",  # complete and verified; waits for a commit
    "ready",  # the user may apply it
    "applying",  # the user is applying it
    "running",
    "dropped",  # discarded; it may be announced again
    "rejected",  # not tried again in this session, unless the model here changes
]

Event = Literal[
    "begun",  # its layout is known and acceptable, and it has memory
    "mapped",  # its segment is open, and it need not be staged
    "whole",  # all chunks and the digest are here, and match
    "committed",  # an announcement of it says `commit: auto`, or `commit` arrived
    "taken",  # the user begins to apply it
    "put-back",  # the user will apply it later
    "applied",
    "declined",  # a check failed that would fail again, or the user rejected it
    "failed",  # a failure that may not occur again
    "torn",  # an apply failed half-way: the running version is lost, too
    "stale",  # its segment holds another version now
    "renamed",  # a newer version has the same bytes
    "newer",  # a newer version replaces it
    "gone",  # the publisher no longer has it
    "aborted",
    "fenced",  # a session of another epoch has begun
]

ARROWS: dict[Phase, dict[Event, Phase]] = {
    "announced": {
        "begun": "arriving",
        "mapped": "ready",
        "declined": "rejected",
        "failed": "dropped",
        "newer": "dropped",
        "gone": "dropped",
        "aborted": "dropped",
        "fenced": "dropped",
    },
    "arriving": {
        "whole": "staged",
        "failed": "dropped",
        "newer": "dropped",
        "gone": "dropped",
        "aborted": "dropped",
        "fenced": "dropped",
    },
    "staged": {
        "committed": "ready",
        "newer": "dropped",
        "aborted": "dropped",
        "fenced": "dropped",
    },
    "ready": {
        "taken": "applying",
        "newer": "dropped",
    },
    "applying": {
        "applied": "running",
        "put-back": "ready",
        "declined": "rejected",
        "failed": "dropped",
        "torn": "dropped",
        "stale": "dropped",
        "newer": "dropped",  # another thread was faster
    },
    "running": {
        "renamed": "running",
        "newer": "dropped",
        "torn": "dropped",
    },
    "dropped": {},
    "rejected": {},
}

# The events of a version that arrives whole with its announcement, if nothing delays it.
STRAIGHT: tuple[Event, ...] = ("begun", "whole", "committed")

# The outcomes that may be reported of a version in `ready` without an earlier `taken`: the
# machine's own thread has applied the version, and no progress could be reported meanwhile.
AT_ONCE: set[Event] = {"applied", "declined", "failed", "torn", "stale"}

# What an announced version lacks. A missing layout was requested. A segment or memory is available
# immediately or not at all; a buffer is available once another version releases one. A version is
# `begun` once its memory is available; a version that needs only its segment is `mapped`.
Lack = Literal["layout", "segment", "memory", "buffer"]
LackEvent = Literal["known", "located", "opened", "full", "freed"]

LACKS: dict[Lack, dict[LackEvent, Lack]] = {
    "layout": {"known": "memory", "located": "segment"},
    "segment": {"opened": "memory"},
    "memory": {"full": "buffer"},
    "buffer": {"freed": "memory"},
}

# The source of an arriving version. In `received`, chunks are pushed, and some may be requested; in
# `pulled`, all chunks are requested.
Coming = Literal["received", "pulled", "copied", "decoded"]
Way = Literal["unpushed", "copy-started", "patched", "copy-ended"]

COMING: dict[Coming, dict[Way, Coming]] = {
    "received": {"unpushed": "pulled", "copy-started": "copied"},
    "pulled": {"patched": "decoded"},
    "copied": {"copy-ended": "pulled"},
    "decoded": {},
}

# Whether the deadline of an apply has passed. The user may still use an overdue version.
Time = Literal["in-time", "overdue"]

TIMES: dict[Time, dict[Literal["late"], Time]] = {
    "in-time": {"late": "overdue"},
    "overdue": {},
}

# Whether the worker receives pushed chunks of a model. A worker that dropped an arriving version
# for a newer one completes the next version by fetching before it considers a newer one; otherwise
# a worker that is slower than its publisher would never complete a version.
Mode = Literal["following", "catching-up"]
ModeEvent = Literal["replaced", "completed"]

MODES: dict[Mode, dict[ModeEvent, Mode]] = {
    "following": {"replaced": "catching-up"},
    "catching-up": {"completed": "following"},
}

# The state of a worker's session. While `probing` there is no session: hello was answered, and the
# worker is checking whether it can read the publisher's memory.
Session = Literal["outside", "probing", "inside"]
Change = Literal["located", "welcomed", "unknown", "refused", "silent"]

SESSIONS: dict[Session, dict[Change, Session]] = {
    "outside": {"located": "probing", "welcomed": "inside"},
    "probing": {
        "located": "probing",  # by another welcome
        "welcomed": "inside",
        "unknown": "outside",
        "refused": "outside",
        "silent": "outside",
    },
    "inside": {
        "located": "probing",  # by a publisher of another epoch
        "welcomed": "inside",  # by the same publisher
        "unknown": "outside",
        "refused": "outside",
        "silent": "outside",
    },
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

# Refusals that end a session. The user is warned, and the worker keeps sending hello, since the
# reason may pass. (W20)
TURNED_AWAY = {
    *("name-taken", "stale-epoch", "limit", "protocol-version"),
    *("wrong-name", "not-allowed", "revoked"),  # K3, K4, K8
}
