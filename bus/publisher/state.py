"""The state of a publisher: one record, which only the publisher's machine reads and changes.

The functions that handle messages, calls and time take this record as their first argument and
return effects. Each function is in the module of its subject (`machine.py` lists the modules).
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ..headers import data_topic, patch_topic
from ..limits import ABSENT_MAX, ABSENT_SECONDS, REJECTIONS_SECONDS, WORKERS_MAX, Timing
from ..messages import Hello, Prepare, Shared, WorkerRow
from ..protocol_limits import PUSH_CHUNKS, RENEWAL_PAUSES
from ..trust.grants import Grants
from .publication import Publication
from .publisher_view import PublisherView, ReachableWorker
from .push import Push
from .roster import Peer, Roster
from .store import Versions
from .version import Chunked

LOOP_SECONDS = 30.0  # seconds for which a relay in a loop is refused; it may leave the loop then
CHECKS_UNTIL_HINT = 6  # checks for likely mistakes during `hint_after`


@dataclass(frozen=True, slots=True)
class Absence:
    """The record of a worker that left or was refused: its models, and why it is absent."""

    models: frozenset[str]
    code: str
    text: str
    at: float  # when it left or was last refused


@dataclass(frozen=True, slots=True)
class EpochClaim:
    """An epoch later than a relay's, which a worker's hello named."""

    epoch: int
    started_by: float  # the latest time at which the epoch's publisher can have started
    heard_at: float  # when a hello last named the epoch


class PersistentCondition:
    """Finds models for which a condition lasts at some worker, and reports each model once."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, set[str]]] = {}
        self._reported: set[str] = set()

    def unreported(self, found: Iterable[str], limit: int) -> list[str]:
        """Return up to `limit` unreported models of `found`; none after `ABSENT_MAX` reports."""
        if len(self._reported) >= ABSENT_MAX:
            return []
        return [model for model in found if model not in self._reported][:limit]

    def held_since(
        self, found: dict[str, list[Peer]], since: float, now: float
    ) -> list[tuple[str, list[Peer]]]:
        """Return (model, workers) for which the condition has been true since `since`, once each.

        `found`: by model, the workers for which the condition is true now.
        """
        kept, due = self._since, list[tuple[str, list[Peer]]]()
        self._since = {}
        for model in self.unreported(found, ABSENT_MAX):
            current = {peer.name for peer in found[model]}
            began, before = kept.get(model, (now, current))
            names = current & before
            if not names:  # other workers than before: the condition begins anew
                began, names = now, current
            self._since[model] = began, names
            if began <= since:
                self._reported.add(model)
                due.append((model, [peer for peer in found[model] if peer.name in names]))
        return due


@dataclass(slots=True, eq=False)
class PublisherState:
    """The state of one publisher.

    Attributes:
        epoch: The publisher's epoch. Workers refuse an epoch lower than the one that they run.
        data_endpoint: The endpoint of the data socket, as sent to workers.
        timing: Intervals and timeouts.
        shared: A segment by which workers detect that they are on the publisher's host.
        age: Returns the seconds since the publisher started, by a clock that never stops. The
            publisher needs this age to take a later epoch. None: the epoch is final.
        secret: Returns 32 unguessable hexadecimal digits, for a token or, with keys, a ticket.
        keys: Returns the group keys for a worker on an encrypted connection. None: published
            messages are not encrypted.
        grants: The permissions of each key. None: there are no keys, and everything is permitted.
        clock: Returns the seconds since 1970, which are also sent to observers. None: unknown.
        recorded: Returns whether a later epoch is recorded for later publishers; only then does
            this publisher move to it. Must not block. None: no record is needed.
        origin: Whether the publisher names its versions. False: it is a relay, which offers
            versions under the epochs and numbers that their origin gave.
        queue: The most chunks queued for one subscriber; further chunks are dropped.
        above: A relay's own hello to the publisher above, by which it finds itself in reports.
    """

    epoch: int
    data_endpoint: str
    timing: Timing = field(default_factory=Timing)
    shared: Shared | None = None
    age: Callable[[], float] | None = None
    secret: Callable[[], str] | None = None
    keys: Callable[[Peer], list[str]] | None = None
    grants: Grants | None = None
    clock: Callable[[], float] | None = None
    recorded: Callable[[int], bool] | None = None
    queue: int = PUSH_CHUNKS
    origin: bool = True
    above: Hello | None = None

    roster: Roster = field(init=False)
    store: dict[str, Versions] = field(init=False, default_factory=dict[str, Versions])  # by model
    calls: dict[int, Publication] = field(init=False, default_factory=dict[int, Publication])
    pushes: dict[bytes, Push] = field(init=False, default_factory=dict[bytes, Push])  # by topic
    # By model, the segment in which its first version will be, until that version is published.
    prepared: dict[str, Prepare] = field(init=False, default_factory=dict[str, Prepare])
    # By instance, the relays in a loop with this one: an error text, and until when to refuse them.
    _loops: dict[str, tuple[str, float]] = field(
        init=False, default_factory=dict[str, tuple[str, float]]
    )
    # Of a relay: the latest epoch of a worker that it had to refuse. None: it refused none.
    claim: EpochClaim | None = field(init=False, default=None)
    # Of a relay: since when it, or a relay above it, has had no publisher. None: it has one.
    cut_off_at: float | None = field(init=False, default=None)
    malformed: int = field(init=False, default=0)  # messages that broke the protocol
    view_outdated: bool = field(init=False, default=True)  # the last `PublisherView` is outdated
    renewed_at: float = field(init=False, default=-math.inf)  # when a later epoch was taken
    renewal_pause: float = field(init=False)  # seconds from then until the next renewal
    _first_epoch: int = field(init=False)  # the epoch at the publisher's start
    beacon_at: float = field(init=False, default=0.0)  # when the next beacons are due
    # Workers that left or were refused, by name, oldest first.
    absent: dict[str, Absence] = field(init=False, default_factory=dict[str, Absence])
    # By worker, a row that was set aside while the worker is connected elsewhere: (the relay that
    # reported it, row, time).
    contested: dict[str, tuple[str, WorkerRow, float]] = field(
        init=False, default_factory=dict[str, tuple[str, WorkerRow, float]]
    )
    # why connections were rejected; empty: none were
    rejections: str = field(init=False, default="")
    # when `rejections` was last logged
    rejections_logged_at: float = field(init=False, default=-math.inf)
    # Models published to no worker; `hinted`: those of them for which other models were suggested.
    unreached_models: set[str] = field(init=False, default_factory=set[str])
    hinted: set[str] = field(init=False, default_factory=set[str])
    hints_at: float = field(init=False, default=0.0)  # when to check next for likely mistakes
    suspected_typos: PersistentCondition = field(init=False, default_factory=PersistentCondition)
    never_applied: PersistentCondition = field(init=False, default_factory=PersistentCondition)

    def __post_init__(self) -> None:
        self.roster = Roster(self.timing.lost_after)
        self.renewal_pause, self._first_epoch = self.timing.lost_after, self.epoch

    def note_loop(self, instance: str, text: str, now: float) -> None:
        """Record that a relay is in a loop with this one, to refuse it for `LOOP_SECONDS`."""
        current = {i: loop for i, loop in self._loops.items() if now < loop[1]}
        self._loops = {**current, instance: (text, now + LOOP_SECONDS)}

    def loop_with(self, instance: str, now: float) -> str:
        """Return the text on a loop with the relay of this instance; empty if there is none."""
        text, until = self._loops.get(instance, ("", 0.0))
        return text if now < until else ""

    def started_ms(self) -> float:
        """Return when this publisher started, in milliseconds since 1970.

        The start is computed from the clock's present time and the publisher's age, since the clock
        may have been set after the start. Without a clock, the first epoch is returned.
        """
        if self.clock is None or self.age is None:
            return self._first_epoch
        return 1000 * (self.clock() - self.age())

    def versions(self, model: str) -> Versions:
        """Return the `Versions` of a model; make new, empty ones for an unknown model."""
        versions = self.store.get(model)
        if versions is None:
            versions = self.store[model] = Versions(model, named_here=self.origin)
        return versions

    # Epochs and time.

    def renew(self, epoch: int, now: float) -> None:
        """Move to a later epoch. Each move doubles the pause until the next, up to a bound."""
        if self.renewed_at > -math.inf:
            longest = RENEWAL_PAUSES * self.timing.lost_after
            self.renewal_pause = min(2 * self.renewal_pause, longest)
        self.renewed_at = now
        self.take_epoch(epoch)

    def note_claim(self, epoch: int, age_ms: int, now: float) -> None:
        """Record a refused worker's epoch, and its publisher's age, for the publisher above."""
        known, started = self.claim, now - age_ms / 1000
        if known is None or epoch >= known.epoch or now - known.heard_at >= self.timing.lost_after:
            same = known is not None and epoch == known.epoch
            started = min(started, known.started_by) if known is not None and same else started
            self.claim = EpochClaim(epoch, started, now)

    def cut_off(self, at: float | None) -> None:
        """Record since when a relay has had no publisher above; None: it has one. (R3)"""
        self.cut_off_at = at

    def take_epoch(self, epoch: int) -> None:
        """Move to a later epoch."""
        self.epoch, self.view_outdated = epoch, True
        for prepared in [*self.prepared.values()]:
            self.prepare(prepared.model, prepared.nbytes, prepared.shared)

    def beacons_due(self, now: float) -> bool:
        """Return True once in each interval of `ping`, when beacons are to be sent."""
        due = now >= self.beacon_at
        if due:
            self.beacon_at = now + self.timing.ping
        return due

    def hints_due(self, now: float) -> bool:
        """Return True when it is time to check for likely mistakes again."""
        due = now >= self.hints_at
        if due:
            self.hints_at = now + self.timing.hint_after / CHECKS_UNTIL_HINT
        return due

    # The view for other threads.

    def invalidate_view(self) -> None:
        """Record that the last view is outdated."""
        self.view_outdated = True

    def view(self) -> PublisherView:
        """Return the view for other threads, which is valid until `view_outdated` is set again."""
        self.view_outdated = False
        reached = [
            ReachableWorker(peer.name, frozenset(peer.hello.models), peer.shared)
            for peer in self.roster.sessions()
            if peer.subscribed and peer.phase != "lost"
        ]
        return PublisherView(self.epoch, tuple(reached), self.rejections, self.malformed)

    # Calls, pushes and memory.

    def open(self, call: Publication) -> None:
        """Add an open call, and drop the segment prepared for its model's first version."""
        self.calls[call.number] = call
        self.prepared.pop(call.version.model, None)

    def close(self, number: int) -> Publication | None:
        """Remove a call from the open calls and return it; None if it is not open."""
        return self.calls.pop(number, None)

    def begin_push(self, version: Chunked, now: float) -> None:
        """Start to push the chunks of a version or of a patch."""
        push = Push(version, now, self.timing.quiet, self.queue)
        self.pushes[push.topic] = push

    def end_push(self, topic: bytes) -> None:
        """End the push on this topic, if there is one; workers fetch the missing chunks."""
        self.pushes.pop(topic, None)

    def end_pushes(self, model: str) -> None:
        """End the pushes of a model's version and patch."""
        self.end_push(data_topic(model))
        self.end_push(patch_topic(model))

    def prepare(self, model: str, nbytes: int, shared: Shared) -> Prepare:
        """Record the segment of a model's first version; return the message that announces it."""
        self.prepared[model] = Prepare(model=model, epoch=self.epoch, nbytes=nbytes, shared=shared)
        return self.prepared[model]

    # Peers that versions do not reach.

    def count_malformed(self) -> None:
        """Count a message that broke the protocol."""
        self.malformed += 1

    def note_absence(
        self, name: str, models: Collection[str], code: str, text: str, now: float
    ) -> bool:
        """Record why a worker is absent; return True if the caller should log it.

        A refused worker repeats its hello, and any peer can use any number of names. So each name
        is logged at most once in `ABSENT_SECONDS`, and at most `ABSENT_MAX` names in that time.
        """
        absent = self.absent
        before = absent.get(name)
        if before is None and len(absent) >= ABSENT_MAX:
            oldest = next(iter(absent))
            if now - absent[oldest].at < ABSENT_SECONDS:
                return False
            del absent[oldest]
        if before is not None and before.code == code and now - before.at < ABSENT_SECONDS:
            absent[name] = Absence(frozenset(models), code, text, before.at)
            return False
        absent.pop(name, None)
        absent[name] = Absence(frozenset(models), code, text, now)
        return True

    def welcomed(self, name: str) -> None:
        """Record that a worker joins, so it is no longer absent."""
        self.absent.pop(name, None)
        self.view_outdated = True

    def contest(self, relay: str, row: WorkerRow, now: float) -> None:
        """Set aside a relay's row while its worker is connected elsewhere.

        If two relays report the worker, keep the row of the relay that heard the worker last.
        """
        by, kept, at = self.contested.get(row.name, (relay, row, now))
        if by != relay and at - kept.heard_ms / 1000 > now - row.heard_ms / 1000:
            return
        if row.name in self.contested or len(self.contested) < WORKERS_MAX:
            self.contested[row.name] = relay, row, now

    def end_contest(self, relay: str, names: Collection[str] | None = None) -> None:
        """Drop the rows of a relay that were set aside: for the workers `names`; None: for all."""
        for name in [*self.contested] if names is None else names:
            if self.contested.get(name, ("",))[0] == relay:
                del self.contested[name]

    def note_rejections(self, text: str, now: float) -> bool:
        """Record why connections were rejected; return True if the caller should log it.

        `text`: the reason for connections that were closed before their hello; empty if none were.
        It is logged at most once in `REJECTIONS_SECONDS`.
        """
        unreported = bool(text) and now - self.rejections_logged_at >= REJECTIONS_SECONDS
        self.view_outdated |= text != self.rejections
        self.rejections = text
        if unreported:
            self.rejections_logged_at = now
        return unreported

    def note_unreached(self, model: str) -> bool:
        """Record that a model was published to no worker; return True if that is new."""
        new = model not in self.unreached_models
        self.unreached_models.add(model)
        return new

    def note_reached(self, models: Collection[str]) -> None:
        """Record that a worker (re)joins that wants these models."""
        self.unreached_models.difference_update(models)

    def note_hinted(self, model: str) -> None:
        """Record that a log line has named the models that workers want instead of this one."""
        self.hinted.add(model)
