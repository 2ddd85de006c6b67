"""The transition tables of a publisher's versions, workers and calls: phase x event -> phase.

A phase changes only by these tables. An event without an arrow from a phase has no effect.
`docs/PROTOCOL.md` has the same tables (section 9), and `tests/vectors/publisher_phases.json` has
every arrow, and every pair without one.

A version. The machine owns its memory until the version is *lent* (reclaimable) or *gone*.

    pending ──> latest <──> lent
       │  │       │  │       │
       │  └──> targeted      │
       │          │  │       │
       │          └──┴─> old │
       └────────────────┴────┴──> gone

A worker on the roster. Only a message on the control channel brings a worker back: a report on its
data connection does not show that it has a control connection. For a *lost* worker no version is
kept. A worker that leaves in order, or whose name another instance takes, is removed.

    here <──> away ──> lost ──> here
       └───────────────> lost

A target, which is one worker in one call of publish. Reports may be late, repeated or reordered.

    behind ──> staged ──> applied                 (skipped: it runs a newer version)
       │          │
       └──────────┴─────> failed | lost | left    (lost or left, then returned: behind)

The decision of a call that commits together: *open*, until it is *commit* or *abort*.

How they are coupled: a worker that becomes *lost* no longer receives any version (which may become
`unread`), and calls stop waiting for it, at once or after their grace period. Calls wait for an
*away* worker as for one that is *here*. A version that a call may still commit is `pending`.
"""

from typing import Literal

from ..receipt import State

VersionPhase = Literal[
    "pending",  # it has a number, and may wait until enough workers have staged it
    "latest",  # of its model, for all workers without a newer targeted version
    "lent",  # the latest, reclaimable: no worker receives it, so the next publish may overwrite it
    "targeted",  # the newest that was published to some named workers
    "old",  # replaced, but some worker still receives it
    "gone",  # the machine no longer owns its memory
]

VersionEvent = Literal[
    "for-all",  # it is committed, for all workers
    "for-some",  # it is committed, for named workers
    "unread",  # no worker receives it, and nothing hashes or compares it
    "asked",  # it is requested, and its memory still has it
    "overwritten",  # it is requested, but its memory already holds another version
    "newer",  # newer versions replaced it for all of its workers
    "aborted",
    "given-up",  # it is evicted: the next version needs its memory
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
    "away",  # its connection is closed, and it has not reconnected
    "lost",
]

WorkerEvent = Literal[
    "spoke",  # it sent a message on the control channel
    "closed",  # its connection was closed
    "overdue",  # it has been away for too long
    "contested",  # it is away, and another instance asks for its name
    "silent",  # it has sent nothing for too long
    "ended",  # its process has ended
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
    "lost": {  # any message of it is preceded by `returned`
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
    "enough",  # as many workers as required have staged it
    "too-few",  # that is impossible, the call is ended early, or its deadline has passed
]

DECISIONS: dict[Decision, dict[DecisionEvent, Decision]] = {
    "open": {
        "enough": "commit",
        "too-few": "abort",
    },
    "commit": {},
    "abort": {},
}
