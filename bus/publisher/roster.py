"""Who is there: every worker that a publisher knows, by name and by ZeroMQ identity.

A name belongs to one living instance. A second instance that asks for it is put off while the
first is asked for a sign of life: if one comes, the second is refused; if none comes, or its
connection is gone, the name passes on. So a worker that crashed and came back is let in quickly,
and two workers started with one name learn of it at once.
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

LINK_BYTES = 2**26  # half of what is believed of a link is of the last so many that it carried
AT_MOST = 3.0  # times as fast as versions were there is what a link is taken for


@dataclass(slots=True)
class Delivery:
    """A version on its way to a worker."""

    version: int
    phase: str
    chunks: int
    since: float  # when it last made progress
    patch: PatchId | None = None  # which it comes by; None: all of it
    waits: str = ""  # who is in its way there, since when, in the worker's words


@dataclass(slots=True)
class Seen:
    """What is kept of a worker for people alone, by model."""

    told: dict[str, object] = field(default_factory=dict[str, object])  # what they know of it
    # Seconds from when what it runs was published until it said so; none: that is not known.
    took: dict[str, float] = field(default_factory=dict[str, float])
    # The version that it has failed last, and why, until it runs that or a newer one.
    failed: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    # Model, epoch and version of which it has reported a wrong digest, the longest ago first.
    unlike: dict[tuple[str, int, int], None] = field(
        default_factory=dict[tuple[str, int, int], None]
    )


@dataclass(frozen=True, slots=True)
class Taker:
    """A worker that takes patches, and what is known of how soon one is there.

    Attributes:
        running: What it runs.
        rate: Bytes a second to it; infinite if that is not known.
        decode: Seconds that it takes to decode a patch, for each byte of a version of which nothing
            changes: with classes (True) and without, as far as it has said so.
    """

    running: Running | None
    rate: float = math.inf
    decode: Mapping[bool, float] = field(default_factory=dict[bool, float])


@dataclass(slots=True)
class Link:
    """How much a link carries, from words of what has arrived: the later ones weigh more.

    Each word stands for as long as it was waited for. The mean of their rates would be ruled by
    words that come in pairs, as an interval's and an answer do: the second is a moment later.
    """

    carried: float = 0.0  # bytes
    waited: float = 0.0  # seconds
    least: float = 0.0  # bytes a second, at which some version was there and applied

    @property
    def rate(self) -> float:
        """Bytes a second; infinite if that is not known.

        Versions may be too small for two words on their way. Then it is some times that at which
        they were there: most of the time may have been taken by anything else.
        """
        return self.carried / self.waited if self.waited else AT_MOST * self.least or math.inf

    def learn(self, nbytes: int, seconds: float) -> None:
        """Take note that it took so long to carry so much."""
        kept = 0.5 ** (nbytes / LINK_BYTES)
        self.carried = kept * self.carried + nbytes
        self.waited = kept * self.waited + seconds

    def brought(self, nbytes: int, seconds: float) -> None:
        """Take note that a version was there that long after it was published, and applied.

        Who was busy says so late: one slow version in between says nothing.
        """
        if seconds > 0:
            self.least = max(nbytes / seconds, self.least / 2)


@dataclass(slots=True)
class Peer:
    """One worker, as the publisher knows it."""

    name: str
    instance: str
    identity: bytes
    hello: Hello
    heard_at: float
    running: dict[str, Running]
    incoming: dict[str, Delivery] = field(default_factory=dict[str, Delivery])
    subscribed: bool = False  # published messages are known to reach it
    shared: bool = False  # it reads shared memory of this host
    phase: WorkerPhase = "here"
    why: str = ""  # it was lost, with what it was doing
    closed_at: float = 0.0  # when its connection was, if it is away
    # From when on it is mute: it was told of a version and has said nothing since, so it may have
    # been stopped.
    mute_at: float = math.inf
    stuck: bool = False  # it was said to be stuck
    contested_at: float | None = None  # when another instance asked for its name
    unlike: int = 0  # wrong digests that it reported and that have cost it nothing yet
    torn: set[str] = field(default_factory=set[str])  # models of which it has said that none runs
    revision: int = 0  # of the roster, when this last changed in a way that observers are told
    seen: Seen = field(default_factory=Seen)
    key: str = ""  # its public key, where the publisher has keys
    link: Link = field(default_factory=Link)
    decode: dict[bool, float] = field(default_factory=dict[bool, float])  # see `Taker`
    warm: bool = False  # it has decoded a patch since it was let in, and has the memory for that
    rekeyed: bool = False  # there is another group key than it was told
    ticket: str = ""  # for a data connection, until it is shown; and when it was given
    ticket_at: float = 0.0
    token: str = ""  # what its words on the data connection begin with; empty: it has none

    @property
    def lost(self) -> bool:
        """Whether it is."""
        return self.phase == "lost"

    def move(self, event: WorkerEvent) -> None:
        """Take an event."""
        self.phase = WORKERS[self.phase].get(event, self.phase)

    def runs(self, model: str) -> tuple[int, int]:
        """Return epoch and version of a model that it runs; (0, 0) if none."""
        running = self.running.get(model)
        return (running.epoch, running.version) if running else (0, 0)

    def learn(self, progress: Progress, plan: ChunkPlan, now: float) -> None:
        """Learn how fast its link is, from two words of how far one version is."""
        old = self.incoming.get(progress.model)
        if old is None or (old.version, old.patch) != (progress.version, progress.patch):
            return
        more = plan.of(progress.chunks) - plan.of(old.chunks)
        if old.phase == "receiving" and more > 0 and now > old.since:
            self.link.learn(more, now - old.since)

    def decoded(self, seconds: float, work: float, *, classes: bool) -> None:
        """Learn how long it takes to decode a patch of so much work, if it says that. (D11)

        The first one takes longer by far, as its memory is new: nothing is learned from that.
        """
        warm, self.warm = self.warm, True
        if warm and seconds > 0 and work > 0:
            pace = seconds / work
            self.decode[classes] = (self.decode.get(classes, pace) + pace) / 2

    def note(
        self, model: str, version: int, phase: str, chunks: int | None, now: float
    ) -> Delivery:
        """Remember what it is doing, and since when it has not moved."""
        doing = self.incoming.get(model)
        if doing is None or (doing.version, doing.phase) != (version, phase):
            doing = self.incoming[model] = Delivery(version, phase, chunks or 0, now)
        elif chunks is not None and chunks != doing.chunks:
            doing.chunks, doing.since = chunks, now
        return doing

    def applied(self, model: str, running: Running, took: float, *, current: bool) -> None:
        """It runs a version; one of the current epoch is on its way no more, nor any before it.

        Args:
            model, running: Which.
            took: Seconds since that was published; 0: that is not known.
            current: It is of the current epoch.
        """
        self.running[model], self.seen.took[model] = running, took
        if self.seen.failed.get(model, (running.version + 1, ""))[0] <= running.version:
            del self.seen.failed[model]
        incoming = self.incoming.get(model) if current else None
        if incoming is not None and incoming.version <= running.version:
            del self.incoming[model]

    def failed(self, failed: Failed, *, current: bool) -> None:
        """It does not run a version, of the current epoch or not; and none if it is not intact."""
        if not failed.intact:
            self.running.pop(failed.model, None)
            self.torn.add(failed.model)
        incoming = self.incoming.get(failed.model) if current else None
        if incoming is not None and incoming.version == failed.version:
            del self.incoming[failed.model]

    def forget(self) -> None:
        """What it was doing is over, and nothing that is published is known to reach it."""
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
        self._models = 0  # of all of them
        self.revision = 0
        self._touched: dict[str, Peer] = {}  # by name, the longest ago first

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def touch(self, peer: Peer) -> None:
        """Observers are to be told of a worker."""
        self.revision += 1
        peer.revision = self.revision
        self._touched.pop(peer.name, None)
        self._touched[peer.name] = peer

    def changed(self, since: int) -> list[Peer]:
        """Return the workers of which observers were to be told after a revision, in order."""
        found = [*takewhile(lambda p: p.revision > since, reversed(self._touched.values()))]
        found.reverse()
        return found

    def by_name(self, name: str) -> Peer | None:
        """Return the worker of a name, lost ones included."""
        return self._by_name.get(name)

    def by_identity(self, identity: bytes) -> Peer | None:
        """Return the worker behind a connection."""
        return self._by_identity.get(identity)

    def by_token(self, token: str) -> Peer | None:
        """Return the worker whose words begin with a token."""
        return self._by_token.get(token)

    def give(self, peer: Peer, token: str) -> None:
        """Have a worker's words begin with a token."""
        peer.token, self._by_token[token] = token, peer

    def ticket(self, peer: Peer, ticket: str, now: float) -> None:
        """Have a worker a ticket, in place of one that it has not shown yet."""
        self._by_ticket.pop(peer.ticket, None)
        peer.ticket, peer.ticket_at, self._by_ticket[ticket] = ticket, now, peer

    def redeem(self, ticket: str) -> Peer | None:
        """Return whose ticket this is, for the only time."""
        return self._by_ticket.pop(ticket, None)

    def takers(self, model: str, workers: Collection[str] | None, *, shared: bool) -> list[Taker]:
        """Return those that take patches, and to whom a version would be sent. (D2)

        `shared`: it lies in shared memory.
        """
        return [
            Taker(p.running.get(model), p.link.rate, p.decode.copy())
            for p in self
            if model in p.hello.models and (workers is None or p.name in workers)
            if DELTA in p.hello.features and not (p.lost or (shared and p.shared))
        ]

    def targets(self, model: str, workers: Sequence[str] | None) -> list[Peer]:
        """Return those to whom a version is to go: who wants the model, or some by name."""
        if workers is None:
            everybody = self._by_name.values()
            return [p for p in everybody if p.phase != "lost" and model in p.hello.models]
        return [p for name in workers if (p := self.by_name(name)) is not None]

    def admit(
        self, identity: bytes, hello: Hello, now: float, key: str = ""
    ) -> tuple[Admission, Peer | None]:
        """Take a hello: who has the name now, and on what footing.

        `new`, `known` (heard before) and `again` (another instance after the first was lost) are
        in. `contested`: ask the peer returned for a sign of life. `taken`, `full`: refuse.
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
            peer.seen = Seen()
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
        """Return whether a worker can be let in, if need be in place of those that are lost."""
        count, models = (1, 0) if instead_of is None else (0, len(instead_of.hello.models))

        def room() -> bool:
            after = self._models + len(hello.models) - models
            return len(self._by_name) + count <= WORKERS_MAX and after <= ROSTER_MODELS_MAX

        return room() or (self._forget_lost(instead_of) and room())

    def disconnect(self, peer: Peer) -> None:
        """Know a worker by its connection no more, so that it has to say hello."""
        self._by_identity.pop(peer.identity, None)
        self._by_token.pop(peer.token, None)
        peer.token = ""

    def remove(self, peer: Peer) -> None:
        """Forget a worker."""
        if self._by_name.pop(peer.name, None) is not None:
            self._models -= len(peer.hello.models)
            del self._touched[peer.name]
        self._by_identity.pop(peer.identity, None)
        self._by_token.pop(peer.token, None)
        self._by_ticket.pop(peer.ticket, None)

    def silent(self, now: float) -> list[Peer]:
        """Return the live workers that have been silent for too long."""
        return [p for p in self if not p.lost and now - p.heard_at >= self._lost_after]

    def gone(self, now: float, patience: float) -> list[Peer]:
        """Return the workers that have been away for so long."""
        return [p for p in self if p.phase == "away" and now - p.closed_at >= patience]

    def _forget_lost(self, but: Peer | None) -> bool:
        lost = [peer for peer in self if peer.lost and peer is not but]
        for peer in lost:
            self.remove(peer)
        return bool(lost)
