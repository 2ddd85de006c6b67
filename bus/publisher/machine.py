"""The publisher's state machine, without sockets, threads or clocks.

The shell, which owns the sockets, passes in messages (`receive`), calls of the user (`publish`) and
the time (`tick`). Each method returns effects, which the shell carries out. `ready` returns the
topics that have chunks to send, and `push` returns the next chunks of these topics. The state is
one record (`state.py`); the modules on the right handle the events.

    hello ──> welcome                          adds the worker to the roster     joining.py
    publish ──> announce, chunk..., end        pushed to all; or announce and    publishing.py
                                               end, to some workers only
    fetch ──> chunk...  | announce, end | refuse(gone)                           serving.py
    below ──> (a relay's report: as reports of its workers)                      behind.py
    applied | staged | failed                  advance the publish               reports.py
    staged ──> commit | abort                  after the decision                calls.py
    silence ──> lost                                                             sessions.py

The machine owns the memory of its versions: no other code writes to a version's memory before the
machine returns `Release` or `MakeReclaimable`. The publisher need not be a trainer: a relay is a
worker that is also a publisher.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from ..effects import Notice, Send
from ..errors import ProtocolError
from ..headers import TOKEN_BYTES, Buffer, control_topic, from_worker, model_of
from ..messages import (
    Applied,
    Beacon,
    Below,
    Bye,
    Checked,
    Failed,
    Fetch,
    Hello,
    Observe,
    Ping,
    Pong,
    Progress,
    Refuse,
    Shared,
    Staged,
    Verify,
)
from ..observed import to_publisher
from ..structs import Message
from ..trust.grants import Grant
from . import absent, behind, calls, faults, joining, publishing, reports, serving, sessions
from .effects import Broadcast, Effect, HangUp, Resolve
from .observers import Observers
from .publication import Publication, PublishTerms
from .publisher_view import PublisherView
from .rate_limits import COST_HIGH, COST_LOW, RateLimits, cost_of
from .roster import Peer
from .state import PublisherState
from .status import HeldVersion, WorkerStatus, held, status_of
from .verifying import Comparison
from .version import Snapshot, Version, VersionOffer


class PublisherMachine:
    """The state machine of one publisher.

    Args:
        state: The publisher's state, which only this machine changes.
    """

    def __init__(self, state: PublisherState) -> None:
        self.state, self.observers = state, Observers(state)
        self._limits = RateLimits(state.timing)

    def _with_freed_memory(self, effects: list[Effect]) -> list[Effect]:
        """Add the effects that free memory, before every `Resolve`.

        So a caller that publishes again at once finds the freed memory.
        """
        free = list[Effect]()
        for versions in self.state.store.values():
            if versions.changed:
                free += versions.freed()
        if not free:
            return effects
        others, answers = list[Effect](), list[Effect]()
        for effect in effects:
            (answers if isinstance(effect, Resolve) else others).append(effect)
        return others + free + answers

    # Messages and connections.

    def receive(
        self, identity: bytes, frames: Sequence[Buffer], now: float, key: str = ""
    ) -> list[Effect]:
        """Handle a message from a worker or an observer. Never raises: refuses malformed messages.

        Args:
            identity: The ZeroMQ routing id of the message's connection.
            frames: Header and payload.
            now: The time.
            key: The public key of the connection's peer; empty if no keys are used.
        """
        nbytes = len(frames[0]) if frames else 0
        peer = self.state.roster.by_identity(identity)
        if peer is not None and peer.key != key:  # K10: a peer can choose its routing id
            return [HangUp()]
        if peer is None and not self._limits.allow_unknown(now):
            return [] if self._limits.allow(identity, COST_HIGH, nbytes, now) else [HangUp()]
        grants = self.state.grants
        grant = grants.of(key) if grants is not None else None
        if grants is not None and grant is None:  # K8
            if not self._limits.allow(identity, COST_HIGH, nbytes, now):
                return [HangUp()]
            return [Send(Refuse(code="revoked", text=sessions.REVOKED), to=identity)]
        try:
            message = to_publisher(frames)
        except ProtocolError as error:  # P5
            self.state.count_malformed()
            if not self._limits.allow(identity, COST_HIGH, nbytes, now):
                return [HangUp()]
            return [Send(Refuse(code=error.code, text=str(error)), to=identity)]
        cost = cost_of(message, known=peer is not None)
        if not self._limits.allow(identity, cost, nbytes, now):
            return [HangUp()]
        if isinstance(message, Observe | Verify):  # P23, P24, K4
            return self.observers.answer_request(identity, message, grant, now)
        if peer is not None and not isinstance(message, Hello | Bye):
            if peer.relay and peer.phase != "here":  # R5: reports that it sent since may be lost
                return self.drop(identity, "this relay was away", now)
            if peer.phase == "away":  # the worker has reconnected with its old routing id
                peer.move("spoke")
            effects = sessions.returned(self.state, peer, now) if peer.heard(now) else []
            effects += sessions.send_keys(self.state, peer)
            effects += self._dispatch(peer, message, now)
            wrong = peer.charge_wrong_digests() if peer.uncharged_digests else 0
            if wrong and not self._limits.allow(identity, COST_LOW * wrong, nbytes, now):
                # otherwise a worker could send any number of wrong digests
                effects.append(HangUp())
            if now < self.observers.until:
                self.observers.record_message(peer, message)
            return self._with_freed_memory(effects)
        if isinstance(message, Hello):
            return self._with_freed_memory(joining.hello(self.state, identity, message, now, key))
        if isinstance(message, Bye):
            gone = [] if peer is None else sessions.leave(self.state, peer, "it sent goodbye", now)
            return self._with_freed_memory(gone)
        text = "say hello first: this publisher does not know this connection"
        return [Send(Refuse(code="unknown-worker", text=text), to=identity)]  # P4

    def receive_report(self, frame: bytes, now: float) -> list[Effect] | None:
        """Handle a report that arrived on a data connection; return None if it is invalid. (P22)

        A report may be late or repeated: the worker sends each report on the control channel too.
        A wrong digest is charged to the rate limit with the worker's next control message.
        """
        token, header = frame[:TOKEN_BYTES], frame[TOKEN_BYTES:]
        peer = self.state.roster.by_token(token.decode("latin1"))
        if peer is None:
            return None
        try:
            message, _ = from_worker([header])
        except ProtocolError:
            return None
        if not isinstance(message, Applied):
            return None
        if peer.phase == "lost" or message.model in peer.torn:
            return []
        effects = sessions.returned(self.state, peer, now) if peer.heard(now) else []
        effects += reports.runs(self.state, peer, message, now)
        if now < self.observers.until:
            self.observers.record_message(peer, message)
        return self._with_freed_memory(effects)

    def _dispatch(self, peer: Peer, message: Message, now: float) -> list[Effect]:
        # Handle a message of a worker in session.
        match message:
            case Fetch():
                return serving.fetch(self.state, peer, message, now)
            case Progress():
                return reports.progress(self.state, peer, message, now)
            case Staged():
                return reports.staged(self.state, peer, message, now)
            case Applied():
                return reports.applied(self.state, peer, message, now)
            case Failed():
                return reports.failed(self.state, peer, message, now)
            case Ping():
                return sessions.receive_ping(self.state, peer, message, now)
            case Pong():
                return []
            case Checked():
                return self.observers.checks.checked(peer, message)
            case Below():
                return behind.below(self.state, peer, message, now)
            case _:
                raise AssertionError(f"{type(message).__name__} is no message of a worker")

    def unreachable(self, identity: bytes, now: float, ended: str = "") -> list[Effect]:
        """Handle a closed connection. `ended`: how the process ended; empty if it may run.

        Call this after all messages of the connection are handled, since the last one may be a
        `bye`.
        """
        return self._with_freed_memory(sessions.unreachable(self.state, identity, now, ended))

    def subscribed(self, topic: bytes) -> Beacon | None:
        """Return the beacon that confirms a new subscription; None if it is not a model's topic."""
        model = model_of(topic)
        return self._beacon(model) if model is not None else None

    # Keys.

    def redeem(self, ticket: str, now: float) -> tuple[str, str] | None:
        """Return (name, public key) of the worker that owns a ticket; None if it is not valid."""
        return sessions.redeem(self.state, ticket, now)

    def grant(self, by_key: Mapping[str, Grant], now: float) -> list[Effect]:
        """Replace the set of allowed keys, and end the sessions of workers whose key is revoked."""
        grants = self.state.grants
        if grants is None or not grants.replace(by_key):
            return []
        return self._with_freed_memory(sessions.revoke(self.state, now))

    # Calls of the user.

    def offer(self, offered: VersionOffer) -> tuple[Version, list[Effect]]:
        """Make a version of an earlier publisher the latest version, before any worker joins."""
        version, effects = publishing.offer(self.state, offered)
        return version, self._with_freed_memory(effects)

    def pass_on(self, offered: VersionOffer, now: float) -> tuple[Version, list[Effect]]:
        """Announce another publisher's version under its own epoch and number, as a relay does.

        Raises:
            ValueError: The offer has no key, or the relay has offered the same or a newer version.
        """
        version, effects = publishing.pass_on(self.state, offered, now)
        return version, self._with_freed_memory(effects)

    def takes(self, offered: VersionOffer) -> bool:
        """True if `pass_on` accepts an offer: of a later epoch, or newer than the latest."""
        versions, key = self.state.store.get(offered.model), offered.key
        if key is None or key[0] != self.state.epoch:
            return key is not None and key[0] > self.state.epoch
        latest = versions.latest if versions is not None else None
        return latest is None or latest.key < key

    def lacks(self, offered: VersionOffer) -> bool:
        """True if a relay of the offer's epoch has neither this version nor a newer one for all."""
        if offered.key is None or offered.key[0] != self.state.epoch or not self.takes(offered):
            return False
        same = self.state.versions(offered.model).find(offered.key[1])
        return same is None or same.phase == "old"

    def follow(self, epoch: int) -> list[Effect]:
        """Move to the epoch of the publisher above, if it is later and the relay has no version."""
        if epoch <= self.state.epoch or any(versions.any for versions in self.state.store.values()):
            return []
        return self._with_freed_memory(joining.follow_epoch(self.state, epoch))

    def cut_off(self, at: float | None) -> list[Effect]:
        """Set since when a relay has had no publisher above, for its pongs; None: it has one."""
        self.state.cut_off(at)
        return []

    def decide(self, version: Version, *, commit: bool, why: str = "") -> list[Effect]:
        """Commit or abort a passed-on version as its origin decided; `why`: the abort's text."""
        effects = publishing.decide(self.state, version, commit=commit, why=why)
        return self._with_freed_memory(effects)

    def publish(
        self, number: int, offered: VersionOffer, terms: PublishTerms, started: float, now: float
    ) -> tuple[Publication, list[Effect]]:
        """Publish a version to every worker that has the model, or to named workers.

        Args:
            number: The number of the call, by which `Resolve` effects name it.
            offered: The version to publish.
            terms: What the call requires.
            started: The time at which the call was made.
            now: The time.

        Raises:
            UnknownWorkerError: A named worker has never joined; nothing was published.
        """
        call, effects = publishing.publish(self.state, number, offered, terms, started, now)
        return call, self._with_freed_memory(effects)

    def publish_as_one(
        self, offers: Mapping[int, VersionOffer], terms: PublishTerms, started: float, now: float
    ) -> tuple[list[Publication], list[Effect]]:
        """Publish versions of several models, which are committed or aborted together.

        Args:
            offers: The versions to publish, one of each model, by the numbers of their calls.
            terms: What the calls require: `require` and `expect` count workers, not models.
            started: The time at which the calls were made.
            now: The time.

        Raises:
            UnknownWorkerError: A named worker has never joined; nothing was published.
        """
        parts, effects = publishing.publish_as_one(self.state, offers, terms, started, now)
        return parts, self._with_freed_memory(effects)

    def end(self, call: Publication, why: str, now: float) -> list[Effect]:
        """End a call before its deadline, with the results so far.

        If the call's version is not committed yet, abort it.
        """
        return self._with_freed_memory(calls.end(self.state, call, why, now))

    def prepare(self, model: str, shared: Shared, nbytes: int) -> list[Effect]:
        """Announce to workers of this host the segment of a model's first version."""
        return joining.prepare(self.state, model, shared, nbytes)

    def make_room(
        self, model: str, among: Collection[Snapshot], *, replaces_latest: bool
    ) -> list[Effect]:
        """Make room for a model's next version: evict one version, if any may be evicted.

        Args:
            model: The model's id.
            among: The snapshots whose memory fits the next version.
            replaces_latest: Whether the next version is for every worker and needs no commit.
        """
        versions = self.state.store.get(model)
        if versions is not None:
            versions.give_up(among, replaces_latest=replaces_latest)
        return self._with_freed_memory([])

    # Results from the shell.

    def hashed(self, version: Version, now: float) -> list[Effect]:
        """Handle the end of a `Hash` effect: all chunks of the version are hashed."""
        return (
            []
            if version.gone
            else self._with_freed_memory(reports.hashed(self.state, version, now))
        )

    def arrived(self, version: Version, now: float) -> list[Effect]:
        """Handle new chunks of a version that is published while it is being received."""
        if version.gone:
            return []
        effects = publishing.share(self.state, version)
        effects += serving.send_arrived(self.state, version, now)
        if version.hashing and version.chunks.digest:
            effects += reports.hashed(self.state, version, now)
        return self._with_freed_memory(effects)

    def keep_part(self, offered: VersionOffer) -> list[Effect]:
        """Keep some chunks of another publisher's version, as its source. (N5)

        Raises:
            ValueError: The offer has no key, or this publisher has published the model itself.
        """
        return self._with_freed_memory(publishing.keep_part(self.state, offered))

    def obtained(
        self, version: Version, chunks: Sequence[tuple[int, int]], fault: str, now: float
    ) -> list[Effect]:
        """Handle chunks that came from the sources of a version, after `Obtain`.

        Args:
            version: The version.
            chunks: The (index, CRC-32C) of each chunk.
            fault: Why the missing chunks will not come, so that the version is withdrawn; empty:
                they may still come.
            now: The time.
        """
        if version.gone:
            return []
        effects = publishing.obtained(self.state, version, chunks, now)
        if fault and not version.chunks.whole:
            effects += publishing.withdraw(self.state, version, fault, now)
        return self._with_freed_memory(effects)

    def abandon(self, version: Version) -> list[Effect]:
        """Drop a version that a relay can no longer receive whole."""
        abandoned = [] if version.gone else serving.abandon(self.state, version)
        return self._with_freed_memory(abandoned)

    def unpatch(self, version: Version) -> list[Effect]:
        """Drop the patch to a version that a relay receives whole instead."""
        return [] if version.gone else serving.unpatch(self.state, version)

    def compared(self, comparison: Comparison, _now: float) -> list[Effect]:
        """Handle the end of a `Compare` effect: return the answer to the observer."""
        return self._with_freed_memory(self.observers.checks.compared(comparison))

    def rekeyed(self) -> list[Effect]:
        """Begin to send workers the new group keys: each gets them after its next message."""
        return sessions.rekeyed(self.state)

    def unshared(self, version: Version) -> None:
        """Handle a failed `Stamp`: workers cannot find the version in its shared segment."""
        version.unshare()

    # Failures of the shell or of this machine.

    def drop(self, identity: bytes, why: str, now: float) -> list[Effect]:
        """End the session of a worker whose message caused an exception; the worker joins again."""
        return self._with_freed_memory(faults.drop(self.state, identity, why, now))

    def give_up(self, version: Version, why: str, now: float) -> list[Effect]:
        """Fail the calls of a version whose bytes cannot be read or sent."""
        return self._with_freed_memory(
            [] if version.gone else faults.give_up(self.state, version, why, now)
        )

    def forget(self, number: int) -> None:
        """Drop a call whose result cannot be determined."""
        faults.forget(self.state, number)

    def unpublish(self, number: int, offered: VersionOffer) -> bool:
        """Drop a call that failed; return True if the machine already owns the offer's memory."""
        return faults.unpublish(self.state, number, offered)

    def stop_pushing(self, topics: Collection[bytes]) -> None:
        """Stop pushing on these topics."""
        for topic in topics:
            self.state.end_push(topic)

    def awaits(self, number: int) -> bool:
        """True if the call with this number is open: a `Resolve` will follow."""
        call = self.state.calls.get(number)
        return call is not None and not call.resolved

    # Pushing.

    @property
    def ready(self) -> list[bytes]:
        """The topics on which `push` can send now."""
        return [push.topic for push in self.state.pushes.values() if push.ready]

    def push(self, now: float, topics: Collection[bytes] | None = None) -> list[Effect]:
        """Return the effects that push the next chunks, on these topics (None: on all topics)."""
        return self._with_freed_memory(publishing.push(self.state, now, topics))

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Handle everything that is due: beacons, lost workers, deadlines."""
        return self._with_freed_memory([effect for _, step in self.steps(now) for effect in step()])

    def steps(self, now: float) -> Iterator[tuple[int | None, Callable[[], list[Effect]]]]:
        """Yield (number of a call or None, step) for each step of `tick`.

        If one step raises, the shell continues with the others and then calls `freed`.
        """
        state = self.state
        yield None, partial(self._tick_limits, now)
        yield None, partial(behind.tick, state, now)
        yield None, partial(sessions.tick, state, now)
        yield None, partial(self._beacons, now)
        yield None, partial(publishing.push, state, now)
        yield None, partial(self.observers.checks.tick, now)
        yield None, partial(absent.hints, state, now)
        for number, call in [*state.calls.items()]:
            yield number, partial(calls.settle, state, call, now)

    def _tick_limits(self, now: float) -> list[Effect]:
        self._limits.tick(now)
        return []

    def _beacons(self, now: float) -> list[Effect]:
        state = self.state
        if not state.beacons_due(now):
            return []
        beacons = [self._beacon(model) for model in state.store]
        return [Broadcast(control_topic(b.model), b) for b in beacons if b.version]  # P16

    def freed(self) -> list[Effect]:
        """Return the effects that free memory which is not needed any more."""
        return self._with_freed_memory([])

    def close(self, now: float) -> list[Effect]:
        """Resolve every open call with its results so far."""
        return calls.close(self.state, now)

    def view(self) -> PublisherView:
        """Return the view for other threads, which is valid until `view_outdated` is set again."""
        return self.state.view()

    def report_rejections(self, text: str, now: float) -> list[Effect]:
        """Log why connections were rejected before their hello; empty `text`: none were."""
        unreported = self.state.note_rejections(text, now)
        return [Notice("exhausted", text, warning=True)] if unreported else []

    def count_workers(self, model: str | None) -> int:
        """Return the number of live workers that want a model, or (None) of all."""
        live = (peer for peer in self.state.roster if not (peer.lost or peer.relay))
        return sum(model is None or model in peer.hello.models for peer in live)

    def status(self, now: float) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker on the roster."""
        return tuple(status_of(self.state, peer, now) for peer in self.state.roster)

    def held(self) -> dict[str, tuple[HeldVersion, ...]]:
        """Return the versions that a relay has, by model."""
        return held(self.state)

    def status_of(self, name: str, now: float) -> WorkerStatus | None:
        """Return the status of one worker; None if no worker has that name."""
        peer = self.state.roster.by_name(name)
        return None if peer is None else status_of(self.state, peer, now)

    def _beacon(self, model: str) -> Beacon:
        versions = self.state.store.get(model)
        latest = versions.find(versions.latest.version) if versions and versions.latest else None
        return Beacon(model=model, epoch=self.state.epoch, version=latest.version if latest else 0)
