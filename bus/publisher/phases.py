"""What a publisher's versions, workers and calls go through: phase x event -> phase.

Nothing else moves one. An event that has no arrow from a phase changes nothing. `docs/PROTOCOL.md`
has the same tables (section 9), and `tests/vectors/publisher_phases.json` has every arrow, and
every pair without one.

A version. What its memory is for follows from its phase: it is the machine's until it is *lent* or
*gone*.

    pending ──> latest <──> lent
       │  │       │  │       │
       │  └──> targeted      │
       │          │  │       │
       │          └──┴─> old │
       └────────────────┴────┴──> gone

A worker on the roster. What it says on its data connection is no sign that it has the other: only
what it says there brings it back. Of whoever is *lost* nothing is kept but its name; who leaves in
order, or whose name another has taken, is not on the roster any more.

    here <──> away ──> lost ──> here
       └───────────────> lost

A target, which is one worker in one call of publish. Reports come late, twice, or out of order.

    behind ──> staged ──> applied                 (skipped: it went past this to a newer one)
       │          │
       └──────────┴─────> failed | lost | left    (who was lost, or left, and returns is behind)

The decision of a call that commits together: *open*, until it is *commit* or *abort*.

How they are coupled: who becomes *lost* reads no version any more (`unread`), and calls that wait
for it go on without it, at once or after their grace. Who is *away* is waited for as one that is
here. A version that a call may still commit is `pending`, and so in nobody's way.
"""

from typing import Literal

from ..receipt import State

VersionPhase = Literal[
    "pending",  # it is numbered, and may wait until enough workers have staged it
    "latest",  # of its model, for all workers that have nothing newer of their own
    "lent",  # the same, while nobody is at it: whoever publishes next may write over it
    "targeted",  # the newest that was published to some worker alone
    "old",  # some worker is still at it
    "gone",  # its memory is not the machine's any more
]

VersionEvent = Literal[
    "for-all",  # it is committed, for all workers
    "for-some",  # it is committed, for workers that were named
    "unread",  # nobody is at it: no worker, no comparison, nothing that hashes it
    "asked",  # somebody wants it, and its memory is still there
    "overwritten",  # somebody wants it, and its memory serves another version by now
    "newer",  # other versions are the newest for all that it was for
    "aborted",
    "given-up",  # its memory is wanted for the next version
]

VERSIONS: dict[VersionPhase, dict[VersionEvent, VersionPhase]] = {
    "pending": {
        "for-all": "latest",
        "for-some": "targeted",
        "aborted": "gone",
    },
    "latest": {
        "unread": "lent",
        "newer": "old",
        "given-up": "gone",
    },
    "lent": {
        "asked": "latest",
        "overwritten": "gone",
        "newer": "gone",
        "given-up": "gone",
    },
    "targeted": {
        "newer": "old",
        "given-up": "gone",
    },
    "old": {
        "unread": "gone",
        "given-up": "gone",
    },
    "gone": {},
}

WorkerPhase = Literal[
    "here",
    "away",  # its connection is closed, and it has come on no other
    "lost",
]

WorkerEvent = Literal[
    "spoke",  # it has said something on the control channel
    "closed",  # its connection is
    "overdue",  # it has been away for too long
    "contested",  # it is away, and another instance asks for its name
    "silent",  # it has said nothing for too long
    "ended",  # its process has
]

WORKERS: dict[WorkerPhase, dict[WorkerEvent, WorkerPhase]] = {
    "here": {
        "closed": "away",
        "silent": "lost",
        "ended": "lost",
    },
    "away": {
        "spoke": "here",
        "overdue": "lost",
        "contested": "lost",
        "silent": "lost",
        "ended": "lost",
    },
    "lost": {
        "spoke": "here",
    },
}

TargetEvent = Literal[
    "staged",
    "applied",
    "skipped",
    "failed",
    "lost",
    "left",
    "returned",
]

TARGETS: dict[State, dict[TargetEvent, State]] = {
    "behind": {
        "staged": "staged",
        "applied": "applied",
        "skipped": "skipped",
        "failed": "failed",
        "lost": "lost",
        "left": "left",
    },
    "staged": {
        "applied": "applied",
        "skipped": "skipped",
        "failed": "failed",
        "lost": "lost",
        "left": "left",
    },
    "failed": {  # a retry may succeed
        "staged": "staged",
        "applied": "applied",
        "skipped": "skipped",
        "left": "left",
    },
    "lost": {  # whatever it says, it has returned first
        "left": "left",
        "returned": "behind",
    },
    "left": {
        "returned": "behind",
    },
    "applied": {},
    "skipped": {},
}

Decision = Literal["open", "commit", "abort"]

DecisionEvent = Literal[
    "enough",  # so many have staged it as are required
    "too-few",  # so many cannot any more, or it is given up, or its time is over
]

DECISIONS: dict[Decision, dict[DecisionEvent, Decision]] = {
    "open": {
        "enough": "commit",
        "too-few": "abort",
    },
    "commit": {},
    "abort": {},
}
