"""One call of publish: which workers it is for, what each has done, and when the call is over.

Theory of operation: every target is in one state, and only moves along an arrow.

    behind ──> staged ──> applied          (skipped: it went past this version to a newer one)
       │          │
       └──────────┴─────> failed | lost    (a lost worker that returns is behind again)

`verdict` asks one question of the counts: is the requirement met, can it still be met, is there
time left? A call that must commit together also asks whether enough workers have staged. It is
asked whenever a worker has reported, so the counts are kept up to date and not made anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from .receipt import Receipt, State, WorkerReceipt
from .version import Version

Wait = Literal["applied", "staged", "none"]
CommitMode = Literal["auto", "together"]
Decision = Literal["open", "commit", "abort"]

# What a target may become next. Reports may come late, twice, or out of order; whatever has no
# arrow here changes nothing.
ARROWS: dict[State, frozenset[State]] = {
    "behind": frozenset({"staged", "applied", "skipped", "failed", "lost"}),
    "staged": frozenset({"applied", "skipped", "failed", "lost"}),
    "lost": frozenset({"behind", "staged", "applied", "skipped", "failed"}),
    "failed": frozenset({"staged", "applied", "skipped"}),  # a retry may succeed
    "applied": frozenset(),
    "skipped": frozenset(),
}

_FINISHED: frozenset[State] = frozenset({"applied", "skipped"})
_STAGED: frozenset[State] = frozenset({"staged"})
_UNFINISHED: frozenset[State] = frozenset({"behind", "staged"})


@dataclass(slots=True)
class Target:
    """One worker as a publish sees it."""

    name: str
    state: State = "behind"
    at: float | None = None
    detail: str = ""


@dataclass(slots=True)
class Publication:
    """One call of publish.

    Attributes:
        id: Names the call between the machine and whoever waits.
        version: What is published.
        workers: Names given by the caller; None means every worker that has the model.
        require: How many must get there; None means all.
        wait: What "there" is.
        commit: Whether workers apply on their own or together.
        started, deadline: On the machine's clock, in seconds.
    """

    id: int
    version: Version
    workers: tuple[str, ...] | None
    require: int | None
    wait: Wait
    commit: CommitMode
    started: float
    deadline: float
    hash: bool = False  # workers that read shared memory hash what they read
    decision: Decision = "open"
    resolved: bool = False
    superseded: bool = False
    targets: dict[str, Target] = field(init=False)
    done: frozenset[State] = field(init=False)  # the states that count as there
    _open: frozenset[State] = field(init=False)  # those that may still become one of them
    _counts: dict[State, int] = field(init=False)  # targets in each state

    def __post_init__(self) -> None:
        self.done = _FINISHED | _STAGED if self.wait == "staged" else _FINISHED
        self._open = _UNFINISHED - self.done
        self.aim(())

    def aim(self, names: Iterable[str]) -> None:
        """Say which workers it is for."""
        self.targets = {name: Target(name) for name in names}
        self._counts = dict.fromkeys(ARROWS, 0)
        self._counts["behind"] = len(self.targets)

    def move(self, name: str, state: State, now: float, detail: str = "") -> None:
        """Note what a worker did; a worker that is no target changes nothing."""
        target = self.targets.get(name)
        if target is not None and state in ARROWS[target.state]:
            self._counts[target.state] -= 1
            self._counts[state] += 1
            target.state, target.detail = state, detail
            target.at = None if state == "behind" else now

    def _count(self, states: frozenset[State]) -> int:
        return sum(map(self._counts.__getitem__, states))

    @property
    def _needed(self) -> int:
        return len(self.targets) if self.require is None else self.require

    def decide(self, now: float) -> Decision:
        """Decide a `together` publish: commit, abort, or still open."""
        if self.decision == "open" and self.commit == "together":
            staged = self._count(_FINISHED) + self._counts["staged"]
            possible = staged + self._counts["behind"]
            if staged >= self._needed:
                self.decision = "commit"
            elif self.superseded or possible < self._needed or now >= self.deadline:
                self.decision = "abort"
        return self.decision

    def verdict(self, now: float) -> bool | None:
        """Return whether the publish achieved what it required; None while that is open."""
        done, open_ = self._count(self.done), self._count(self._open)
        over = open_ == 0 or now >= self.deadline or self.superseded
        if self.commit == "together" and self.decision == "abort":
            return False
        if self.wait == "none":
            return True
        if self.require is None:  # every target: do not give up on the others when one has failed
            return True if done == len(self.targets) else (False if over else None)
        if self.require == 0:
            return True if over else None
        if done >= self.require:
            return True
        return False if over or done + open_ < self.require else None

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
                    t.name, t.state, None if t.at is None else t.at - self.started, t.detail
                )
                for t in self.targets.values()
            },
        )
