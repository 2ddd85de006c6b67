"""How the tables of a worker's versions, models and session are coupled.

All changes of state follow `tables.py`.

    announced ──> arriving ──> staged ──> ready ──> applying ──> running
        │             │           │         │           │           │
        └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected

An event without a transition from the current phase has no effect: messages arrive late, twice and
in any order. `docs/protocol/worker.md` has the same tables, and `tests/vectors/phases.json` has
every transition, and every pair without one, for all languages.

A version is `begun` once its memory is available; a version that needs only its segment is
`mapped`. A worker that is `turned away` warns its user and keeps sending hello, since the reason
may pass (W20).

How the tables are coupled: the versions of a model are in order, and only `ready` and `applying`
can have several. So an event that moves a version on drops those that it leaves behind: see
`DISPLACED`. An arriving version that is dropped for a newer one leaves its model `catching-up`;
otherwise a worker that is slower than its publisher would never complete a version. The next
complete version ends this: see `OF_MODEL`. A new session drops what it does not continue: the
event `fenced` of the versions that are announced, or of another epoch.

One coupling is not in the tables. After a torn apply, the running version has the event `torn` as
soon as that is reported; the version that was applied has it once the user has released it.
"""

from .tables import Event, ModeEvent, Phase

# How a version is coupled to the others of its model: with one of these events, a version in one of
# these phases has the event `newer`. A begun version displaces earlier, when it needs the memory.
DISPLACED: dict[Event, tuple[Phase, ...]] = {
    "begun": ("arriving",),
    "mapped": ("arriving", "staged"),
    "whole": ("staged",),
    "renamed": ("announced", "arriving", "staged"),
    "applied": ("running",),
}

# How a version is coupled to its model: the model has this event after the version's.
OF_MODEL: dict[Event, ModeEvent] = {
    "mapped": "completed",
    "whole": "completed",
    "renamed": "completed",
}

# The events of a version that arrives whole with its announcement, if nothing delays it.
STRAIGHT: tuple[Event, ...] = ("begun", "whole", "committed")

# The outcomes that may be reported of a version in `ready` without an earlier `taken`: the
# machine's own thread has applied the version, and no progress could be reported meanwhile.
AT_ONCE: set[Event] = {"applied", "declined", "failed", "torn", "stale"}
