"""Describes the phases of a publisher's versions, workers and calls, and how these are coupled.

A phase changes only by the tables of `tables.py`. An event for which a phase has no transition has
no effect. `docs/protocol/publisher.md` has the same tables. `tests/vectors/publisher_phases.json`
has every pair of a phase and an event, even the pairs without a transition.

A version. The machine owns its memory, except in the phases *reclaimable* and *gone*.

    pending ──> latest <──> reclaimable
       │  │       │  │       │
       │  └──> targeted      │
       │          │  │       │
       │          └──┴─> old │
       └────────────────┴────┴──> gone

A worker on the roster. Only a message on the control channel brings a worker back: a report on the
data connection does not show that the worker has a control connection. No version is kept for a
*lost* worker. A worker that leaves, or whose name another instance takes, is removed.

    here <──> away ──> lost ──> here
       └───────────────> lost

A target: one worker in one call of publish. Reports may be late, repeated or reordered.

    behind ──> staged ──> applied                 (skipped: the worker runs a newer version)
       │          │
       └──────────┴─────> failed | lost | left    (lost, left ──returned──> behind)

The decision of a call that commits together: *open*, then *commit* or *abort*.

How the tables are coupled: a worker that becomes *lost* no longer receives any version, so a
version may get the event `no-readers`. The worker becomes *lost* in every call, and the calls stop
waiting for it after a grace period: see `GRACED`. For calls, an *away* worker is like a worker that
is *here*. A version is `pending` while a call may still commit it. The phase of a version
determines the phase of its memory: see `SNAPSHOTS`.
"""

from typing import Literal

from .tables import VersionPhase, WorkerEvent

# How a version is coupled to its memory: by the version's phase, the phases that its snapshot may
# be in once the effects of the last event are carried out (`PHASES` in `bus/memory/snapshots.py`).
# A reclaimable version has two, since the trainer's thread may reclaim the snapshot at any time.
SNAPSHOTS: dict[VersionPhase, tuple[Literal["held", "reclaimable", "released"], ...]] = {
    "pending": ("held",),
    "latest": ("held",),
    "reclaimable": ("reclaimable", "released"),
    "targeted": ("held",),
    "old": ("held",),
    "gone": ("released",),
}

# How a worker is coupled to calls: if a worker became *lost* by one of these events, calls wait for
# it during `grace`; after any other event, during `grace_of_gone` (`publication.py`).
GRACED: set[WorkerEvent] = {"silent"}
