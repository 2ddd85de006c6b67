"""The tally: what the episodes and the receipts of a run add up to."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...bus.publisher.status import WorkerStatus
from ...bus.receipt import Receipt
from .episode import Episode
from .policy import MODEL

RECENT = 20  # episodes that a mean return is over
RATE_SECONDS = 3.0  # that a worker's episodes per second are over


def version_of(status: WorkerStatus | None) -> int:
    """Return the version that a worker runs; 0 if there is none."""
    return status.running.get(MODEL, (0, 0))[1] if status is not None else 0


@dataclass(slots=True)
class WorkerTally:
    """What one worker did.

    Attributes:
        episodes: How many it has played.
        returns: Of its last episodes.
        applied, skipped: Of how many publishes it confirmed either.
    """

    episodes: int = 0
    applied: int = 0
    skipped: int = 0
    returns: deque[int] = field(default_factory=lambda: deque[int](maxlen=RECENT))
    _arrivals: deque[float] = field(default_factory=lambda: deque[float](maxlen=1000))

    def played(self, steps: int, now: float) -> None:
        """Note an episode."""
        self.episodes += 1
        self.returns.append(steps)
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
        nbytes: Bytes of a version.
        delivered: Bytes that workers have confirmed.
        steps: Of all episodes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.workers = {name: WorkerTally() for name in names}
        self.returns: list[tuple[int, int]] = []
        self.latencies: list[tuple[int, float]] = []
        self.nbytes = self.delivered = self.steps = 0

    def played(self, episode: Episode, now: float) -> None:
        """Note an episode."""
        self.workers[episode.worker].played(episode.steps, now)
        self.returns.append((episode.version, episode.steps))
        self.steps += episode.steps

    def published(self, receipt: Receipt) -> None:
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
        if done:
            self.latencies.append((receipt.version, max(done)))
            self.latencies.sort()  # receipts resolve in almost this order already

    def curve(self) -> list[tuple[int, float]]:
        """Return (version, mean return of the RECENT episodes up to it), once there are so many."""
        ordered = sorted(self.returns, key=lambda played: played[0])
        sums = np.cumsum([0, *(steps for _, steps in ordered)])
        means = (sums[RECENT:] - sums[:-RECENT]) / RECENT
        ends = [version for version, _ in ordered[RECENT - 1 :]]
        return list(dict(zip(ends, means.tolist(), strict=True)).items())

    def latency(self) -> Latency | None:
        """Return the percentiles of all publishes; None before the first."""
        if not self.latencies:
            return None
        p50, p95, highest = np.percentile([ms for _, ms in self.latencies], [50, 95, 100])
        return Latency(float(p50), float(p95), float(highest))
