"""What an observer knows: the pages of a roster put together, and who is how far behind.

Everything that shows a bus (`top`, `status`, the page, the metrics) shows this; here is no socket.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from ...bus.limits import EVENTS_TOLD
from ...bus.observed import Doing, Happened, ModelRow, Observe, RosterPage, WorkerRow

Verdict = Literal["lost", "failed", "stuck", "behind", "current"]  # the worst first
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
LANGUAGES = {"node": "TypeScript", "go": "Go", "rust": "Rust", "python": "Python", "cpp": "C++"}


@dataclass(frozen=True, slots=True)
class Standing:
    """How a worker stands with a model.

    Attributes:
        model, worker: Which.
        verdict: `current` (it runs the newest version that is meant for it), `behind`, `failed` (it
            has said that it will not run the newest; `error` is its word), `stuck`, `lost`.
        epoch, version: What it runs; 0: nothing.
        newest: The newest version that is meant for it; 0: there is none.
        lag: Versions that it is behind.
        lag_s: Seconds since the first of them was published, or less; None: not known.
        phase: What it does with a version that is on its way; empty: none is.
        rate: Bytes a second: of what arrives, or of the last version, from publish to applied.
        took_s: Seconds from publishing what it runs to hearing that it does; 0: not known.
        error: Why it is lost; or why it did not run the last version that it failed, until it runs
            a newer one.
        language, client, host, pid: What it says it is.
        road: How versions reach it: `pulled`, `pushed`, `shared`.
        encoding: How the bytes of the model travel.
        silent_s: Seconds since it was last heard, as far as is known here.
    """

    model: str
    worker: str
    verdict: Verdict
    epoch: int
    version: int
    newest: int
    lag: int
    lag_s: float | None
    phase: str
    rate: float
    took_s: float
    error: str
    language: str
    client: str
    host: str
    pid: int
    road: str
    encoding: str
    silent_s: float


@dataclass(slots=True)
class _Rows:
    """One epoch's rows, and when each of them came."""

    epoch: int
    models: dict[str, tuple[ModelRow, float]] = field(
        default_factory=dict[str, tuple[ModelRow, float]]
    )
    workers: dict[str, tuple[WorkerRow, float]] = field(
        default_factory=dict[str, tuple[WorkerRow, float]]
    )
    rates: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])


class View:
    """A roster, as far as its publisher has told it."""

    def __init__(self) -> None:
        self.whole = False  # nothing more was to be told with the last answer
        self.latest = 0  # revision that there was by then
        self.events: deque[tuple[Happened, float]] = deque(maxlen=EVENTS_TOLD)
        self._since = self._goal = 0  # up to where is known; and has to be, for all to be
        self._shown = self._arriving = _Rows(0)

    @property
    def epoch(self) -> int:
        """The publisher's incarnation."""
        return self._shown.epoch

    @property
    def workers(self) -> dict[str, WorkerRow]:
        """The workers, lost ones included."""
        return {name: row for name, (row, _) in self._shown.workers.items()}

    def question(self) -> Observe:
        """Return what to ask next."""
        return Observe(epoch=self._arriving.epoch, since=self._since)

    def take(self, page: RosterPage, now: float) -> bool:
        """Take an answer; one that is late or doubled changes nothing, and False is returned."""
        if page.since == 0:  # from the beginning: the old one is shown until the new one is told
            self._arriving, self._goal = _Rows(page.epoch), page.latest
            self.events.clear()
        elif (page.epoch, page.since) != (self._arriving.epoch, self._since):
            return False
        self._since, self.latest = page.revision, page.latest
        self._put(page, now)
        told = len(self._arriving.workers) == page.workers
        self.whole = told and not page.more
        if told and self._since >= self._goal:  # there may always be more, on a busy bus
            self._shown = self._arriving
        elif not page.more:
            self._since = 0  # some have gone, and it was too long ago to be told
        return True

    def has(self, revision: int) -> bool:
        """Return whether all is shown that there was at a revision."""
        return self._shown is self._arriving and self._since >= revision

    def _put(self, page: RosterPage, now: float) -> None:
        known = self._arriving
        for event in page.events:
            self.events.append((event, now - event.age_ms / 1000))
            if event.kind == "left":
                known.workers.pop(event.worker, None)
        known.models.update((row.name, (row, now)) for row in page.models)
        for row in page.rows:
            before = known.workers.get(row.name)
            for model, doing in row.models.items():
                rate = self._rate(before, model, doing, now)
                known.rates[row.name, model] = rate
            known.workers[row.name] = row, now

    def _rate(
        self, before: tuple[WorkerRow, float] | None, model: str, doing: Doing, now: float
    ) -> float:
        """Return the bytes a second at which a version arrives, or has arrived."""
        known = self._arriving
        if model not in known.models:
            return 0.0
        nbytes = known.models[model][0].nbytes
        if doing.phase == "receiving" and before is not None and model in before[0].models:
            was, at = before[0].models[model], before[1]
            if was.incoming == doing.incoming and doing.count and now > at:
                return nbytes * max(0, doing.chunks - was.chunks) / doing.count / (now - at)
        return 1_000_000 * nbytes / doing.took_us if doing.took_us else 0.0

    # What it comes to.

    def models(self, now: float) -> dict[str, tuple[ModelRow, float | None]]:
        """Return the models, and how many seconds ago the latest version of each was published."""
        return {
            name: (row, _age(row, at, row.version, now))
            for name, (row, at) in sorted(self._shown.models.items())
        }

    def standings(self, now: float) -> list[Standing]:
        """Return how everybody stands with each model, the worst first."""
        found = list(self._standings(now))
        found.sort(key=lambda s: (VERDICTS.index(s.verdict), -s.lag, s.model, s.worker))
        return found

    def _standings(self, now: float) -> Iterator[Standing]:
        for row, at in self._shown.workers.values():
            for model, doing in row.models.items():
                yield self._standing(row, at, model, doing, now)

    def _why_lost(self, worker: str) -> str:
        """Return why a worker was lost last; empty if that is not told any more."""
        told = (e.text for e, _ in reversed(self.events) if (e.kind, e.worker) == ("lost", worker))
        return next(told, "").partition(" is lost: ")[2]

    def _standing(
        self, row: WorkerRow, at: float, model: str, doing: Doing, now: float
    ) -> Standing:
        known = self._shown.models.get(model)
        newest = max(doing.newest, known[0].version if known is not None else 0)
        runs = doing.version if doing.epoch == self._shown.epoch else 0
        lag = max(0, newest - runs)
        phase = f"{doing.phase} {doing.incoming}" if doing.incoming else ""
        if doing.phase == "receiving" and doing.count:
            phase += f", {100 * doing.chunks // doing.count} %"
        language = row.client.partition("/")[0].removeprefix("weightbus-")
        return Standing(
            model=model,
            worker=row.name,
            verdict=_verdict(row, doing, lag),
            epoch=doing.epoch,
            version=doing.version,
            newest=newest,
            lag=lag,
            lag_s=_age(*known, runs + 1, now) if lag and known is not None else None,
            phase=phase,
            rate=self._shown.rates.get((row.name, model), 0.0),
            took_s=doing.took_us / 1_000_000,
            error=(row.state == "lost" and self._why_lost(row.name)) or doing.error,
            language=LANGUAGES.get(language, language),
            client=row.client,
            host=row.host,
            pid=row.pid,
            road=row.road,
            encoding=known[0].encoding if known is not None else "",
            silent_s=row.heard_ms / 1000 + now - at if row.state == "lost" else 0.0,
        )


def _verdict(row: WorkerRow, doing: Doing, lag: int) -> Verdict:
    if row.state == "lost":
        return "lost"
    if lag and doing.failed > doing.version:
        return "failed"
    if row.state == "stuck":
        return "stuck"
    return "behind" if lag else "current"


def _age(row: ModelRow, at: float, version: int, now: float) -> float | None:
    """Return the seconds since a version was published; if it is not told, since the next told."""
    ages = {p.version: p.age_ms for p in row.published if p.version >= version}
    return ages[min(ages)] / 1000 + now - at if ages else None
