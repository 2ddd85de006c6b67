"""The roster: every worker that a publisher knows, found by name or by ZeroMQ routing id.

An *instance* of a worker is one run of its process. A name belongs to one live instance. If a
second instance requests the name, the publisher pings the first instance. If the first instance
answers, the second is refused. If the first does not answer, or its connection is closed, the
second gets the name. So a worker that restarts after a crash joins quickly, and two workers with
the same name are reported at once.

Workers behind relays are on the roster, too. These have no connection here: `behind.py` updates
their records from the relays' reports.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from ..chunks import ChunkPlan
from ..limits import ROSTER_MODELS_MAX, UNLIKE_KEPT, WORKERS_MAX
from ..messages import DELTA, RELAY, Doing, Failed, Hello, PatchId, Progress, Running, Staged
from .tables import WORKERS, WorkerEvent, WorkerPhase

Admission = Literal["new", "known", "again", "contested", "taken", "full"]

LINK_BYTES = 2**26  # bytes after which a report has half its weight in the estimate
RATE_RATIO = 3.0  # assumed ratio of a link's rate to the rate from publish to applied


@dataclass(slots=True)
class Delivery:
    """A version that a worker is receiving or applying, as the worker reports it."""

    version: int
    phase: str
    chunks: int
    since: float  # when the worker last reported progress
    patch: PatchId | None = None  # the patch that arrives; None: the whole version
    waits: str = ""  # the worker's text on which reader delays the apply, and for how long


@dataclass(slots=True)
class ObserverRecord:
    """What the publisher records of a worker only for observers and logs, by model."""

    reported: dict[str, object] = field(
        default_factory=dict[str, object]
    )  # the last recorded state
    # Seconds from a version's publish to the report that the worker runs it; missing: unknown.
    took: dict[str, float] = field(default_factory=dict[str, float])
    # The patch by which the running version arrived; missing: it arrived whole, or unknown.
    patches: dict[str, PatchId] = field(default_factory=dict[str, PatchId])
    # The last version that failed at the worker, and why, until it runs that or a newer version.
    failed: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    # (model, epoch, version) for which the worker reported a wrong digest, oldest first.
    wrong_digests: dict[tuple[str, int, int], None] = field(
        default_factory=dict[tuple[str, int, int], None]
    )

    def arrived_by(self, model: str, patch: PatchId | None) -> None:
        """Record the patch by which a version arrived; None: it arrived whole, or is unknown."""
        self.patches.pop(model, None)
        if patch is not None:
            self.patches[model] = patch

    def changed(self, model: str, state: object) -> bool:
        """Record a model's state for observers; return True if it differs from the last one."""
        if self.reported.get(model) == state:
            return False
        self.reported[model] = state
        return True


@dataclass(frozen=True, slots=True)
class PatchCandidate:
    """A worker that can decode patches, and how fast it receives and decodes patches.

    Attributes:
        running: The version that the worker runs.
        rate: Bytes per second to the worker; infinite if unknown.
        decode: Seconds to decode a patch, per byte of `OfferedPatch.work`: for patches with classes
            (True) and without (False). Missing: the worker has not reported this.
    """

    running: Running | None
    rate: float = math.inf
    decode: Mapping[bool, float] = field(default_factory=dict[bool, float])


@dataclass(slots=True)
class Link:
    """An estimate of a link's rate from reports of progress. Later reports weigh more.

    The rate is a sum of bytes over a sum of seconds. In a mean of the reports' rates, two reports
    in quick succession would weigh too much.
    """

    carried: float = 0.0  # bytes that the link carried, weighted
    waited: float = 0.0  # seconds in which it carried them, weighted
    least: float = 0.0  # lower bound: bytes per second from publish to applied

    @property
    def rate(self) -> float:
        """Bytes per second; infinite if unknown.

        Versions may be too small for two reports of progress. Then the rate is `RATE_RATIO` times
        the rate from publish to applied, since most of that time may be spent on other work.
        """
        return self.carried / self.waited if self.waited else RATE_RATIO * self.least or math.inf

    def learn(self, nbytes: int, seconds: float) -> None:
        """Record that the link carried `nbytes` bytes in `seconds`."""
        kept = 0.5 ** (nbytes / LINK_BYTES)
        self.carried = kept * self.carried + nbytes
        self.waited = kept * self.waited + seconds

    def observe_rate(self, nbytes: int, seconds: float) -> None:
        """Record that a version of `nbytes` bytes was reported applied `seconds` after its publish.

        A busy worker reports late, so one slow version at most halves the estimate.
        """
        if seconds > 0:
            self.least = max(nbytes / seconds, self.least / 2)


@dataclass(slots=True)
class Peer:
    """One worker on the roster."""

    name: str
    instance: str
    identity: bytes  # the routing id of its connection
    hello: Hello
    heard_at: float  # when its last message arrived
    running: dict[str, Running]  # by model, the version that runs
    incoming: dict[str, Delivery] = field(default_factory=dict[str, Delivery])  # by model
    subscribed: bool = False  # the worker has confirmed that published messages reach it
    shared: bool = False  # the worker reads shared memory of this host
    phase: WorkerPhase = "here"
    why: str = ""  # why the worker was lost, and what it was doing then
    closed_at: float = 0.0  # when the connection was closed, if the worker is away
    # When the worker will count as unresponsive, if it sends nothing after an announcement.
    unresponsive_after: float = math.inf
    stuck: bool = False  # whether the worker was reported as stuck
    contested_at: float | None = None  # when another instance requested its name
    uncharged_digests: int = 0  # reports of wrong digests that the rate limit has not charged yet
    # models of which an apply failed half-way: no version runs
    torn: set[str] = field(default_factory=set[str])
    revision: int = 0  # the roster's revision at the worker's last change for observers
    seen: ObserverRecord = field(default_factory=ObserverRecord)
    key: str = ""  # the worker's public key, if the publisher has keys
    link: Link = field(default_factory=Link)
    decode: dict[bool, float] = field(default_factory=dict[bool, float])  # see `PatchCandidate`
    has_decoded: bool = False  # whether the worker has decoded a patch since it joined
    lacks_keys: bool = False  # whether the worker lacks the current group key
    ticket: str = ""  # for the next data connection, until it is redeemed
    ticket_at: float = 0.0  # when the ticket was sent
    token: str = ""  # the prefix of reports on the data connection; empty: none was assigned
    through: tuple[str, ...] = ()  # the relays before the worker, the nearest to here first
    # of a relay: workers that its first report, which goes on, has not named yet
    unreported: set[str] = field(default_factory=set[str])

    @property
    def lost(self) -> bool:
        """True if the worker is lost."""
        return self.phase == "lost"

    @property
    def relay(self) -> bool:
        """True if the worker is a relay: it passes versions on, and no publish waits for it."""
        return RELAY in self.hello.features

    # The session.

    def newer_than_hello(self) -> dict[str, Running]:
        """Return the known running versions that are newer than those in the latest hello.

        A worker repeats its hello, and an `applied` on the data connection can arrive before the
        repetition. A hello without a version means that the worker no longer runs one, unless the
        hello was sent before the worker applied a version of this epoch. (P12)
        """

        def is_newer(model: str, known: Running) -> bool:
            named = self.hello.models[model]
            if named is None:
                return self.hello.epoch < known.epoch
            return (named.epoch, named.version) < (known.epoch, known.version)

        return {m: r for m, r in self.running.items() if m in self.hello.models and is_newer(m, r)}

    def begin_session(self, running: dict[str, Running]) -> None:
        """Record that the worker is welcomed, and runs these versions."""
        self.contested_at, self.unresponsive_after, self.lacks_keys = None, math.inf, False
        self.forget()
        for model in {*self.running, *running}:
            if self.running.get(model) != running.get(model):
                self.seen.took[model] = 0.0
                self.seen.arrived_by(model, None)
        self.running = running

    def heard(self, now: float) -> bool:
        """Record a message of the worker; return True if it was lost or unresponsive until then."""
        returned = self.phase == "lost" or now >= self.unresponsive_after
        self.heard_at, self.unresponsive_after = now, math.inf
        return returned

    def update_transports(self, *, subscribed: bool, shared: bool) -> bool:
        """Record which transports reach the worker; return True if these have changed."""
        before = self.subscribed, self.shared
        self.subscribed, self.shared = subscribed, shared
        return before != (subscribed, shared)

    def disconnected(self, now: float) -> None:
        """Record that the worker's connection is closed."""
        if self.phase == "here":
            self.closed_at = now
        self.move("closed")

    def lose(self, event: WorkerEvent, why: str) -> None:
        """Mark the worker as lost by this event; `why` includes what the worker was doing."""
        self.why, self.stuck = why, False
        self.move(event)

    def toggle_stuck(self) -> bool:
        """Change whether the worker counts as stuck; return whether it does now."""
        self.stuck = not self.stuck
        return self.stuck

    def outdate_keys(self) -> None:
        """Record that the worker lacks the current group keys."""
        self.lacks_keys = True

    def note_keys_sent(self) -> None:
        """Record that the worker was sent the current group keys."""
        self.lacks_keys = False

    def move(self, event: WorkerEvent) -> None:
        """Change the worker's phase as the table says for this event."""
        self.phase = WORKERS[self.phase].get(event, self.phase)

    # The reports of a relay.

    def expect_rows(self, names: Iterable[str]) -> None:
        """Begin the first report of this relay, which should have rows of these workers."""
        self.unreported = {*names}

    def note_row(self, name: str) -> None:
        """Record that this relay's first report has the row of a worker."""
        self.unreported.discard(name)

    def end_first_report(self) -> list[str]:
        """End this relay's first report; return the workers whose rows it lacks."""
        names, self.unreported = sorted(self.unreported), set()
        return names

    def heard_through_relay(self, at: float) -> None:
        """Record when a relay last heard this worker, which is behind it."""
        self.heard_at = at

    def runs_nothing(self, model: str) -> None:
        """Record that the worker runs no version of a model."""
        self.running.pop(model, None)

    def receives(self, model: str, doing: Doing, now: float) -> None:
        """Record the version that arrives at a worker behind a relay."""
        if not doing.incoming:
            self.incoming.pop(model, None)
            return
        delivery = self.note(model, doing.incoming, doing.phase, doing.chunks, now)
        delivery.since, delivery.patch = now - doing.idle_ms / 1000, doing.incoming_patch

    # The worker's versions.

    def runs(self, model: str) -> tuple[int, int]:
        """Return (epoch, version) of a model that the worker runs; (0, 0) if it runs none."""
        running = self.running.get(model)
        return (running.epoch, running.version) if running else (0, 0)

    def has_staged(self, model: str, version: int) -> bool:
        """True if the worker reported that it has staged this version."""
        doing = self.incoming.get(model)
        return doing is not None and (doing.version, doing.phase) == (version, "staged")

    def progressed(self, report: Progress, plan: ChunkPlan | None, now: float) -> None:
        """Record a report of progress, and update the link's rate if it is not the first report.

        `plan`: the chunks of the version or patch; None: the publisher no longer has them.
        """
        doing = self.incoming.get(report.model)
        known = doing is not None and (doing.version, doing.patch) == (report.version, report.patch)
        if doing is not None and known and plan is not None:
            more = plan.approximate_bytes(report.chunks) - plan.approximate_bytes(doing.chunks)
            if doing.phase == "receiving" and more > 0 and now > doing.since:
                self.link.learn(more, now - doing.since)
        doing = self.note(report.model, report.version, report.phase, report.chunks, now)
        doing.patch, doing.waits = report.patch, report.waits

    def fetches(self, model: str, version: int, patch: PatchId | None, now: float) -> None:
        """Record that the worker fetches chunks of a version, or of a patch to it."""
        self.note(model, version, "receiving", None, now).patch = patch

    def decoded(self, seconds: float, work: float, *, classes: bool) -> None:
        """Record that decoding a patch took `seconds`; `work` is `OfferedPatch.work`. (D11)

        The first patch is ignored: it takes much longer, since the worker then maps the memory for
        decoding.
        """
        decoded_before, self.has_decoded = self.has_decoded, True
        if decoded_before and seconds > 0 and work > 0:
            pace = seconds / work
            self.decode[classes] = (self.decode.get(classes, pace) + pace) / 2

    def note(
        self, model: str, version: int, phase: str, chunks: int | None, now: float
    ) -> Delivery:
        """Update a version's delivery to this phase and number of chunks (None: as before)."""
        doing = self.incoming.get(model)
        if doing is None or (doing.version, doing.phase) != (version, phase):
            doing = self.incoming[model] = Delivery(version, phase, chunks or 0, now)
        elif chunks is not None and chunks != doing.chunks:
            doing.chunks, doing.since = chunks, now
        return doing

    def stages(self, staged: Staged, now: float) -> None:
        """Record that the worker has staged a version."""
        self.note(staged.model, staged.version, "staged", None, now).patch = staged.patch

    def applied(
        self, model: str, running: Running, took: float, patch: PatchId | None, *, current: bool
    ) -> None:
        """Record that the worker runs a version; end the delivery of that or an older version.

        Args:
            model, running: The version that runs.
            took: Seconds from the version's publish to the report; 0: unknown.
            patch: The patch by which the version arrived; None: it arrived whole, or is unknown.
            current: Whether the version is of the current epoch.
        """
        self.running[model] = running
        self.seen.took[model] = took
        if patch is not None or self.seen.patches:
            self.seen.arrived_by(model, patch)
        if self.seen.failed.get(model, (running.version + 1, ""))[0] <= running.version:
            del self.seen.failed[model]
        incoming = self.incoming.get(model) if current else None
        if incoming is not None and incoming.version <= running.version:
            del self.incoming[model]

    def repaired(self, model: str) -> None:
        """Record that a model is no longer torn."""
        self.torn.discard(model)

    def failed(self, failed: Failed, *, current: bool) -> None:
        """Record that a version failed at the worker; if not `intact`, no version runs there."""
        if not failed.intact:
            self.running.pop(failed.model, None)
            self.torn.add(failed.model)
        incoming = self.incoming.get(failed.model) if current else None
        if incoming is not None and incoming.version == failed.version:
            del self.incoming[failed.model]

    def keep_failure(self, model: str, version: int, reason: str) -> None:
        """Keep for observers why the worker failed a version."""
        self.seen.failed[model] = version, reason

    def wrong_digest(self, model: str, epoch: int, version: int) -> bool:
        """Record a report of a wrong digest; return True for the first one of this version."""
        self.uncharged_digests += 1
        seen, key = self.seen.wrong_digests, (model, epoch, version)
        if key in seen:
            return False
        seen[key] = None
        if len(seen) > UNLIKE_KEPT:
            del seen[next(iter(seen))]
        return True

    def charge_wrong_digests(self) -> int:
        """Return how many wrong digests the rate limit has to charge now, and count anew."""
        uncharged, self.uncharged_digests = self.uncharged_digests, 0
        return uncharged

    def forget_failures(self) -> None:
        """Drop the failures, since versions are numbered anew."""
        self.seen.failed.clear()

    def forget(self) -> None:
        """Drop the deliveries, and regard the worker as unsubscribed until its next ping."""
        self.subscribed = False
        self.incoming.clear()


class Roster:
    """The workers of one publisher."""

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._by_name: dict[str, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._by_token: dict[str, Peer] = {}
        self._by_ticket: dict[str, Peer] = {}
        self._models = 0  # number of models of all workers
        self.relays = 0  # number of relays, those behind relays included
        self.removals = 0  # number of workers that were removed
        self._departed: deque[Peer] | None = None  # workers that were removed; None: not kept
        self.revision = 0  # increases with each change
        self._by_change: dict[str, Peer] = {}  # by name; the oldest change first

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def sessions(self) -> list[Peer]:
        """Return the workers with a session here, which are those behind no relay."""
        return [peer for peer in self if not peer.through]

    def workers_behind(self, relay: str) -> list[Peer]:
        """Return the workers that a relay reports. The relay has a session here."""
        return [peer for peer in self if peer.through[:1] == (relay,)]

    def relays_before(self, workers: Iterable[str]) -> list[Peer]:
        """Return the live relays with a session here through which these workers are reached."""
        found = (self.by_name(name) for name in workers if self.relays)
        names = {peer.through[0] for peer in found if peer is not None and peer.through}
        relays = (self.by_name(name) for name in sorted(names))
        return [r for r in relays if r is not None and not (r.lost or r.through)]

    def named_behind(self, relay: Peer, workers: Iterable[str]) -> list[str]:
        """Return, sorted, those of these workers that are behind this relay."""
        found = (self.by_name(name) for name in workers)
        return sorted(p.name for p in found if p is not None and p.through[:1] == (relay.name,))

    def is_for(self, peer: Peer, workers: Collection[str] | None) -> bool:
        """True if a version for `workers` is sent to a peer, as one of them or as their relay.

        `workers`: None: the version is for all.
        """
        if workers is None or peer.name in workers:
            return True
        return peer.relay and bool(self.named_behind(peer, workers))

    def relaying(self, model: str) -> list[Peer]:
        """Return the live relays with sessions here that want a model."""
        live = (p for p in (self.sessions() if self.relays else ()) if p.relay and not p.lost)
        return [peer for peer in live if model in peer.hello.models]

    def wanting(self, model: str) -> list[str]:
        """Return the names of the live workers that want a model, relays excluded."""
        live = (peer for peer in self if peer.phase != "lost" and not peer.relay)
        return [peer.name for peer in live if model in peer.hello.models]

    def next_revision(self) -> int:
        """Count one more change for observers, and return its revision."""
        self.revision += 1
        return self.revision

    def touch(self, peer: Peer) -> None:
        """Give a worker a new revision, so that observers receive its row."""
        peer.revision = self.next_revision()
        self._by_change.pop(peer.name, None)
        self._by_change[peer.name] = peer

    def take_departed(self) -> list[Peer]:
        """Return the workers that were removed since the last call; at the first call, none.

        Only as many as fit on the roster are kept, the last ones: workers may come and go for long
        while a relay has no publisher to report to.
        """
        departed, self._departed = self._departed, deque(maxlen=WORKERS_MAX)
        return list(departed or ())

    def changed(self, since: int) -> list[Peer]:
        """Return the workers that changed after revision `since`, oldest change first."""
        found = [*takewhile(lambda p: p.revision > since, reversed(self._by_change.values()))]
        found.reverse()
        return found

    def by_name(self, name: str) -> Peer | None:
        """Return the worker with this name, which may be lost; None if there is none."""
        return self._by_name.get(name)

    def by_identity(self, identity: bytes) -> Peer | None:
        """Return the worker whose connection has this routing id; None if there is none."""
        return self._by_identity.get(identity)

    def by_token(self, token: str) -> Peer | None:
        """Return the worker with this token for data-connection reports; None if there is none."""
        return self._by_token.get(token)

    def assign_token(self, peer: Peer, token: str) -> None:
        """Assign a token for a worker's reports on its data connection."""
        peer.token, self._by_token[token] = token, peer

    def assign_ticket(self, peer: Peer, ticket: str, now: float) -> None:
        """Assign a ticket to a worker. A previous ticket that was not redeemed becomes invalid."""
        self._by_ticket.pop(peer.ticket, None)
        peer.ticket, peer.ticket_at, self._by_ticket[ticket] = ticket, now, peer

    def redeem(self, ticket: str) -> Peer | None:
        """Return the worker that owns a ticket, and invalidate the ticket; None if none does."""
        return self._by_ticket.pop(ticket, None)

    def patch_candidates(
        self, model: str, workers: Collection[str] | None, *, shared: bool
    ) -> list[PatchCandidate]:
        """Return the workers to which a version would be sent, and that can decode patches. (D2)

        Relays are among them, also those before named workers. `shared` is true if the version is
        in shared memory.
        """
        names = (
            None if workers is None else {*workers, *(p.name for p in self.relays_before(workers))}
        )
        return [
            PatchCandidate(p.running.get(model), p.link.rate, p.decode.copy())
            for p in self
            if model in p.hello.models and (names is None or p.name in names)
            if not p.through and DELTA in p.hello.features and not (p.lost or (shared and p.shared))
        ]

    def targets(self, model: str, workers: Sequence[str] | None, report_by: float) -> list[Peer]:
        """Return the peers to send a version to: `workers`, or all that want the model.

        A live peer among them counts as unresponsive if it sends nothing until `report_by`. Workers
        behind a relay are left out, since they get the version from the relay.
        """
        if workers is None:
            known = self.sessions() if self.relays else self._by_name.values()
            found = [p for p in known if p.phase != "lost" and model in p.hello.models]
        else:
            found = [p for n in workers if (p := self.by_name(n)) is not None and not p.through]
        for peer in found:
            if peer.phase != "lost":
                peer.unresponsive_after = min(peer.unresponsive_after, report_by)
        return found

    def admit(
        self, identity: bytes, hello: Hello, now: float, key: str = ""
    ) -> tuple[Admission, Peer | None]:
        """Handle a hello; return (admission, worker that has the name now).

        The sender is admitted if it is `new`, `known` (the same instance as before) or `again`
        (another instance, after the first was lost). `contested`: the caller must ping the returned
        worker. `taken` and `full`: the caller must refuse the hello.
        """
        peer = self._by_name.get(hello.name)
        if peer is not None and peer.through and (peer.lost or peer.instance == hello.instance):
            self.forget(peer)  # the worker was behind a relay, and joins here now
            peer = None
        if peer is not None and peer.through:
            return "taken", peer
        if peer is not None and (peer.instance, peer.key) == (hello.instance, key):  # K3
            if not self._has_room(hello, peer):
                return "full", None
            self._models += len(hello.models) - len(peer.hello.models)
            self._by_identity.pop(peer.identity, None)
            self.relays -= peer.relay
            peer.identity, peer.hello, peer.heard_at = identity, hello, now
            self.relays += peer.relay
            if peer.phase == "away":
                peer.move("spoke")
            self._by_identity[identity] = peer
            peer.seen = ObserverRecord()
            self.touch(peer)
            return "known", peer
        if peer is not None and not peer.lost:
            asked = peer.contested_at
            if asked is not None and now - asked < self._lost_after and peer.heard_at > asked:
                return "taken", peer
            if asked is None or now - asked >= self._lost_after:
                peer.contested_at = now
            return "contested", peer
        if not self._has_room(hello, peer):
            return "full", None
        if peer is not None:
            self.forget(peer)
        admitted: Admission = "new" if peer is None else "again"
        peer = Peer(hello.name, hello.instance, identity, hello, now, running={}, key=key)
        self._by_identity[identity] = peer
        self._add(peer)
        return admitted, peer

    def add_behind_relay(self, hello: Hello, through: tuple[str, ...], now: float) -> Peer | None:
        """Add a worker behind a relay, in place of one with its name; None if there is no room."""
        before = self._by_name.get(hello.name)
        if not self._has_room(hello, before):
            return None
        if before is not None:
            self.forget(before)
        peer = Peer(hello.name, hello.instance, b"", hello, now, running={}, through=through)
        self._add(peer)
        return peer

    def _add(self, peer: Peer) -> None:
        self._by_name[peer.name] = peer
        self._models += len(peer.hello.models)
        self.relays += peer.relay
        self.touch(peer)

    def _has_room(self, hello: Hello, instead_of: Peer | None) -> bool:
        """Return True if the roster has room for a worker. Remove lost workers if necessary.

        `instead_of`: the worker that the new one replaces, if any.
        """
        count, models = (1, 0) if instead_of is None else (0, len(instead_of.hello.models))

        def room() -> bool:
            after = self._models + len(hello.models) - models
            return len(self._by_name) + count <= WORKERS_MAX and after <= ROSTER_MODELS_MAX

        return room() or (self._forget_lost(instead_of) and room())

    def disconnect(self, peer: Peer) -> None:
        """Forget a worker's connection, so that the worker must send hello again."""
        self._by_identity.pop(peer.identity, None)
        self._by_token.pop(peer.token, None)
        peer.token = ""

    def forget(self, peer: Peer) -> None:
        """Remove a worker from the roster."""
        if self._by_name.pop(peer.name, None) is not None:
            self._models -= len(peer.hello.models)
            self.relays -= peer.relay
            del self._by_change[peer.name]
            self.removals += 1
            if self._departed is not None:
                self._departed.append(peer)
        self._by_identity.pop(peer.identity, None)
        self._by_token.pop(peer.token, None)
        self._by_ticket.pop(peer.ticket, None)

    def silent(self, now: float) -> list[Peer]:
        """Return the workers that have been silent for `lost_after` and are not marked as lost."""
        return [
            p for p in self if not (p.lost or p.through) and now - p.heard_at >= self._lost_after
        ]

    def long_away(self, now: float, seconds: float) -> list[Peer]:
        """Return the workers whose connection has been closed for at least this long."""
        return [p for p in self if p.phase == "away" and now - p.closed_at >= seconds]

    def _forget_lost(self, except_for: Peer | None) -> bool:
        """Remove the lost workers; return whether there were any."""
        lost = [peer for peer in self if peer.lost and peer is not except_for]
        for peer in lost:
            self.forget(peer)
        return bool(lost)
