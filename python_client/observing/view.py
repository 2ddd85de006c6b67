"""Merges the pages of a publisher's roster into a view, and shows which workers are behind.

The commands `top` and `status`, the dashboard and the metrics all show this view. This module does
no I/O.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from ...bus.messages import Doing, Happened, ModelRow, Observe, RosterPage, WorkerRow
from ...bus.protocol_limits import EVENTS_LISTED

Verdict = Literal["lost", "failed", "stuck", "behind", "current"]  # the worst first
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
LANGUAGES = {"node": "TypeScript", "go": "Go", "rust": "Rust", "python": "Python", "cpp": "C++"}


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a worker with one of its models.

    Attributes:
        model, worker: The model's id and the worker's name.
        verdict: `current`: the worker runs the newest version that it should run. `failed`: it
            could not apply a newer version (see `error`). Otherwise `behind`, `stuck` or `lost`.
        epoch, version: The version that the worker runs; 0: none.
        newest: The newest version that the worker should run; 0: none.
        lag: The number of versions that the worker is behind.
        lag_s: Seconds, at least, since the first of these versions was published; None if unknown.
        phase: The phase of the version that the worker is receiving or applying; empty if
            there is none.
        rate: Bytes per second of the arriving version. If none arrives: the bytes of the last
            version per second from its publish to its apply.
        took_s: Seconds from the publish of `version` to its acknowledgement; 0: unknown.
        error: Why the worker is lost, or why a version failed, until it runs a newer version.
        language, client, host, pid: As the worker reports them.
        road: The transport of versions to the worker: `pulled`, `pushed`, `shared`.
        encoding: How the model's bytes are sent to the worker.
        silent_s: If the worker is lost, seconds since the publisher last received a message from
            it.
        relay: Whether it is a relay.
        through: The names of the relays before the worker, the nearest to the publisher first.
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
    relay: bool = False
    through: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """The transport of versions to the worker and the relays before it, as text."""
        via = f" via {' > '.join(self.through)}" if self.through else ""
        return f"{self.road}{via}" + (" (relay)" if self.relay else "")


@dataclass(slots=True)
class _Rows:
    """The rows of one epoch, by name, each with the monotonic time at which it arrived."""

    epoch: int
    models: dict[str, tuple[ModelRow, float]] = field(
        default_factory=dict[str, tuple[ModelRow, float]]
    )
    workers: dict[str, tuple[WorkerRow, float]] = field(
        default_factory=dict[str, tuple[WorkerRow, float]]
    )
    rates: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])


class View:
    """The roster of a publisher, as received so far."""

    def __init__(self) -> None:
        self.whole = False  # whether the last answer brought the view up to date
        self.latest = 0  # the publisher's revision in the last answer
        self.events: deque[tuple[Happened, float]] = deque(maxlen=EVENTS_LISTED)
        self._since = 0  # the revision received so far
        self._goal = 0  # the revision that a new roster must reach before it is shown
        self._shown = self._arriving = _Rows(0)

    @property
    def epoch(self) -> int:
        """The epoch of the publisher."""
        return self._shown.epoch

    @property
    def workers(self) -> dict[str, WorkerRow]:
        """All workers by name, including lost workers."""
        return {name: row for name, (row, _) in self._shown.workers.items()}

    def question(self) -> Observe:
        """Return the request for the next page."""
        return Observe(epoch=self._arriving.epoch, since=self._since)

    def take(self, page: RosterPage, now: float) -> bool:
        """Add the next page. If `page` is not the next one, change nothing and return False."""
        if page.since == 0:  # a new roster: show the old roster until the new one is complete
            self._arriving, self._goal = _Rows(page.epoch), page.latest
            self.events.clear()
        elif (page.epoch, page.since) != (self._arriving.epoch, self._since):
            return False
        self._since, self.latest = page.revision, page.latest
        self._put(page, now)
        complete = len(self._arriving.workers) == page.workers
        self.whole = complete and not page.more
        # Do not wait for `whole`, since a busy bus may always have more pages.
        if complete and self._since >= self._goal:
            self._shown = self._arriving
        elif not page.more:
            # Start again from the first page: some workers left so long ago that the publisher no
            # longer reports that they left.
            self._since = 0
        return True

    def has(self, revision: int) -> bool:
        """Return whether the view includes all changes up to a revision."""
        return self._shown is self._arriving and self._since >= revision

    def _put(self, page: RosterPage, now: float) -> None:
        # Store the rows and events of a page.
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
        """Return the bytes per second of the arriving version, or else of the last version."""
        known = self._arriving
        if model not in known.models:
            return 0.0
        nbytes = known.models[model][0].nbytes
        if doing.phase == "receiving" and before is not None and model in before[0].models:
            last, at = before[0].models[model], before[1]
            if last.incoming == doing.incoming and doing.count and now > at:
                return nbytes * max(0, doing.chunks - last.chunks) / doing.count / (now - at)
        return 1_000_000 * nbytes / doing.took_us if doing.took_us else 0.0

    # Results.

    def models(self, now: float) -> dict[str, tuple[ModelRow, float | None]]:
        """Return the models by name, each with the age in seconds of its latest version."""
        return {
            name: (row, _age(row, at, row.version, now))
            for name, (row, at) in sorted(self._shown.models.items())
        }

    def standings(self, now: float) -> list[Standing]:
        """Return the state of each worker with each of its models, the worst first."""
        found = list(self._standings(now))
        found.sort(key=lambda s: (VERDICTS.index(s.verdict), -s.lag, s.model, s.worker))
        return found

    def _standings(self, now: float) -> Iterator[Standing]:
        for row, at in self._shown.workers.values():
            for model, doing in row.models.items():
                yield self._standing(row, at, model, doing, now)

    def _why_lost(self, worker: str) -> str:
        """Return why a worker was lost; empty if no event says why."""
        texts = (e.text for e, _ in reversed(self.events) if (e.kind, e.worker) == ("lost", worker))
        return next(texts, "").partition(" is lost: ")[2]

    def _standing(
        self, row: WorkerRow, at: float, model: str, doing: Doing, now: float
    ) -> Standing:
        # Return the state of a worker with one model; `row` was received at the time `at`.
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
            relay=row.relay,
            through=tuple(row.through),
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
    """Return the age in seconds of a version, or of the next newer version that `row` has.

    The result is None if `row` has no such version.
    """
    ages = {p.version: p.age_ms for p in row.published if p.version >= version}
    return ages[min(ages)] / 1000 + now - at if ages else None
