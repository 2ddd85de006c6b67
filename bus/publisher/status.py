"""Who runs what, and what everybody is doing: the roster as an operator sees it.

The user of a publisher asks for all of it (`status_of`). Observers ask over the control channel for
what has changed since they asked last (`Observers`): every change has the number of a revision, so
that nothing is kept for any of them, and nothing is said to one that does not ask.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Literal, cast

import msgspec
from msgspec.structs import replace

from ..allowance import Allowance
from ..effects import Notice
from ..limits import (
    ERROR_MAX,
    EVENTS_TOLD,
    LABEL_MAX,
    OBSERVER_SECONDS,
    OBSERVERS_MAX,
    PAGE_ROWS_MAX,
    ROWS,
    VERSIONS_TIMED,
    VERSIONS_TOLD,
    Timing,
)
from ..messages import Applied, Failed, Message, Ping, Progress, Refuse, Staged
from ..observed import (
    PAGE_BYTES,
    Doing,
    Happened,
    ModelRow,
    Observe,
    Phase,
    Published,
    Roster,
    Row,
    WorkerRow,
    printable,
)
from . import roster as rosters
from .roster import Incoming, Peer
from .store import Store, Versions
from .version import Version

SHORT = 64  # characters of each error of a worker whose errors would fill a page


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as an operator sees it.

    Attributes:
        name: Its name.
        state: `live`, `stuck` (it answers, but makes no progress) or `lost`.
        models: The models that it wants.
        running: By model, the (epoch, version) that it runs.
        phase: By model, what it is doing with a newer version, such as "receiving 3 of 8 chunks of
            version 5"; empty when idle.
        progress: By model that is arriving, how many chunks are there, of how many in all.
        silent_s: Seconds since it was last heard.
        client, host, pid: What it says it is.
    """

    name: str
    state: Literal["live", "stuck", "lost"]
    models: tuple[str, ...]
    running: dict[str, tuple[int, int]]
    phase: dict[str, str]
    progress: dict[str, tuple[int, int]]
    silent_s: float
    client: str
    host: str
    pid: int


def is_stuck(peer: Peer, timing: Timing, now: float) -> bool:
    """Return whether a worker has something on its way that has not moved for long."""
    return any(now - i.since >= timing.stuck_after for i in peer.incoming.values())


def status_of(peer: Peer, store: Store, timing: Timing, now: float) -> WorkerStatus:
    """Return how things stand with a worker."""
    return WorkerStatus(
        name=peer.name,
        state="lost" if peer.lost else "stuck" if is_stuck(peer, timing, now) else "live",
        models=tuple(peer.hello.models),
        running={m: (r.epoch, r.version) for m, r in peer.running.items()},
        phase={m: phase_of(m, i, store, timing, now) for m, i in peer.incoming.items()},
        progress={
            m: (i.chunks, _chunks(m, i, store))
            for m, i in peer.incoming.items()
            if i.phase == "receiving"
        },
        silent_s=now - peer.heard_at,
        client=peer.hello.client,
        host=peer.hello.host,
        pid=peer.hello.pid,
    )


def phase_of(model: str, incoming: Incoming, store: Store, timing: Timing, now: float) -> str:
    """Say what a worker is doing with a version, and since when it has not moved."""
    text = f"{incoming.phase} version {incoming.version}"
    if incoming.phase == "receiving":
        text += f", {incoming.chunks} of {_chunks(model, incoming, store)} chunks here"
    idle = now - incoming.since
    return text + (f", no progress for {idle:.1f} s" if idle >= timing.quiet else "")


def _chunks(model: str, incoming: Incoming, store: Store) -> int:
    """Return how many chunks the version has; what is here, if it is gone by now."""
    versions = store.get(model)
    version = versions.find(incoming.version) if versions is not None else None
    return version.plan.count if version is not None else incoming.chunks


@dataclass(slots=True)
class _Model:
    """A model as observers are told of it."""

    latest: tuple[int, int] = (0, 0)
    nbytes: int = 0
    revision: int = 0
    times: dict[int, float] = field(default_factory=dict[int, float])  # by version, when published
    targeted: dict[str, int] = field(default_factory=dict[str, int])  # see `Versions.targeted`


class Observers:
    """Those who look on: what each of them is told, when it asks. (P23)"""

    def __init__(self, roster: rosters.Roster, store: Store, timing: Timing) -> None:
        self._roster, self._store, self._timing = roster, store, timing
        self._asked: dict[bytes, float] = {}  # by connection, when it asked last
        self._rows = Allowance(ROWS, 0.0)
        self._models: dict[str, _Model] = {}
        self._events: deque[tuple[int, float, Notice]] = deque(maxlen=EVENTS_TOLD)

    # What happens.

    def heard(self, peer: Peer, message: Message, now: float) -> None:
        """A worker has said something: take note of it if that is news to observers."""
        match message:
            case Ping():
                self._note(peer, "", _road(peer))
            case (
                Progress(model=model)
                | Staged(model=model)
                | Applied(model=model)
                | Failed(model=model)
            ) if model in peer.hello.models:
                if isinstance(message, Failed):
                    text = printable(message.text, ERROR_MAX - len(message.code) - 2)
                    peer.seen.failed[model] = (message.version, f"{message.code}: {text}")
                else:
                    self._settled(peer, model, now)
                incoming = peer.incoming.get(model)
                at = incoming and (incoming.version, incoming.phase, incoming.chunks)
                self._note(peer, model, (peer.runs(model), at, peer.seen.failed.get(model)))
            case _:
                pass

    def _settled(self, peer: Peer, model: str, now: float) -> None:
        """Take note of how long a worker took to what it runs, and what that makes up for."""
        epoch, version = peer.runs(model)
        published = self._models[model].times.get(version) if model in self._models else None
        new = epoch == self._store.epoch and peer.seen.took.get(model, (0, 0))[0] != version
        if published is not None and new:
            peer.seen.took[model] = (version, max(1, round(1e6 * (now - published))))
        if peer.seen.failed.get(model, (version + 1, ""))[0] <= version:
            del peer.seen.failed[model]

    def _note(self, peer: Peer, about: str, seen: object) -> None:
        if peer.seen.told.get(about) != seen:
            peer.seen.told[about] = seen
            self._roster.touch(peer)

    def published(self, version: Version, now: float) -> None:
        """A version was published."""
        times = self._models.setdefault(version.model, _Model()).times
        times[version.version] = now
        while len(times) > VERSIONS_TIMED:
            del times[next(iter(times))]

    def happened(self, notice: Notice, now: float) -> None:
        """Something became of a worker."""
        if notice.worker:
            self._roster.revision += 1
            self._events.append((self._roster.revision, now, notice))
            peer = self._roster.by_name(notice.worker)
            if peer is not None:
                self._roster.touch(peer)

    # What is told.

    def answer(self, identity: bytes, asked: Observe, now: float) -> Roster | Refuse:
        """Answer an observer, unless there are too many."""
        self._asked = {who: at for who, at in self._asked.items() if now - at < OBSERVER_SECONDS}
        if identity not in self._asked and len(self._asked) >= OBSERVERS_MAX:
            text = f"{OBSERVERS_MAX} observers look on already: end one of them, or wait a moment"
            return Refuse(code="limit", text=text)
        self._asked[identity] = now
        return self.page(asked, now)

    def page(self, asked: Observe, now: float) -> Roster:
        """Return what has changed since a revision, the longest ago first, as far as it fits."""
        for versions in self._store:
            self._look(versions)
        latest = self._roster.revision
        known = asked.epoch == self._store.epoch and asked.since <= latest
        since = asked.since if known else 0
        models, rows, events = list[ModelRow](), list[WorkerRow](), list[Happened]()
        revision, room, more = since, PAGE_BYTES, False
        for at, make in self._changed(since) if since < latest else ():
            row = make(now)
            room -= len(msgspec.json.encode(row)) + 1
            count = len(models) + len(rows) + len(events)
            more = room < 0 or count >= PAGE_ROWS_MAX or not self._rows.take(1, now)
            if more:
                break
            match row:
                case ModelRow():
                    models.append(row)
                case WorkerRow():
                    rows.append(row)
                case Happened():
                    events.append(row)
            revision = at
        return Roster(
            epoch=self._store.epoch,
            since=since,
            revision=revision if more else latest,
            latest=latest,
            workers=len(self._roster),
            more=more,
            models=models,
            rows=rows,
            events=events,
        )

    def _look(self, versions: Versions) -> None:
        """Take note of a model's latest version, and of which workers another one is the newest."""
        model, latest = self._models.setdefault(versions.model, _Model()), versions.latest
        if latest is not None and latest.key != model.latest:
            self._roster.revision += 1
            model.latest, model.revision = latest.key, self._roster.revision
            model.nbytes = latest.layout.nbytes
        targeted = versions.targeted()
        for worker in sorted({name for name, _ in targeted.items() ^ model.targeted.items()}):
            peer = self._roster.by_name(worker)
            if peer is not None:
                self._roster.touch(peer)
        model.targeted = targeted

    def _changed(self, since: int) -> "list[tuple[int, Callable[[float], Row]]]":
        """Return what has changed, and of each the revision it had then; they are all different."""
        found: list[tuple[int, Callable[[float], Row]]] = [
            (m.revision, partial(_model_row, name, m))
            for name, m in self._models.items()
            if m.revision > since
        ]
        found += [(p.revision, partial(self._row, p)) for p in self._roster if p.revision > since]
        found += [(at, partial(_event, notice, t)) for at, t, notice in self._events if at > since]
        return sorted(found, key=itemgetter(0))

    def _row(self, peer: Peer, now: float) -> WorkerRow:
        row = WorkerRow(
            name=peer.name,
            state="lost" if peer.lost else "stuck" if is_stuck(peer, self._timing, now) else "live",
            road=_road(peer),
            heard_ms=_ms(now - peer.heard_at),
            models={model: self._doing(peer, model, now) for model in peer.hello.models},
            client=printable(peer.hello.client, LABEL_MAX),
            host=printable(peer.hello.host, LABEL_MAX),
            pid=peer.hello.pid,
        )
        if len(msgspec.json.encode(row)) <= PAGE_BYTES:
            return row
        short = {m: replace(d, error=d.error[:SHORT]) for m, d in row.models.items()}
        return replace(row, models=short)

    def _doing(self, peer: Peer, model: str, now: float) -> Doing:
        (epoch, version), versions = peer.runs(model), self._store.get(model)
        newest = versions.latest_for(peer.name) if versions is not None else None
        took, (failed, error) = peer.seen.took.get(model), peer.seen.failed.get(model, (0, ""))
        doing = Doing(
            epoch=epoch,
            version=version,
            newest=newest.version if newest is not None else 0,
            took_us=took[1] if took is not None and took[0] == version else 0,
            failed=failed,
            error=error,
        )
        incoming = peer.incoming.get(model)
        if incoming is None:
            return doing
        return replace(
            doing,
            incoming=incoming.version,
            phase=cast("Phase", incoming.phase),
            chunks=incoming.chunks,
            count=_chunks(model, incoming, self._store),
            idle_ms=_ms(now - incoming.since),
        )


def _model_row(name: str, model: _Model, now: float) -> ModelRow:
    """Return a model's row: of the versions before, ever fewer the longer ago they are."""
    version, published, step = model.latest[1], list[Published](), 0
    for back in range(VERSIONS_TOLD):
        at = model.times.get(version - step)
        if at is not None:
            published.append(Published(version - step, _ms(now - at)))
        step += 1 << max(0, back // 2 - 1)  # 1 1 1 1 2 2 4 4 8 8 ...
    return ModelRow(name, version, model.nbytes, "raw", published)


def _event(notice: Notice, at: float, now: float) -> Happened:
    text = printable(notice.text, ERROR_MAX)
    return Happened(notice.kind, notice.worker, text, _ms(now - at))


def _road(peer: Peer) -> Literal["pulled", "pushed", "shared"]:
    return "shared" if peer.shared else "pushed" if peer.subscribed else "pulled"


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
