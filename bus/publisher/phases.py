"""Transition tables of a publisher's versions, workers and calls: phase and event -> next phase.

A phase changes only by these tables. An event without an arrow from a phase has no effect.
`docs/protocol/publisher.md` has the same tables, and `tests/vectors/publisher_phases.json` has
every pair of a phase and an event, even those without an arrow.

A version. The machine owns its memory, except while the version is *reclaimable* or *gone*.

    pending ──> latest <──> reclaimable
       │  │       │  │       │
       │  └──> targeted      │
       │          │  │       │
       │          └──┴─> old │
       └────────────────┴────┴──> gone

A worker on the roster. Only a message on the control channel brings a worker back: a report on the
data connection does not show that the worker has a control connection. No version is kept for a
*lost* worker. A worker that leaves in order, or whose name another instance takes, is removed.

    here <──> away ──> lost ──> here
       └───────────────> lost

A target: one worker in one call of publish. Reports may be late, repeated or reordered.

    behind ──> staged ──> applied                 (skipped: the worker runs a newer version)
       │          │
       └──────────┴─────> failed | lost | left    (lost or left, then returned: behind)

The decision of a call that commits together: *open*, then *commit* or *abort*.

How the tables are coupled: a worker that becomes *lost* receives no version any more, so a version
may get the event `no-readers`. It becomes *lost* in every call, and calls stop waiting for it: see
`GRACED`. For calls, an *away* worker is like a worker that is *here*. A version is `pending` while
a call may still commit it. A version and its memory move together: see `SNAPSHOTS`.
"""

from typing import Literal

from ..receipt import State

VersionPhase = Literal[
    "pending",  # numbered, and not committed: workers may have to stage it first
    "latest",  # the newest version, for workers without a newer targeted one
    "reclaimable",  # the latest, but no worker receives it
    "targeted",  # the newest version that was published to named workers only
    "old",  # replaced, but a worker still receives it
    "gone",  # the machine no longer owns its memory
]

VersionEvent = Literal[
    "for-all",  # committed, for all workers
    "for-some",  # committed, for named workers
    "no-readers",  # no worker receives it, and no step hashes or compares it
    "requested",  # its bytes are requested, and still in memory
    "overwritten",  # its bytes are requested, but were overwritten by another version
    "newer",  # newer versions replaced it for all of its workers
    "aborted",
    "evicted",  # it is evicted: the next version needs its memory
]

VERSIONS: dict[VersionPhase, dict[VersionEvent, VersionPhase]] = {
    "pending": {
        "for-all": "latest",
        "for-some": "targeted",
        "aborted": "gone",
    },
    "latest": {
        "no-readers": "reclaimable",
        "newer": "old",
        "evicted": "gone",
    },
    "reclaimable": {
        "requested": "latest",
        "overwritten": "gone",
        "newer": "gone",
        "evicted": "gone",
    },
    "targeted": {
        "newer": "old",
        "evicted": "gone",
    },
    "old": {
        "no-readers": "gone",
        "evicted": "gone",
    },
    "gone": {},
}

# How a version is coupled to its memory: after each event of a version, and its effects, its
# snapshot is in one of these phases (`PHASES` in `bus/memory/snapshots.py`). Only a reclaimable
# version leaves a choice, since the trainer's thread may reclaim the snapshot at any time.
SNAPSHOTS: dict[VersionPhase, tuple[Literal["held", "reclaimable", "released"], ...]] = {
    "pending": ("held",),
    "latest": ("held",),
    "reclaimable": ("reclaimable", "released"),
    "targeted": ("held",),
    "old": ("held",),
    "gone": ("released",),
}

WorkerPhase = Literal[
    "here",
    "away",  # its connection is closed, and it has no new connection
    "lost",
]

WorkerEvent = Literal[
    "spoke",  # the worker sent a message on the control channel
    "closed",  # its connection was closed
    "overdue",  # the worker has been away for too long
    "contested",  # the worker is away, and another instance requests its name
    "silent",  # the worker has sent nothing for too long
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

# How a worker is coupled to calls: a call waits until its grace period has ended for a worker that
# became *lost* by one of these events. It stops waiting at once after any other event.
GRACED: set[WorkerEvent] = {"silent"}

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
    "lost": {  # any message of the worker is preceded by `returned`
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
    "enough",  # as many workers as required have staged the version
    "too-few",  # too few workers remain, or the call has ended
]

DECISIONS: dict[Decision, dict[DecisionEvent, Decision]] = {
    "open": {
        "enough": "commit",
        "too-few": "abort",
    },
    "commit": {},
    "abort": {},
}
