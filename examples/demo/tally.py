"""Counts the episodes and receipts of a run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weightbus.types import Receipt, WorkerStatus

from .policy import MODEL

RECENT = 20  # number of episodes of a mean return
RATE_SECONDS = 3.0  # the time over which a worker's episodes per second are counted


class Played(Protocol):
    """An episode, or a batch of answers, that a worker has played."""

    @property
    def worker(self) -> str:
        """The worker's name."""
        ...

    @property
    def version(self) -> int:
        """The version that ran at its start."""
        ...

    @property
    def steps(self) -> int:
        """The number of steps to learn from."""
        ...

    @property
    def reward(self) -> float:
        """The return."""
        ...


def version_of(status: WorkerStatus | None) -> int:
    """Return the version that a worker runs; 0 if there is none."""
    return status.running.get(MODEL, (0, 0))[1] if status is not None else 0


@dataclass(slots=True)
class WorkerTally:
    """The counts of one worker.

    Attributes:
        episodes: How many episodes, or batches, it has played.
        returns: The returns of its last episodes.
        applied, skipped: How many published versions it has applied or skipped.
    """

    episodes: int = 0
    applied: int = 0
    skipped: int = 0
    returns: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT))
    _arrivals: deque[float] = field(default_factory=lambda: deque[float](maxlen=1000))

    def played(self, reward: float, now: float) -> None:
        """Record an episode."""
        self.episodes += 1
        self.returns.append(reward)
        self._arrivals.append(now)

    def rate(self, now: float) -> float:
        """Return the recent number of episodes per second."""
        return sum(now - at <= RATE_SECONDS for at in self._arrivals) / RATE_SECONDS


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of the time until the last live worker had applied a version, in ms."""

    p50: float
    p95: float
    max: float


class Tally:
    """All counts of a run so far.

    Attributes:
        workers: The counts of each worker, by name.
        returns: (version at its start, return) of every episode, in order of arrival.
        latencies: (version, milliseconds until the last worker had applied it), by version.
        course: (seconds, newest version, bytes that workers have applied) at every receipt.
        nbytes: Bytes of a version.
        delivered: Bytes that workers have applied.
        steps: The steps of all episodes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.workers = {name: WorkerTally() for name in names}
        self.returns: list[tuple[int, float]] = []
        self.latencies: list[tuple[int, float]] = []
        self.course: list[tuple[float, int, int]] = []
        self.nbytes = self.delivered = self.steps = 0

    def played(self, played: Played, now: float) -> None:
        """Record an episode."""
        self.workers[played.worker].played(played.reward, now)
        self.returns.append((played.version, played.reward))
        self.steps += played.steps

    def says(self) -> str:
        """Return a text that the newest version has generated, if the model generates texts."""
        return ""

    def agreed(self) -> dict[str, int]:
        """Return for how many versions each worker's results were equal to the others'."""
        return {}

    def faults(self) -> list[str]:
        """Return texts about what went wrong."""
        return []

    def published(self, receipt: Receipt, now: float) -> None:
        """Record the receipt of a publish."""
        self.nbytes = receipt.nbytes
        done: list[float] = []
        for worker in receipt.workers.values():
            if worker.state == "applied" and worker.seconds is not None:
                self.workers[worker.name].applied += 1
                done.append(worker.seconds * 1000)
            elif worker.state == "skipped":
                self.workers[worker.name].skipped += 1
        self.delivered += receipt.nbytes * len(done)
        newest = max(receipt.version, self.course[-1][1] if self.course else 0)
        self.course.append((now, newest, self.delivered))
        if done:
            self.latencies.append((receipt.version, max(done)))
            self.latencies.sort()  # receipts resolve in almost this order already

    def curve(self) -> list[tuple[int, float]]:
        """Return (version, mean return of the RECENT episodes up to it), from the RECENT-th on."""
        ordered = sorted(self.returns, key=lambda played: played[0])
        sums = np.cumsum([0.0, *(reward for _, reward in ordered)])
        means = (sums[RECENT:] - sums[:-RECENT]) / RECENT
        ends = [version for version, _ in ordered[RECENT - 1 :]]
        return list(dict(zip(ends, means.tolist(), strict=True)).items())

    def latency(self) -> Latency | None:
        """Return the percentiles of all publishes; None before the first."""
        if not self.latencies:
            return None
        p50, p95, highest = np.percentile([ms for _, ms in self.latencies], [50, 95, 100])
        return Latency(float(p50), float(p95), float(highest))
