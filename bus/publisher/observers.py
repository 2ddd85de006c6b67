"""Answers observers' requests for changes of the roster.

Every change has a revision number. An observer requests all changes since the revision of the last
answer that it received. So the publisher keeps no state for each observer, and sends nothing
without a request.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from operator import itemgetter
from typing import cast

import msgspec
from msgspec.structs import replace

from ..effects import Notice, Send
from ..limits import OBSERVER_SECONDS, PAGES_MAX, RECORDING_SECONDS, ROWS
from ..messages import (
    Applied,
    Doing,
    Failed,
    Happened,
    ModelRow,
    Observe,
    Phase,
    Ping,
    Progress,
    Published,
    Refuse,
    RosterPage,
    Staged,
    Verify,
    WorkerRow,
)
from ..observed import PAGE_BYTES, Row
from ..protocol_limits import EVENTS_LISTED, OBSERVERS_MAX, PAGE_ROWS_MAX, VERSIONS_LISTED
from ..structs import Message
from ..token_bucket import TokenBucket
from ..trust.grants import Grant
from .effects import Effect
from .roster import Peer
from .state import PublisherState
from .status import chunks_of, is_stuck, transport_of
from .store import Versions
from .verifying import Checks

NO_OBSERVER = (
    "only an observer's key may watch here: `weightbus keygen DIR --observer NAME` makes one"
)
REVISION = itemgetter(0)
SHORT = 64  # characters kept of each error text if a worker's row exceeds a page


@dataclass(slots=True)
class _Model:
    """The newest versions of a model, as they were last recorded for observers."""

    latest: tuple[int, int] = (0, 0)
    nbytes: int = 0
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    revision: int = 0
    targeted: dict[str, int] = field(default_factory=dict[str, int])  # see `Versions.targeted`


class _Page:
    """A page of the roster, to which rows are added."""

    def __init__(self, since: int) -> None:
        self.since = self.revision = since
        self.models, self.rows, self.events = list[ModelRow](), list[WorkerRow](), list[Happened]()
        self._room, self._count = PAGE_BYTES, 0

    def add(self, row: Row, revision: int) -> bool:
        """Add a row with this revision; return False if the page is too full for the row."""
        nbytes = len(msgspec.json.encode(row)) + 1
        if nbytes > PAGE_BYTES and isinstance(row, WorkerRow):
            short = {m: replace(d, error=d.error[:SHORT]) for m, d in row.models.items()}
            row = replace(row, models=short)
            nbytes = len(msgspec.json.encode(row)) + 1
        if self._count and (nbytes > self._room or self._count >= PAGE_ROWS_MAX):
            return False
        self._room -= nbytes
        self._count, self.revision = self._count + 1, revision
        match row:
            case ModelRow():
                self.models.append(row)
            case WorkerRow():
                self.rows.append(row)
            case Happened():
                self.events.append(row)
        return True


class Observers:
    """Records changes of the roster for observers, and answers their requests. (P23)

    Attributes:
        until: Until when changes are recorded: then the last observer counts as gone.
    """

    def __init__(self, state: PublisherState) -> None:
        self.checks, self._state = Checks(state), state
        self.until = 0.0
        self._last_request: dict[bytes, float] = {}  # by connection, the time of its last request
        self._rows = TokenBucket(ROWS, 0.0)
        self._models: dict[str, _Model] = {}
        self._events: deque[tuple[int, float, Notice]] = deque()

    # Changes.

    def record_always(self) -> None:
        """Record changes even without an observer."""
        self.until = math.inf

    def record_message(self, peer: Peer, message: Message) -> None:
        """Record what a worker's message changes for observers."""
        match message:
            case Ping():
                self._note(peer, "")
            case (
                Progress(model=model)
                | Staged(model=model)
                | Applied(model=model)
                | Failed(model=model)
            ) if model in peer.hello.models:
                self._note(peer, model)
            case _:
                pass

    def _note(self, peer: Peer, model: str) -> None:
        """Record what a worker does with a model; with an empty model, record its transport."""
        seen: object = transport_of(peer)
        if model:
            incoming = peer.incoming.get(model)
            at = incoming and (incoming.version, incoming.phase, incoming.chunks)
            seen = peer.runs(model), at, peer.seen.failed.get(model)
        if peer.seen.changed(model, seen):
            self._state.roster.touch(peer)

    def happened(self, notice: Notice, now: float) -> None:
        """Record an event of a worker."""
        if notice.worker:
            if len(self._events) >= EVENTS_LISTED:
                self._forget_event()
            self._events.append((self._state.roster.next_revision(), now, notice))
            peer = self._state.roster.by_name(notice.worker)
            if peer is not None:
                self._state.roster.touch(peer)

    def _forget_event(self) -> None:
        """Drop one event, so that a worker that repeats an event does not displace other events.

        Of the most frequent kind, drop the oldest event of the worker with most events of this
        kind.
        """
        events = [notice for _, _, notice in self._events]
        [(kind, _)] = Counter(notice.kind for notice in events).most_common(1)
        of_kind = Counter(notice.worker for notice in events if notice.kind == kind)
        [(worker, _)] = of_kind.most_common(1)
        found = (n for n, each in enumerate(events) if (each.kind, each.worker) == (kind, worker))
        del self._events[next(found)]

    # Answers.

    def answer_request(
        self, identity: bytes, message: Observe | Verify, grant: Grant | None, now: float
    ) -> list[Effect]:
        """Answer an observer's request, or refuse it if its key's role is not `observer`."""
        if grant is not None and grant.role != "observer":  # K4
            return [Send(Refuse(code="not-allowed", text=NO_OBSERVER), to=identity)]
        if isinstance(message, Verify):
            return self.checks.verify(identity, message, now)
        return [Send(page, to=identity) for page in self.answer(identity, message, now)]

    def answer(
        self, identity: bytes, asked: Observe, now: float
    ) -> list[RosterPage] | list[Refuse]:
        """Return pages for an observer, or a refusal if there are too many observers."""
        self._last_request = {
            who: at for who, at in self._last_request.items() if now - at < OBSERVER_SECONDS
        }
        if identity not in self._last_request and len(self._last_request) >= OBSERVERS_MAX:
            text = f"{OBSERVERS_MAX} observers are here already: end one of them, or wait a moment"
            return [Refuse(code="limit", text=text)]
        self._last_request[identity] = now
        return self.pages(asked, now)

    def pages(self, asked: Observe, now: float) -> list[RosterPage]:
        """Return pages with the changes since a revision, oldest first, up to the limits."""
        if now >= self.until:  # changes were not recorded before
            for peer in self._state.roster:
                for model in ("", *peer.hello.models):
                    self._note(peer, model)
        self.until = max(self.until, now + RECORDING_SECONDS)
        for versions in self._state.store.values():
            self._note_versions(versions)
        latest = self._state.roster.revision
        known = asked.epoch == self._state.epoch and asked.since <= latest
        since = asked.since if known else 0
        pages, more = [_Page(since)], False
        for at, make in self._changed(since) if since < latest else ():
            more = not self._rows.take(1, now)
            row = make(now) if not more else None
            if row is not None and not pages[-1].add(row, at):
                more = len(pages) >= min(asked.pages, PAGES_MAX)
                if not more:
                    pages.append(_Page(pages[-1].revision))
                    pages[-1].add(row, at)
            if more:
                break
        else:
            pages[-1].revision = latest
        last, clock = pages[-1], self._state.clock
        time_ms = 0 if clock is None else _ms(clock())
        return [
            RosterPage(
                epoch=self._state.epoch,
                since=page.since,
                revision=page.revision,
                latest=latest,
                workers=len(self._state.roster),
                more=more or page is not last,
                follows=page is not last,
                time_ms=time_ms,
                models=page.models,
                rows=page.rows,
                events=page.events,
            )
            for page in pages
        ]

    def _note_versions(self, versions: Versions) -> None:
        """Record a model's latest version, and which workers have a newer targeted version."""
        model, latest = self._models.setdefault(versions.model, _Model()), versions.latest
        if latest is not None and latest.key != model.latest:
            model.latest, model.revision = latest.key, self._state.roster.next_revision()
            model.nbytes, model.metadata = latest.layout.nbytes, dict(latest.metadata)
        targeted = versions.targeted()
        for worker in sorted({name for name, _ in targeted.items() ^ model.targeted.items()}):
            peer = self._state.roster.by_name(worker)
            if peer is not None:
                self._state.roster.touch(peer)
        model.targeted = targeted

    def _changed(self, since: int) -> "Iterator[tuple[int, Callable[[float], Row]]]":
        """Yield the revision and a row factory of each change after a revision, in order."""
        models: list[tuple[int, Callable[[float], Row]]] = sorted(
            (
                (m.revision, partial(self._model_row, name, m))
                for name, m in self._models.items()
                if m.revision > since
            ),
            key=REVISION,
        )
        workers = ((p.revision, partial(self.row, p)) for p in self._state.roster.changed(since))
        events = ((at, partial(_event, notice, t)) for at, t, notice in self._events if at > since)
        return merge(models, workers, events, key=REVISION)

    def _model_row(self, name: str, model: _Model, now: float) -> ModelRow:
        """Return a model's row, with the publish times of some versions: the older, the fewer."""
        version, published, step = model.latest[1], list[Published](), 0
        times = self._state.store[name].times
        for index in range(VERSIONS_LISTED):
            at = times.get(version - step)
            if at is not None:
                published.append(Published(version - step, _ms(now - at)))
            step += 1 << max(0, index // 2 - 1)  # 1 1 1 1 2 2 4 4 8 8 ...
        return ModelRow(name, version, model.nbytes, "raw", published, model.metadata)

    def row(self, peer: Peer, now: float) -> WorkerRow:
        """Return the row of a worker."""
        return WorkerRow(
            name=peer.name,
            state="lost" if peer.lost else "stuck" if is_stuck(self._state, peer, now) else "live",
            road=transport_of(peer),
            heard_ms=_ms(now - peer.heard_at),
            models={model: self._doing(peer, model, now) for model in peer.hello.models},
            client=peer.hello.client,
            host=peer.hello.host,
            pid=peer.hello.pid,
            relay=peer.relay,
            through=[*peer.through],
        )

    def _doing(self, peer: Peer, model: str, now: float) -> Doing:
        # Return what a worker does with a model.
        (epoch, version), versions = peer.runs(model), self._state.store.get(model)
        newest = versions.latest_for(peer.name) if versions is not None else None
        took, (failed, error) = peer.seen.took.get(model, 0.0), peer.seen.failed.get(model, (0, ""))
        doing = Doing(
            epoch=epoch,
            version=version,
            newest=newest.version if newest is not None else 0,
            took_us=max(1, round(1e6 * took)) if took else 0,
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
            count=chunks_of(self._state, model, incoming),
            idle_ms=_ms(now - incoming.since),
        )


def _event(notice: Notice, at: float, now: float) -> Happened:
    return Happened(notice.kind, notice.worker, notice.text, _ms(now - at))


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
