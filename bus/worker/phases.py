"""How the tables of a worker are used. All changes of state follow `tables.py`.

    announced ──> arriving ──> staged ──> ready ──> applying ──> running
        │             │           │         │           │           │
        └─────────────┴───────────┴─────────┴───────────┴───────────┴──> dropped, rejected

An event without a transition from the current phase has no effect: messages arrive late, twice and
in any order. `docs/protocol/worker.md` has the same tables, and `tests/vectors/phases.json` has
every transition, and every pair without one, for all languages.

A version is `begun` once its memory is available; a version that needs only its segment is
`mapped`. An arriving version that is dropped for a newer one leaves its model `catching-up`;
otherwise a worker that is slower than its publisher would never complete a version. A worker that
is `turned away` warns its user and keeps sending hello, since the reason may pass (W20).
"""

from .tables import Event

# The events of a version that arrives whole with its announcement, if nothing delays it.
STRAIGHT: tuple[Event, ...] = ("begun", "whole", "committed")

# The outcomes that may be reported of a version in `ready` without an earlier `taken`: the
# machine's own thread has applied the version, and no progress could be reported meanwhile.
AT_ONCE: set[Event] = {"applied", "declined", "failed", "torn", "stale"}
