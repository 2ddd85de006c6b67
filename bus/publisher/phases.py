"""How the tables of a publisher's versions, workers and calls are coupled.

A phase changes only by the tables of `tables.py`. An event without an arrow from a phase has no
effect. `docs/protocol/publisher.md` has the same tables, and `tests/vectors/publisher_phases.json`
has every pair of a phase and an event, even those without an arrow.

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

from .tables import VersionPhase, WorkerEvent

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

# How a worker is coupled to calls: a call waits until its grace period has ended for a worker that
# became *lost* by one of these events. It stops waiting at once after any other event.
GRACED: set[WorkerEvent] = {"silent"}
