"""The roster: every worker that a publisher knows, by name and by ZeroMQ routing id.

A name belongs to one live instance. If a second instance asks for it, the publisher pings the first
one. If the first answers, the second is refused; if it does not, or its connection is closed, the
second gets the name. So a worker that restarts after a crash joins quickly, and two workers with
the same name are reported at once.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from ..chunks import ChunkPlan
from ..limits import ROSTER_MODELS_MAX, WORKERS_MAX
from ..messages import DELTA, Failed, Hello, PatchId, Progress, Running
from .phases import WORKERS, WorkerEvent, WorkerPhase

Admission = Literal["new", "known", "again", "contested", "taken", "full"]

LINK_BYTES = 2**26  # half-life of a link's estimate, in bytes carried
AT_MOST = 3.0  # assumed ratio of a link's rate to the rate from publish to applied


@dataclass(slots=True)
class Delivery:
    """A version on its way to a worker."""

    version: int
    phase: str
    chunks: int
    since: float  # when it last made progress
    patch: PatchId | None = None  # the patch that it arrives as; None: the whole version
    waits: str = ""  # the worker's text of which reader delays the apply, and since when


@dataclass(slots=True)
class ObserverRecord:
    """What is kept of a worker only for observers and logs, by model."""

    told: dict[str, object] = field(default_factory=dict[str, object])  # last noted for observers
    # Seconds from the publish of the version that it runs to its report; missing: unknown.
    took: dict[str, float] = field(default_factory=dict[str, float])
    # The last version that it failed, and why, until it runs that or a newer one.
    failed: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    # Model, epoch and version for which it reported a wrong digest, oldest first.
    unlike: dict[tuple[str, int, int], None] = field(
        default_factory=dict[tuple[str, int, int], None]
    )


@dataclass(frozen=True, slots=True)
class PatchCandidate:
    """A worker that takes patches, and how fast it receives and decodes them.

    Attributes:
        running: The version that it runs.
        rate: Bytes per second to it; infinite if unknown.
        decode: Seconds that it takes to decode a patch, per byte of a version in which nothing
            changes: with classes (True) and without, as far as it has reported that.
    """

    running: Running | None
    rate: float = math.inf
    decode: Mapping[bool, float] = field(default_factory=dict[bool, float])


@dataclass(slots=True)
class Link:
    """An estimate of a link's rate from reports of progress; later ones weigh more.

    Each report is weighted by the time since the one before. A mean of rates would be dominated by
    reports that come in pairs, a moment apart, such as a periodic one and an answer.
    """

    carried: float = 0.0  # bytes
    waited: float = 0.0  # seconds
    least: float = 0.0  # bytes per second from publish to applied, of some version

    @property
    def rate(self) -> float:
        """Bytes per second; infinite if unknown.

        Versions may be too small for two reports of progress. Then it is `AT_MOST` times the rate
        from publish to applied, since most of that time may not be transfer.
        """
        return self.carried / self.waited if self.waited else AT_MOST * self.least or math.inf

    def learn(self, nbytes: int, seconds: float) -> None:
        """Record that the link carried `nbytes` bytes in `seconds`."""
        kept = 0.5 ** (nbytes / LINK_BYTES)
        self.carried = kept * self.carried + nbytes
        self.waited = kept * self.waited + seconds

    def observe_rate(self, nbytes: int, seconds: float) -> None:
        """Record that a version of `nbytes` bytes was applied `seconds` after its publish.

        A busy worker reports late, so one slow version only halves the estimate.
        """
        if seconds > 0:
            self.least = max(nbytes / seconds, self.least / 2)


@dataclass(slots=True)
class Peer:
    """One worker on the roster."""

    name: str
    instance: str
    identity: bytes
    hello: Hello
    heard_at: float
    running: dict[str, Running]
    incoming: dict[str, Delivery] = field(default_factory=dict[str, Delivery])
    subscribed: bool = False  # it has confirmed that published messages reach it
    shared: bool = False  # it reads shared memory of this host
    phase: WorkerPhase = "here"
    why: str = ""  # why it was lost, and what it was doing then
    closed_at: float = 0.0  # when its connection was closed, if it is away
    # When it counts as unresponsive: it sent nothing since a version was announced to it.
    unresponsive_after: float = math.inf
    stuck: bool = False  # it was reported as stuck
    contested_at: float | None = None  # when another instance asked for its name
    unlike: int = 0  # reports of wrong digests that the rate limit has not charged yet
    torn: set[str] = field(default_factory=set[str])  # models that it reported as torn (no version)
    revision: int = 0  # of the roster, at the last change of this that observers receive
    seen: ObserverRecord = field(default_factory=ObserverRecord)
    key: str = ""  # its public key, if the publisher has keys
    link: Link = field(default_factory=Link)
    decode: dict[bool, float] = field(default_factory=dict[bool, float])  # see `PatchCandidate`
    warm: bool = False  # it has decoded a patch since it joined, so the memory for that is mapped
    rekeyed: bool = False  # it has not received the current group key
    ticket: str = ""  # for its next data connection, until redeemed; and when it was sent
    ticket_at: float = 0.0
    token: str = ""  # the prefix of its reports on the data connection; empty: it has none

    @property
    def lost(self) -> bool:
        """True if the worker is lost."""
        return self.phase == "lost"

    def move(self, event: WorkerEvent) -> None:
        """Change the phase as the table says for this event."""
        self.phase = WORKERS[self.phase].get(event, self.phase)

    def runs(self, model: str) -> tuple[int, int]:
        """Return epoch and version of a model that it runs; (0, 0) if none."""
        running = self.running.get(model)
        return (running.epoch, running.version) if running else (0, 0)

    def learn(self, progress: Progress, plan: ChunkPlan, now: float) -> None:
        """Update the link's rate from two consecutive reports of progress of one version."""
        old = self.incoming.get(progress.model)
        if old is None or (old.version, old.patch) != (progress.version, progress.patch):
            return
        more = plan.of(progress.chunks) - plan.of(old.chunks)
        if old.phase == "receiving" and more > 0 and now > old.since:
            self.link.learn(more, now - old.since)

    def decoded(self, seconds: float, work: float, *, classes: bool) -> None:
        """Update the time to decode a patch, from a report of `seconds` for `work` bytes. (D11)

        The first patch is ignored: it takes much longer, since its memory is mapped then.
        """
        warm, self.warm = self.warm, True
        if warm and seconds > 0 and work > 0:
            pace = seconds / work
            self.decode[classes] = (self.decode.get(classes, pace) + pace) / 2

    def note(
        self, model: str, version: int, phase: str, chunks: int | None, now: float
    ) -> Delivery:
        """Record what the worker does with a version, and when it last made progress."""
        doing = self.incoming.get(model)
        if doing is None or (doing.version, doing.phase) != (version, phase):
            doing = self.incoming[model] = Delivery(version, phase, chunks or 0, now)
        elif chunks is not None and chunks != doing.chunks:
            doing.chunks, doing.since = chunks, now
        return doing

    def applied(self, model: str, running: Running, took: float, *, current: bool) -> None:
        """Record that it runs a version, and end the delivery of that or an older version.

        Args:
            model, running: The version.
            took: Seconds since it was published; 0: unknown.
            current: The version is of the current epoch.
        """
        self.running[model], self.seen.took[model] = running, took
        if self.seen.failed.get(model, (running.version + 1, ""))[0] <= running.version:
            del self.seen.failed[model]
        incoming = self.incoming.get(model) if current else None
        if incoming is not None and incoming.version <= running.version:
            del self.incoming[model]

    def failed(self, failed: Failed, *, current: bool) -> None:
        """Record that it failed a version; if the model is not intact, that it runs none."""
        if not failed.intact:
            self.running.pop(failed.model, None)
            self.torn.add(failed.model)
        incoming = self.incoming.get(failed.model) if current else None
        if incoming is not None and incoming.version == failed.version:
            del self.incoming[failed.model]

    def forget(self) -> None:
        """Drop its deliveries, and treat it as not subscribed until it confirms that again."""
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
        self._models = 0  # sum over all workers
        self.revision = 0
        self._by_change: dict[str, Peer] = {}  # by name, oldest change first

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def touch(self, peer: Peer) -> None:
        """Mark a worker as changed for observers."""
        self.revision += 1
        peer.revision = self.revision
        self._by_change.pop(peer.name, None)
        self._by_change[peer.name] = peer

    def changed(self, since: int) -> list[Peer]:
        """Return the workers that changed after revision `since`, oldest change first."""
        found = [*takewhile(lambda p: p.revision > since, reversed(self._by_change.values()))]
        found.reverse()
        return found

    def by_name(self, name: str) -> Peer | None:
        """Return the worker with a name, even if it is lost."""
        return self._by_name.get(name)

    def by_identity(self, identity: bytes) -> Peer | None:
        """Return the worker of a connection."""
        return self._by_identity.get(identity)

    def by_token(self, token: str) -> Peer | None:
        """Return the worker whose reports on data connections begin with this token."""
        return self._by_token.get(token)

    def give(self, peer: Peer, token: str) -> None:
        """Assign a token for a worker's reports on its data connection."""
        peer.token, self._by_token[token] = token, peer

    def ticket(self, peer: Peer, ticket: str, now: float) -> None:
        """Assign a worker a ticket; it replaces one that was not redeemed."""
        self._by_ticket.pop(peer.ticket, None)
        peer.ticket, peer.ticket_at, self._by_ticket[ticket] = ticket, now, peer

    def redeem(self, ticket: str) -> Peer | None:
        """Return the worker that owns a ticket, and invalidate the ticket; None: no worker."""
        return self._by_ticket.pop(ticket, None)

    def patch_candidates(
        self, model: str, workers: Collection[str] | None, *, shared: bool
    ) -> list[PatchCandidate]:
        """Return the workers that take patches and would be sent a version. (D2)

        `shared`: the version is in shared memory.
        """
        return [
            PatchCandidate(p.running.get(model), p.link.rate, p.decode.copy())
            for p in self
            if model in p.hello.models and (workers is None or p.name in workers)
            if DELTA in p.hello.features and not (p.lost or (shared and p.shared))
        ]

    def targets(self, model: str, workers: Sequence[str] | None) -> list[Peer]:
        """Return the workers that a version is for: those that want the model, or named ones."""
        if workers is None:
            everybody = self._by_name.values()
            return [p for p in everybody if p.phase != "lost" and model in p.hello.models]
        return [p for name in workers if (p := self.by_name(name)) is not None]

    def admit(
        self, identity: bytes, hello: Hello, now: float, key: str = ""
    ) -> tuple[Admission, Peer | None]:
        """Handle a hello; return the admission, and the worker that has the name.

        `new`, `known` (the same instance as before) and `again` (another instance, after the first
        was lost) are admitted. `contested`: ping the worker returned. `taken`, `full`: refuse.
        """
        peer = self._by_name.get(hello.name)
        if peer is not None and (peer.instance, peer.key) == (hello.instance, key):  # K3
            if not self._has_room(hello, peer):
                return "full", None
            self._models += len(hello.models) - len(peer.hello.models)
            self._by_identity.pop(peer.identity, None)
            peer.identity, peer.hello, peer.heard_at = identity, hello, now
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
            self.remove(peer)
        admitted: Admission = "new" if peer is None else "again"
        peer = Peer(hello.name, hello.instance, identity, hello, now, running={}, key=key)
        self._by_name[peer.name] = self._by_identity[identity] = peer
        self._models += len(hello.models)
        self.touch(peer)
        return admitted, peer

    def _has_room(self, hello: Hello, instead_of: Peer | None) -> bool:
        """True if there is room for a worker, if need be after the lost ones are forgotten."""
        count, models = (1, 0) if instead_of is None else (0, len(instead_of.hello.models))

        def room() -> bool:
            after = self._models + len(hello.models) - models
            return len(self._by_name) + count <= WORKERS_MAX and after <= ROSTER_MODELS_MAX

        return room() or (self._forget_lost(instead_of) and room())

    def disconnect(self, peer: Peer) -> None:
        """Forget a worker's connection, so that it must send hello again."""
        self._by_identity.pop(peer.identity, None)
        self._by_token.pop(peer.token, None)
        peer.token = ""

    def remove(self, peer: Peer) -> None:
        """Remove a worker from the roster."""
        if self._by_name.pop(peer.name, None) is not None:
            self._models -= len(peer.hello.models)
            del self._by_change[peer.name]
        self._by_identity.pop(peer.identity, None)
        self._by_token.pop(peer.token, None)
        self._by_ticket.pop(peer.ticket, None)

    def silent(self, now: float) -> list[Peer]:
        """Return the workers that are not lost yet and were silent for `lost_after`."""
        return [p for p in self if not p.lost and now - p.heard_at >= self._lost_after]

    def gone(self, now: float, patience: float) -> list[Peer]:
        """Return the workers that have been away for at least `patience` seconds."""
        return [p for p in self if p.phase == "away" and now - p.closed_at >= patience]

    def _forget_lost(self, but: Peer | None) -> bool:
        lost = [peer for peer in self if peer.lost and peer is not but]
        for peer in lost:
            self.remove(peer)
        return bool(lost)
