"""The tally: what the episodes and the receipts of a run add up to."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weightbus.types import Receipt, WorkerStatus

from .policy import MODEL

RECENT = 20  # episodes that a mean return is over
RATE_SECONDS = 3.0  # that a worker's episodes per second are over


class Played(Protocol):
    """What a worker has played with a version: an episode, or a batch of answers."""

    @property
    def worker(self) -> str:
        """Who played it."""
        ...

    @property
    def version(self) -> int:
        """The version that it began with."""
        ...

    @property
    def steps(self) -> int:
        """How much there is in it to learn from."""
        ...

    @property
    def reward(self) -> float:
        """Its return."""
        ...


def version_of(status: WorkerStatus | None) -> int:
    """Return the version that a worker runs; 0 if there is none."""
    return status.running.get(MODEL, (0, 0))[1] if status is not None else 0


@dataclass(slots=True)
class WorkerTally:
    """What one worker did.

    Attributes:
        episodes: How many it has played (or batches).
        returns: Of its last ones.
        applied, skipped: Of how many publishes it confirmed either.
    """

    episodes: int = 0
    applied: int = 0
    skipped: int = 0
    returns: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT))
    _arrivals: deque[float] = field(default_factory=lambda: deque[float](maxlen=1000))

    def played(self, reward: float, now: float) -> None:
        """Note an episode."""
        self.episodes += 1
        self.returns.append(reward)
        self._arrivals.append(now)

    def rate(self, now: float) -> float:
        """Return its episodes per second of late."""
        return sum(now - at <= RATE_SECONDS for at in self._arrivals) / RATE_SECONDS


@dataclass(frozen=True, slots=True)
class Latency:
    """How long publishes took until the last worker that lived had applied them, in ms."""

    p50: float
    p95: float
    max: float


class Tally:
    """What happened so far.

    Attributes:
        workers: By name.
        returns: (version it began with, return) of every episode, in order of arrival.
        latencies: (version, milliseconds until the last worker had it), in order of version.
        course: (seconds, newest version, bytes that workers have confirmed) at every receipt.
        nbytes: Bytes of a version.
        delivered: Bytes that workers have confirmed.
        steps: Of all episodes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.workers = {name: WorkerTally() for name in names}
        self.returns: list[tuple[int, float]] = []
        self.latencies: list[tuple[int, float]] = []
        self.course: list[tuple[float, int, int]] = []
        self.nbytes = self.delivered = self.steps = 0

    def played(self, played: Played, now: float) -> None:
        """Note an episode."""
        self.workers[played.worker].played(played.reward, now)
        self.returns.append((played.version, played.reward))
        self.steps += played.steps

    def says(self) -> str:
        """Return words of the newest version, if there is anything that can say some."""
        return ""

    def agreed(self) -> dict[str, int]:
        """Return how many versions each worker was found to compute like another one."""
        return {}

    def faults(self) -> list[str]:
        """Return what has gone wrong."""
        return []

    def published(self, receipt: Receipt, now: float) -> None:
        """Note what became of a publish."""
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
        """Return (version, mean return of the RECENT episodes up to it), once there are so many."""
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
