"""Couples the state tables of `tables.py`: which transition causes another one.

All changes of a worker's state follow those tables. A version goes through these phases:

    announced ──> arriving ──> staged ──> ready ──> applying ──> running
        │             │           │         │           │           │
        └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected

An event without a transition from the current phase has no effect: messages arrive late, twice and
in any order. `docs/protocol/worker.md` shows the same tables. `tests/vectors/phases.json` has, for
all languages, every transition and every pair of phase and event without a transition.

A version is `begun` once its memory is available; a version that needs only its segment is
`mapped`. A worker that is turned away (`TURNED_AWAY`) warns its user and keeps sending hello,
since the reason may pass (W20).

Newer versions of a model come after older ones, and only the phases `ready` and `applying` can
hold several versions. So an event that moves a version on drops the versions that it leaves
behind: see `DISPLACED`. When an arriving version is dropped for a newer one, its model changes to
`catching-up`; otherwise a worker that is slower than its publisher would never complete a version.
The next complete version ends this mode: see `OF_MODEL`. A new session drops the versions that do
not continue: announced versions and versions of another epoch have the event `fenced`.

One coupling is not in the tables. After a torn apply, the running version has the event `torn` as
soon as the tear is reported. The version whose apply failed has that event once the user has
released the version.
"""

from .tables import Event, ModeEvent, Phase

# When a version has one of these events, the version of its model in each of the phases listed has
# the event `newer`. For `begun`, that happens earlier: when the version needs the memory.
DISPLACED: dict[Event, tuple[Phase, ...]] = {
    "begun": ("arriving",),
    "mapped": ("arriving", "staged"),
    "whole": ("staged",),
    "renamed": ("announced", "arriving", "staged"),
    "applied": ("running",),
}

# When a version has one of these events, its model then has the event listed.
OF_MODEL: dict[Event, ModeEvent] = {
    "mapped": "completed",
    "whole": "completed",
    "renamed": "completed",
}

# The events of a version that arrives whole with its announcement and is not delayed.
STRAIGHT: tuple[Event, ...] = ("begun", "whole", "committed")

# The outcomes that may be reported for a version in `ready`, without `taken` before. The thread of
# the state machine has then applied the version itself, so it could not report the start.
AT_ONCE: set[Event] = {"applied", "declined", "failed", "torn", "stale"}
