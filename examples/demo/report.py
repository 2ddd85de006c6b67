"""The report of a run: all its numbers, and its faults."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from weightbus.types import WorkerStatus

from .accident import Accident
from .tally import RECENT, Latency, Tally, version_of


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The result of one worker.

    Attributes:
        state: The worker's state at the publisher.
        version: The version that it runs.
        lag: By how many versions it is behind the newest.
        applied, skipped: How many published versions it has applied or skipped.
        episodes: How many episodes it played.
        mean_return: The mean return of its last episodes; None if it played none.
    """

    state: str
    version: int
    lag: int
    applied: int
    skipped: int
    episodes: int
    mean_return: float | None


@dataclass(frozen=True, slots=True)
class AccidentReport:
    """The result of the accident; see `Accident`."""

    victim: str
    noticed_s: float | None
    back_s: float | None
    missed: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """All numbers of a run.

    Attributes:
        faults: What went wrong; empty if nothing did.
        seconds: Time from the first episode to the end.
        versions: How many versions were published.
        first_return, last_return: Mean return of the first and of the last episodes, or None.
        publish_ms: Time until the last live worker had applied a version; None without versions.
        nbytes, delivered: Bytes of a version, and of all versions that workers have applied.
        episodes, steps: How many all workers played.
        workers: The workers' reports by name.
        accident: The report of the accident; None if there was none.
        agreed: By worker, for how many versions its results were equal to those of other workers;
            empty if results were not compared.
    """

    faults: list[str]
    seconds: float
    versions: int
    first_return: float | None
    last_return: float | None
    publish_ms: Latency | None
    nbytes: int
    delivered: int
    episodes: int
    steps: int
    workers: dict[str, WorkerReport]
    accident: AccidentReport | None
    agreed: dict[str, int]


def report(
    tally: Tally,
    status: Mapping[str, WorkerStatus],
    version: int,
    seconds: float,
    accident: Accident | None,
) -> Report:
    """Return the report of a run; `version` is the last published version."""
    workers = {name: _worker(name, tally, status.get(name), version) for name in tally.workers}
    returns = [reward for _, reward in tally.returns]
    first = fmean(returns[:RECENT]) if returns else None
    last = fmean(returns[-RECENT:]) if returns else None
    faults = tally.faults()
    faults += [
        f"{name} runs version {w.version}, not {version} ({w.state})"
        for name, w in workers.items()
        if w.version != version
    ]
    if first is None or last is None or last <= first:
        faults.append(
            "no episode was played"
            if first is None
            else f"the policy did not improve: its mean return was {first:.3g} at first and "
            f"{last:.3g} at last; give it more --seconds"
        )
    return Report(
        faults=faults,
        seconds=seconds,
        versions=version,
        first_return=first,
        last_return=last,
        publish_ms=tally.latency(),
        nbytes=tally.nbytes,
        delivered=tally.delivered,
        episodes=len(returns),
        steps=tally.steps,
        workers=workers,
        accident=None
        if accident is None
        else AccidentReport(accident.victim, accident.noticed_s, accident.back_s, accident.missed),
        agreed=tally.agreed(),
    )


def _worker(name: str, tally: Tally, status: WorkerStatus | None, version: int) -> WorkerReport:
    seen = tally.workers[name]
    runs = version_of(status)
    return WorkerReport(
        state=status.state if status is not None else "gone",
        version=runs,
        lag=version - runs,
        applied=seen.applied,
        skipped=seen.skipped,
        episodes=seen.episodes,
        mean_return=fmean(seen.returns) if seen.returns else None,
    )
