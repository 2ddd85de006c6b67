"""One call of publish: which workers it is for, what each has done, and when the call is over.

Theory of operation: every target is in one state, and only moves along an arrow (`phases.py`).

`verdict` asks one question of the counts: is the requirement met, can it still be met, is there
time left? A call that must commit together also asks whether enough workers have staged. It is
asked whenever a worker has reported, so the counts are kept up to date and not made anew.

Who falls silent may return, and is waited for a while (`grace`); whose connection is closed was
waited for before it became lost, and whose process has ended will not return (`grace_of_gone`, for
who starts it again). Who leaves in order is no longer one of all. Where a number of workers is
expected, those that join become targets until so many are there.

A call may name the workers that it requires. It is for all that want the model, but only those are
counted: what others do neither achieves it nor delays it.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from ..receipt import Receipt, State, WorkerReceipt
from .phases import DECISIONS, TARGETS, Decision, DecisionEvent, TargetEvent
from .version import Chunked, Version

Wait = Literal["applied", "staged", "none"]
CommitMode = Literal["auto", "together"]

_FINISHED: frozenset[State] = frozenset({"applied", "skipped"})
_THERE: frozenset[State] = frozenset({"applied", "skipped", "staged"})
_UNFINISHED: frozenset[State] = frozenset({"behind", "staged"})
_NOBODY: dict[State, int] = dict.fromkeys(TARGETS, 0)


class Recipient(msgspec.Struct, eq=False):
    """One worker as a publish sees it."""

    name: str
    state: State = "behind"
    at: float | None = None
    detail: str = ""
    encoding: str = ""  # how it came
    nbytes: int = 0


class Terms(msgspec.Struct, frozen=True, eq=False):
    """What a call of publish requires.

    Attributes:
        workers: Names given by the caller; None means every worker that has the model.
        require: How many must get there; None means all.
        named: The workers that must get there, by name, where they are named: `require` is how many
            these are. None: each worker counts.
        wait: What "there" is.
        commit: Whether workers apply on their own or together.
        timeout: Seconds for all of it.
        hash: Workers that read shared memory hash what they read.
        grace: Seconds for which a worker that becomes lost is waited for, as it fell silent.
        grace_of_gone: The same, where its connection is closed or its process has ended.
        expect: Where all are required: how many those must be, at least.
        alive: Where all are required: all but those that are lost.
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
        number: Names the call between the machine and whoever waits.
        version: What is published.
        terms: What it requires.
        started: When it was called, on the machine's clock, in seconds.

    Attributes:
        deadline: When it is over at the latest.
        decision: What has become of one that commits together.
        resolved: Whether whoever waits was told what became of it.
        ended: Why it is given up before its time; empty: it is not.
        targets: The workers that it is for, by name.
        done: The states that count as there.
        for_all: It is over when all are there, and not before.
    """

    def __init__(self, number: int, version: Version, terms: Terms, started: float) -> None:
        self.number, self.version, self.terms = number, version, terms
        self.started, self.deadline = started, started + terms.timeout
        self.decision: Decision = "open"
        self.resolved, self.ended = False, ""
        self.done = _THERE if terms.wait == "staged" else _FINISHED
        self.for_all = terms.require is None and terms.commit == "auto" and terms.wait != "none"
        self.targets: dict[str, Recipient] = {}
        self._counts: dict[State, int] = {**_NOBODY}  # targets in each state, of those that count
        self._away: dict[str, float] = {}  # until when the lost are waited for

    def aim(self, names: Collection[str]) -> None:
        """Say which workers it is for."""
        self.targets = dict(zip(names, map(Recipient, names), strict=True))
        named = self.terms.named
        counted = len(self.targets) if named is None else len(named & self.targets.keys())
        self._counts = {**_NOBODY, "behind": counted}
        self._away = {}

    def welcome(self, name: str) -> None:
        """A worker has joined: it is one of those that are expected, if too few are there."""
        named = self.terms.named
        if name not in self.targets and self.missing and (named is None or name in named):
            self.targets[name] = Recipient(name)
            self._counts["behind"] += 1

    def renew(self) -> None:
        """The version has another number: nobody who is there has it by that yet."""
        gone = [t for t in self.targets.values() if t.state in ("lost", "left")]
        away = self._away
        self.aim(self.targets)
        for target in gone:
            event: TargetEvent = "lost" if target.state == "lost" else "left"
            self.move(target.name, event, target.at or 0.0, target.detail)
        self._away = away

    def lose(self, name: str, now: float, detail: str, *, gone: bool = False) -> None:
        """A worker is lost, and may return; `gone`: it is known that it is not there."""
        self.move(name, "lost", now, detail)
        target = self.targets.get(name)
        named = self.terms.named
        if target is not None and target.state == "lost" and (named is None or name in named):
            self._away[name] = now + (self.terms.grace_of_gone if gone else self.terms.grace)

    def move(self, name: str, event: TargetEvent, now: float, detail: str = "") -> None:
        """Note what became of a worker; one that is no target changes nothing."""
        target = self.targets.get(name)
        after = TARGETS[target.state].get(event) if target is not None else None
        if target is not None and after is not None:
            named = self.terms.named
            if named is None or name in named:
                self._counts[target.state] -= 1
                self._counts[after] += 1
            target.state, target.detail = after, detail
            self._away.pop(name, None)
            target.at = None if after == "behind" else now

    def carried(self, name: str, by: Chunked) -> None:
        """Note how the version came to a worker: by itself, or by a patch."""
        target = self.targets.get(name)
        if target is not None:
            target.encoding = "raw" if by.patch is None else by.patch.encoding
            target.nbytes = by.plan.nbytes

    def _count(self, states: frozenset[State]) -> int:
        return sum(map(self._counts.__getitem__, states))

    @property
    def missing(self) -> int:
        """How many workers are expected besides those that are there."""
        if self.terms.named is not None:
            return len(self.terms.named - self.targets.keys())
        if not self.terms.expect or self.terms.require is not None:
            return 0
        return max(0, self.terms.expect - len(self.targets) + self._gone)

    @property
    def nobody(self) -> bool:
        """Whether it is for all, and all are none."""
        if self.terms.require is not None or self._counts["applied"]:
            return False
        return len(self.targets) == self._gone

    @property
    def _gone(self) -> int:
        """How many are not of all any more."""
        return self._counts["left"] + (self._counts["lost"] if self.terms.alive else 0)

    def _needed(self, now: float) -> int:
        if self.terms.require is not None:
            return self.terms.require
        away = self._may_return(now) if self.terms.alive and now < self.deadline else 0
        return len(self.targets) - self._gone + away + self.missing

    def _may_return(self, now: float) -> int:
        """Count those that are lost and are waited for."""
        return sum(until > now for until in self._away.values()) if self._away else 0

    def _may_come(self, now: float) -> int:
        """Count those that are not there and are waited for."""
        return self.missing + self._may_return(now)

    def decide(self, now: float) -> Decision:
        """Decide a `together` publish: commit, abort, or still open."""
        if self.decision == "open" and self.terms.commit == "together":  # P10
            staged = self._count(_FINISHED) + self._counts["staged"]
            possible = staged + self._counts["behind"] + self._may_come(now)
            if staged >= self._needed(now):
                self._decide("enough")
            elif self.ended or possible < self._needed(now) or now >= self.deadline:
                self._decide("too-few")
        return self.decision

    def _decide(self, event: DecisionEvent) -> None:
        self.decision = DECISIONS[self.decision].get(event, self.decision)

    def verdict(self, now: float) -> bool | None:
        """Return whether the publish achieved what it required; None while that is open."""
        if self._counts["behind"] and self.for_all and not self.ended and now < self.deadline:
            return None  # as after every acknowledgement but the last
        done = self._count(self.done)
        if self.for_all and done == len(self.targets) >= self.terms.expect:
            return True  # as after the last
        open_ = self._count(_UNFINISHED - self.done) + self._may_come(now)
        over = open_ == 0 or now >= self.deadline or bool(self.ended)
        if self.terms.commit == "together" and self.decision == "abort":
            return False
        if self.terms.wait == "none":
            return True
        if self.terms.require is None:  # all: do not give up on the others when one has failed
            return True if done == self._needed(now) else (False if over else None)
        if self.terms.require == 0:
            return True if over else None
        if done >= self.terms.require:
            return True
        return False if over or done + open_ < self.terms.require else None

    def receipt(self, now: float, digest: str) -> Receipt:
        """Return what has become of the publish so far."""
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
                )
                for t in self.targets.values()
            },
            metadata=dict(self.version.metadata),
            detail=self.version.detail,
        )
