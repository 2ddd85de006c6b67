"""One call of publish: its target workers, their states, and whether the call is over.

Versions of several models may be published as one. Their calls form a `Group`, which is decided and
ends as a whole.

Each target is in one state, which changes only as the table in `tables.py` allows.

`verdict` decides, from the number of targets in each state, whether the requirement is met, or can
still be met. `decide` does the same for the commit of a call that commits together. Both run after
every report, so the numbers are updated incrementally.

A worker that became silent may return, so the call waits for it for `grace` seconds. For a worker
whose connection is closed or whose process has ended, the call waits for `grace_of_gone` seconds
instead: the publisher has already waited for a new connection, and an ended worker returns only if
it is restarted. A worker that has left no longer counts. If a number of workers is expected,
workers that join become targets until that number is reached.

A call may name the workers that it requires. The version is still sent to all workers that want the
model, but only the named workers decide whether and when the call is achieved.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from ..receipt import LEAST_DONE, Receipt, State, WorkerReceipt
from .tables import DECISIONS, TARGETS, Decision, DecisionEvent, TargetEvent
from .version import AnnouncedTerms, Chunked, CommitMode, Version

Wait = Literal["applied", "staged", "none"]

_FINISHED: frozenset[State] = frozenset({"applied", "skipped"})
_STAGED_OR_APPLIED: frozenset[State] = frozenset({"applied", "skipped", "staged"})
_UNFINISHED: frozenset[State] = frozenset({"behind", "staged"})
_ZERO_COUNTS: dict[State, int] = dict.fromkeys(TARGETS, 0)


class Recipient(msgspec.Struct, eq=False):
    """One target of a call of publish: a worker, and its state."""

    name: str
    state: State = "behind"
    at: float | None = None  # when the target reached its state; None while it is `behind`
    detail: str = ""
    encoding: str = ""  # how the worker received the version: `raw`, or a patch's encoding
    nbytes: int = 0  # bytes of that version or patch
    through: tuple[str, ...] = ()  # the relays before the worker

    def explain(self, text: str) -> None:
        """Set the text that says why the target is not done."""
        self.detail = text

    def reached_through(self, relays: tuple[str, ...]) -> None:
        """Set the relays before the worker."""
        self.through = relays


class PublishTerms(msgspec.Struct, frozen=True, eq=False):
    """What a call of publish requires.

    Attributes:
        workers: The names of the workers to publish to; None: every worker that wants the model.
        require: How many workers must be done; None: all.
        named: The names of the workers that count, of which `require` must be done; None: every
            worker counts.
        wait: The state in which a worker counts as done.
        commit: Whether workers apply as soon as they are ready (`auto`), or together.
        timeout: Seconds for the whole call.
        hash: Whether workers that read shared memory must hash what they read.
        grace: Seconds to wait for a worker that is lost because it became silent.
        grace_of_gone: Seconds to wait for a worker whose connection is closed or process has ended.
        expect: If all workers are required, the least number of workers that the call waits for.
        alive: If all workers are required: whether lost workers do not count.
    """

    workers: tuple[str, ...] | None = None
    require: int | None = None
    named: frozenset[str] | None = None
    wait: Wait = "applied"
    commit: CommitMode = "auto"
    timeout: float = 10.0
    hash: bool = False
    grace: float = 0.0
    grace_of_gone: float = 0.0
    expect: int = 0
    alive: bool = False


class Publication:
    """One call of publish.

    Args:
        number: The number of the call, by which `Resolve` effects name it.
        version: The published version.
        terms: What the call requires.
        started: When the call was made, on the machine's clock, in seconds.
        names: The names of the workers that the version is for; each begins as `behind`.

    Attributes:
        deadline: The time at which the call is over at the latest.
        decision: Whether the version is committed or aborted, if the call commits together.
        resolved: Whether the caller has got the result.
        ended: Why the call was ended before its deadline; empty: it was not.
        targets: The workers that the version is for, by name.
        announced: What the announcement of the version asks of workers while the call is open.
        done: The states in which a target counts as done.
        for_all: Whether the call is achieved only when all targets are done.
        group: The calls of versions that are published as one with this one; None: there are none.
    """

    def __init__(
        self,
        number: int,
        version: Version,
        terms: PublishTerms,
        started: float,
        names: Collection[str],
    ) -> None:
        self.number, self.version, self.terms = number, version, terms
        self.group: Group | None = None
        self.started, self.deadline = started, started + terms.timeout
        self.decision: Decision = "open"
        self.resolved, self.ended = False, ""
        staged = terms.wait == "staged" or terms.commit == "together"
        acknowledge: Literal["applied", "staged"] = "staged" if staged else "applied"
        self.announced = AnnouncedTerms(terms.commit, acknowledge, terms.hash)
        self.done = _STAGED_OR_APPLIED if terms.wait == "staged" else _FINISHED
        self.for_all = terms.require is None and terms.commit == "auto" and terms.wait != "none"
        self.targets = dict(zip(names, map(Recipient, names), strict=True))
        named = terms.named
        counted = len(self.targets) if named is None else len(named & self.targets.keys())
        # The number of targets that count, by state.
        self._counts: dict[State, int] = {**_ZERO_COUNTS, "behind": counted}
        self._grace_ends: dict[str, float] = {}  # by lost worker, when the call stops waiting

    def welcome(self, name: str) -> None:
        """Handle a worker that joins: it becomes a target if more workers are expected."""
        named, group = self.terms.named, self.group
        expected = self.missing if group is None else group.missing or name in group.targets
        if name not in self.targets and expected and (named is None or name in named):
            self.targets[name] = Recipient(name)
            self._counts["behind"] += 1
            if group is not None:
                group.recount(name)

    def renew(self) -> None:
        """Reset all targets except lost and left ones, after the version moved to a later epoch."""
        named = self.terms.named
        for target in self.targets.values():
            target.encoding, target.nbytes = "", 0
            if target.state in ("lost", "left"):
                continue
            if named is None or target.name in named:
                self._counts[target.state] -= 1
                self._counts["behind"] += 1
            target.state, target.at, target.detail = "behind", None, ""
            if self.group is not None:
                self.group.recount(target.name)

    def lose(self, name: str, now: float, detail: str, *, gone: bool = False) -> None:
        """Handle the loss of a worker.

        `gone` is true if the worker's connection is closed or its process has ended.
        """
        self.move(name, "lost", now, detail)
        target = self.targets.get(name)
        named = self.terms.named
        if target is not None and target.state == "lost" and (named is None or name in named):
            self._grace_ends[name] = now + (self.terms.grace_of_gone if gone else self.terms.grace)
            if self.group is not None:
                self.group.recount(name, self._grace_ends[name])

    def move(self, name: str, event: TargetEvent, now: float, detail: str = "") -> None:
        """Change a target's state as the table says. Ignore a worker that is not a target."""
        target = self.targets.get(name)
        after = TARGETS[target.state].get(event) if target is not None else None
        if target is not None and after is not None:
            named = self.terms.named
            if named is None or name in named:
                self._counts[target.state] -= 1
                self._counts[after] += 1
            target.state, target.detail = after, detail
            self._grace_ends.pop(name, None)
            target.at = None if after == "behind" else now
            if self.group is not None:
                self.group.recount(name)

    def record_transport(self, name: str, by: Chunked) -> None:
        """Record how a worker received the version. `by` is the version itself, or a patch."""
        target = self.targets.get(name)
        if target is not None:
            target.encoding = "raw" if by.patch is None else by.patch.encoding
            target.nbytes = by.plan.nbytes

    def _count(self, states: frozenset[State]) -> int:
        return sum(map(self._counts.__getitem__, states))

    @property
    def missing(self) -> int:
        """The number of expected workers that have not joined."""
        if self.terms.named is not None:
            return len(self.terms.named - self.targets.keys())
        if not self.terms.expect or self.terms.require is not None:
            return 0
        return max(0, self.terms.expect - len(self.targets) + self._not_counted)

    @property
    def has_no_recipient(self) -> bool:
        """True if the call requires all targets, but no target counts."""
        if self.terms.require is not None or self._counts["applied"]:
            return False
        return len(self.targets) == self._not_counted

    @property
    def _not_counted(self) -> int:
        """The number of targets that no longer count if all targets are required."""
        return self._counts["left"] + (self._counts["lost"] if self.terms.alive else 0)

    def _needed(self, now: float) -> int:
        """Return the number of targets that must be done."""
        if self.terms.require is not None:
            return self.terms.require
        away = self._count_returning(now) if self.terms.alive and now < self.deadline else 0
        return len(self.targets) - self._not_counted + away + self.missing

    def _count_returning(self, now: float) -> int:
        """Return the number of lost workers that the call waits for."""
        return sum(until > now for until in self._grace_ends.values()) if self._grace_ends else 0

    def _count_awaited(self, now: float) -> int:
        """Return the number of lost or expected workers that the call waits for."""
        return self.missing + self._count_returning(now)

    def end(self, why: str) -> None:
        """End the call before its deadline. An open commit is decided by the next `decide`."""
        self.ended = why
        if self.group is not None:
            self.group.end(why)

    def expire(self, now: float) -> None:
        """Move the call's deadline to now."""
        self.deadline = now
        if self.group is not None:
            self.group.expire(now)

    def decide(self, now: float) -> Decision:
        """Decide a call that commits together, if that is possible now; return the decision."""
        if self.decision == "open" and self.terms.commit == "together":  # P10
            staged = self._count(_FINISHED) + self._counts["staged"]
            possible = staged + self._counts["behind"] + self._count_awaited(now)
            if staged >= self._needed(now):
                self._decide("enough")
            elif self.ended or possible < self._needed(now) or now >= self.deadline:
                self._decide("too-few")
        return self.decision

    def _decide(self, event: DecisionEvent) -> None:
        self.decision = DECISIONS[self.decision].get(event, self.decision)

    def verdict(self, now: float) -> bool | None:
        """Return whether the call achieved what it requires; None while that is undecided."""
        if self._counts["behind"] and self.for_all and not self.ended and now < self.deadline:
            return None  # fast path: after each acknowledgement before the last
        if self.for_all and self._counts["applied"] == len(self.targets) >= self.terms.expect:
            return True  # fast path: after the last acknowledgement
        done = self._count(self.done)
        open_ = self._count(_UNFINISHED - self.done) + self._count_awaited(now)
        over = open_ == 0 or now >= self.deadline or bool(self.ended)
        if self.terms.commit == "together" and self.decision == "abort":
            return False
        if self.terms.wait == "none":
            return True
        if self.terms.require is None:  # all: wait for the others even if one has failed
            return True if done == self._needed(now) else (False if over else None)
        if self.terms.require == 0:
            return True if over else None
        if done >= self.terms.require:
            return True
        return False if over or done + open_ < self.terms.require else None

    def resolve(self, now: float, digest: str) -> Receipt:
        """Resolve the call: return the receipt, with the targets' states at this time."""
        self.resolved = True
        return Receipt(
            model=self.version.model,
            epoch=self.version.epoch,
            version=self.version.version,
            nbytes=self.version.layout.nbytes,
            seconds=now - self.started,
            digest=digest,
            workers={
                t.name: WorkerReceipt(
                    t.name,
                    t.state,
                    None if t.at is None else t.at - self.started,
                    t.detail,
                    t.encoding,
                    t.nbytes,
                    t.through,
                )
                for t in self.targets.values()
            },
            metadata=dict(self.version.metadata),
            detail=self.version.detail,
        )


class Group(Publication):
    """The calls of versions that are published as one, which are decided and resolved together.

    The group is itself a call. The state of a target is the least advanced of the worker's states
    in the group's calls, by the order of `LEAST_DONE`. A call for a model that the worker does not
    want is left out.

    Args:
        parts: The calls, whose terms are the same.

    Attributes:
        parts: The calls.
    """

    def __init__(self, parts: Collection[Publication]) -> None:
        first = next(iter(parts))
        super().__init__(first.number, first.version, first.terms, first.started, ())
        self.group, self.parts = self, parts
        for part in parts:
            part.group = self
            for name in part.targets:
                self.recount(name)

    def recount(self, name: str, grace_ends: float | None = None) -> None:
        """Update a target's state; `grace_ends`: when the calls stop waiting for a lost worker."""
        states: list[State] = [p.targets[name].state for p in self.parts if name in p.targets]
        state, known = min(states, key=LEAST_DONE.index), self.targets.get(name)
        target = self.targets[name] = known or Recipient(name)
        if self.terms.named is None or name in self.terms.named:
            self._counts[target.state] -= known is not None
            self._counts[state] += 1
        target.state = state
        if state != "lost":
            self._grace_ends.pop(name, None)
        elif grace_ends is not None:
            self._grace_ends[name] = grace_ends

    def end(self, why: str) -> None:
        """End the calls before their deadline."""
        self.ended = why
        for part in self.parts:
            part.ended = why

    def expire(self, now: float) -> None:
        """Move the group's deadline to now."""
        self.deadline = now

    def close(self) -> None:
        """Record that every caller has got its result."""
        self.resolved = True

    def _decide(self, event: DecisionEvent) -> None:
        super()._decide(event)
        for part in self.parts:
            part.decision = self.decision
