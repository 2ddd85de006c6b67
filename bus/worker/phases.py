"""What a version goes through at a worker: phase x event -> phase. Nothing else moves one.

    announced ──> arriving ──> staged ──> ready ──> applying ──> running
        │             │           │         │           │           │
        └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected

An event that has no arrow from a version's phase changes nothing: messages come late, twice and in
any order. `docs/PROTOCOL.md` has the same tables (section 8), and `tests/vectors/phases.json` has
every arrow, and every pair without one, for all languages.
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
    Whole,
)
from ..messages import Applied, Failed, Message, Staged

Phase = Literal[
    "announced",  # there is such a version; its layout or memory is missing
    "arriving",  # its chunks are coming
    "staged",  # whole and verified; waits for a commit
    "ready",  # the user may apply it
    "applying",  # the user does
    "running",
    "dropped",  # of no use; it may be announced again
    "rejected",  # not tried again in this session, unless the model here changes
]

Event = Literal[
    "begun",  # its layout is known and fits, and there is memory
    "mapped",  # its segment is open, and it need not be staged
    "whole",  # all chunks and the digest are here, and match
    "committed",  # it is `auto`, or `commit` came, or it is announced as `auto`
    "taken",  # the user begins to apply it
    "put-back",  # the user will apply it later
    "applied",
    "declined",  # a check fails that a repetition will not mend, or the user turns it down
    "failed",  # something fails that may be otherwise next time
    "torn",  # an apply has failed half-way: what ran is gone, too
    "stale",  # its segment holds another version by now
    "renamed",  # a newer version has the same bytes
    "newer",  # a newer version takes its place
    "gone",  # the publisher has it no more
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

# What happens at once to a version that came whole with its announcement, if nothing is in its way.
STRAIGHT: tuple[Event, ...] = ("begun", "whole", "committed")

# What may be said of a version that is ready, though it was not taken before: by the thread that
# the machine is in, which nobody can ask meanwhile how far it is.
AT_ONCE: set[Event] = {"applied", "declined", "failed", "torn", "stale"}

# Of an announced version: what it lacks. Who lacks a layout has asked for it; a segment and memory
# are there at once, or are not to be had; a buffer is when another version lets go of one. It is
# `begun` once it lacks no more than memory, and `mapped` once it lacks no more than a segment.
Lack = Literal["layout", "segment", "memory", "buffer"]
LackEvent = Literal["known", "located", "opened", "full", "freed"]

LACKS: dict[Lack, dict[LackEvent, Lack]] = {
    "layout": {"known": "memory", "located": "segment"},
    "segment": {"opened": "memory"},
    "memory": {"full": "buffer"},
    "buffer": {"freed": "memory"},
}

# Of an arriving version: how it comes. A chunk that is received may have been asked for; where
# nothing more is pushed, all are.
Coming = Literal["received", "pulled", "copied", "decoded"]
Way = Literal["unpushed", "lent", "patched", "returned"]

COMING: dict[Coming, dict[Way, Coming]] = {
    "received": {"unpushed": "pulled", "lent": "copied"},
    "pulled": {"patched": "decoded"},
    "copied": {"returned": "pulled"},
    "decoded": {},
}

# Of an applying version: whether there is time left for it. Whoever has none may yet hold it.
Time = Literal["in-time", "overdue"]

TIMES: dict[Time, dict[Literal["late"], Time]] = {
    "in-time": {"late": "overdue"},
    "overdue": {},
}

# Of a model: whether its worker takes what is pushed. Who had to drop an arriving version for a
# newer one finishes the next, by fetching, before it looks at anything newer; else one that is
# slower than its publisher would never complete any.
Mode = Literal["following", "catching-up"]
ModeEvent = Literal["replaced", "completed"]

MODES: dict[Mode, dict[ModeEvent, Mode]] = {
    "following": {"replaced": "catching-up"},
    "catching-up": {"completed": "following"},
}

# Of a worker: whether it has a session with its publisher. While it probes it has none: its hello
# is answered, and it is yet to be seen whether the publisher's memory can be read.
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
        "welcomed": "inside",  # the same
        "unknown": "outside",
        "refused": "outside",
        "silent": "outside",
    },
}

# What goes out with an arrow, besides what needs none: what is asked for, and what is said again.
SAYS: dict[
    Event | LackEvent | Way | Literal["late"] | ModeEvent | Change,
    tuple[type[Effect | Message], ...],
] = {
    "known": (Reserve,),
    "located": (Open,),
    "opened": (Reserve,),
    "freed": (Reserve,),
    "begun": (Subscribe,),  # to patches, or no longer
    "mapped": (Ready,),
    "lent": (Copy,),
    "patched": (Decode,),
    "whole": (Staged, Whole),
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

# Refusals that end a session, and that users are told of: the reason may pass. (W20)
TURNED_AWAY = {
    *("name-taken", "stale-epoch", "limit", "protocol-version"),
    *("wrong-name", "not-allowed", "revoked"),  # K3, K4, K8
}
