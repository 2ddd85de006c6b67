"""The tables of states of a publisher. Made by `make protocol`; do not edit."""

from typing import Literal

from ..receipt import State

# A worker on the roster.
WorkerPhase = Literal[
    "here",  # is connected
    "away",  # its connection is closed, and there is no new one yet
    "lost",  # another instance may take its name
]

WorkerEvent = Literal[
    "spoke",  # sends a message on the control channel (P3, P18)
    "closed",  # loses its control connection (P18)
    "overdue",  # has been away for `gone_after` (P18)
    "contested",  # is away, and another instance requests its name (P3)
    "silent",  # has sent nothing for `lost_after` (P18)
    "ended",  # ends: its process is gone (P18)
]

WORKERS: dict[WorkerPhase, dict[WorkerEvent, WorkerPhase]] = {
    "here": {"closed": "away", "silent": "lost", "ended": "lost"},
    "away": {
        "spoke": "here",
        "overdue": "lost",
        "contested": "lost",
        "silent": "lost",
        "ended": "lost",
    },
    "lost": {"spoke": "here"},
}

TargetEvent = Literal[
    "staged",  # reports the version staged, with the right digest (P11)
    "applied",  # reports the version applied, with the right digest (P12)
    "skipped",  # reports a newer version applied (P12)
    "failed",  # reports the version failed (P13)
    "lost",  # is lost on the roster (P18)
    "left",  # sends `bye` or a `hello` with another name, or its key is revoked (P18)
    "returned",  # is welcomed, or sends a message after it was lost (P18)
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
    "applied": {},
    "skipped": {},
    "failed": {"staged": "staged", "applied": "applied", "skipped": "skipped", "left": "left"},
    "lost": {"left": "left", "returned": "behind"},
    "left": {"returned": "behind"},
}

# The decision on a version that is committed together.
Decision = Literal[
    "open",  # is not made yet
    "commit",  # commits the version
    "abort",  # drops the version
]

DecisionEvent = Literal[
    "enough",  # the required number of workers has staged the version (P10)
    # the required number has become impossible, or the deadline or the user ends the call (P10)
    "too-few",
]

DECISIONS: dict[Decision, dict[DecisionEvent, Decision]] = {
    "open": {"enough": "commit", "too-few": "abort"},
    "commit": {},
    "abort": {},
}

# A published version.
VersionPhase = Literal[
    "pending",  # waits for its decision
    "latest",  # is the newest for all workers, except those named for a newer one
    "reclaimable",  # is the newest, but no worker receives it: the next version may overwrite it
    "targeted",  # is the newest for some named workers
    "old",  # is no longer the newest, but a worker still receives it
    "gone",  # is not available any more
]

VersionEvent = Literal[
    "for-all",  # the version is committed for all workers (P6)
    "for-some",  # the version is committed for named workers (P6)
    "newer",  # the version is no longer the newest for any worker (P8)
    "aborted",  # the decision is abort (P10)
    "no-readers",  # nothing receives, hashes or compares the version (P9)
    "requested",  # the version is requested, and its memory still holds it (P9)
    "overwritten",  # the version is requested, but its memory holds another version (P9)
    "evicted",  # the next version needs its memory (P9)
]

VERSIONS: dict[VersionPhase, dict[VersionEvent, VersionPhase]] = {
    "pending": {"for-all": "latest", "for-some": "targeted", "aborted": "gone"},
    "latest": {"no-readers": "reclaimable", "newer": "old", "evicted": "gone"},
    "reclaimable": {
        "requested": "latest",
        "overwritten": "gone",
        "newer": "gone",
        "evicted": "gone",
    },
    "targeted": {"newer": "old", "evicted": "gone"},
    "old": {"no-readers": "gone", "evicted": "gone"},
    "gone": {},
}
