"""The publisher's behaviour, without sockets, threads or clocks.

Feed it what arrives (`receive`), what the user wants (`publish`) and the passing of time (`tick`);
it answers with effects. `push` gives the next chunks while there are topics that are `ready`. What
it knows is one record (`state.py`); what is done is in the modules on the right.

    hello ──> welcome                          the worker is on the roster       joining.py
    publish ──> announce, chunk..., end        pushed; or announce and end,      publishing.py
                                               to some workers alone
    fetch ──> chunk...  | announce, end | refuse(gone)                           serving.py
    applied | staged | failed                  move the publish along            reports.py
    staged ──> commit | abort                  once decided                      calls.py
    silence ──> lost                                                             sessions.py

It owns the memory of its versions: nobody writes there before it said `Release` or `Lend`. Nothing
here assumes that the publisher is a trainer or that a worker is a leaf.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from ..effects import Send
from ..errors import ProtocolError
from ..messages import (
    TOKEN_BYTES,
    Applied,
    Beacon,
    Buffer,
    Bye,
    Failed,
    Fetch,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Refuse,
    Shared,
    Staged,
    control_topic,
    from_worker,
    model_of,
)
from ..observed import Checked, Observe, Verify, to_publisher
from ..trust.grants import Grant
from . import absent, calls, faults, joining, publishing, reports, serving, sessions
from .effects import Broadcast, Effect, HangUp, Resolve
from .observers import Observers
from .publication import Publication, Terms
from .publisher_view import PublisherView, ReachableWorker
from .rate_limits import COST_HIGH, COST_LOW, RateLimits, cost_of
from .roster import Peer
from .state import PublisherState
from .status import WorkerStatus, status_of
from .verifying import Comparison
from .version import Offer, Snapshot, Version


class PublisherMachine:
    """One publisher.

    Args:
        state: What it knows.
    """

    def __init__(self, state: PublisherState) -> None:
        self.state, self.observers = state, Observers(state)
        self._limits = RateLimits(state.timing)

    def _freeing(self, effects: list[Effect]) -> list[Effect]:
        """Let memory go before calls are answered: whoever is may publish again at once."""
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

    # What arrives.

    def receive(
        self, identity: bytes, frames: Sequence[Buffer], now: float, key: str = ""
    ) -> list[Effect]:
        """Take one message of a worker. Never raises: whatever is malformed is refused.

        Args:
            identity: Its connection.
            frames: Header and payload.
            now: The time.
            key: The public key of that connection, where there are keys.
        """
        nbytes = len(frames[0]) if frames else 0
        peer = self.state.roster.by_identity(identity)
        if peer is not None and peer.key != key:  # K10: whoever dials may choose its identity
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
            self.state.malformed += 1
            if not self._limits.allow(identity, COST_HIGH, nbytes, now):
                return [HangUp()]
            return [Send(Refuse(code=error.code, text=str(error)), to=identity)]
        cost = cost_of(message, known=peer is not None)
        if not self._limits.allow(identity, cost, nbytes, now):
            return [HangUp()]
        if isinstance(message, Observe | Verify):  # P23, P24, K4
            return self.observers.asked(identity, message, grant, now)
        if peer is not None and not isinstance(message, Hello | Bye):
            if peer.phase == "away":  # it has called itself the same on another connection
                peer.move("spoke")
            effects = sessions.heard(self.state, peer, now) + sessions.tell_keys(self.state, peer)
            effects += self._heed(peer, message, now)
            unlike, peer.unlike = peer.unlike, 0
            if unlike and not self._limits.allow(identity, COST_LOW * unlike, nbytes, now):
                effects.append(HangUp())  # it may bring those of any number of versions
            if now < self.observers.until:
                self.observers.heard(peer, message)
            return self._freeing(effects)
        if isinstance(message, Hello):
            return self._freeing(joining.hello(self.state, identity, message, now, key))
        if isinstance(message, Bye):
            gone = [] if peer is None else sessions.leave(self.state, peer, "it said goodbye", now)
            return self._freeing(gone)
        text = "say hello first: this publisher does not know this connection"
        return [Send(Refuse(code="unknown-worker", text=text), to=identity)]  # P4

    def receive_report(self, word: bytes, now: float) -> list[Effect] | None:
        """Take what somebody said on a data connection; None if it is no worker's word. (P22)

        It may be late, or doubled: all of it is said again on the control channel.
        """
        token, header = word[:TOKEN_BYTES], word[TOKEN_BYTES:]
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
        effects = sessions.heard(self.state, peer, now)
        peer.unlike = 0  # of reports whose versions were hashed later; this word may be right
        effects += reports.runs(self.state, peer, message, now)
        if peer.unlike:  # it costs as much as a word of nobody
            peer.unlike = 0
            return None
        if now < self.observers.until:
            self.observers.heard(peer, message)
        return self._freeing(effects)

    def _heed(self, peer: Peer, message: Message, now: float) -> list[Effect]:
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
                return sessions.ping(self.state, peer, message)
            case Pong():
                return []
            case Checked():
                return self.observers.checks.checked(peer, message)
            case _:
                raise AssertionError(f"{type(message).__name__} is no message of a worker")

    def unreachable(self, identity: bytes, now: float, ended: str = "") -> list[Effect]:
        """A connection is closed; `ended` says so, in words, if its worker's process has ended.

        Say it once all messages of that connection were taken: the last one may be a goodbye.
        """
        return self._freeing(sessions.unreachable(self.state, identity, now, ended))

    def subscribed(self, topic: bytes) -> Beacon | None:
        """Somebody has subscribed: what to tell it at once, so that it knows it is heard."""
        model = model_of(topic)
        return self._beacon(model) if model is not None else None

    # Keys.

    def redeem(self, ticket: str, now: float) -> tuple[str, str] | None:
        """Return the worker, by name and key, whose ticket somebody has shown; None: nobody's."""
        return sessions.redeem(self.state, ticket, now)

    def grant(self, by_key: Mapping[str, Grant], now: float) -> list[Effect]:
        """Let these keys in from now on, and no others."""
        grants = self.state.grants
        if grants is None or not grants.replace(by_key):
            return []
        return self._freeing(sessions.revoke(self.state, now))

    # What the user wants.

    def offer(self, offered: Offer) -> tuple[Version, list[Effect]]:
        """Have a version of an earlier publisher as the latest, before anybody is there."""
        version, effects = publishing.offer(self.state, offered)
        return version, self._freeing(effects)

    def publish(
        self, number: int, offered: Offer, terms: Terms, started: float, now: float
    ) -> tuple[Publication, list[Effect]]:
        """Publish a version: to every worker that has the model, or to some by name.

        Args:
            number: Names the call between the machine and whoever waits.
            offered: What is published.
            terms: What the call requires.
            started: When it was made.
            now: The time.

        Raises:
            UnknownWorkerError: No worker of a name has ever joined; nothing was published.
        """
        call, effects = publishing.publish(self.state, number, offered, terms, started, now)
        return call, self._freeing(effects)

    def end(self, call: Publication, why: str, now: float) -> list[Effect]:
        """End a call as it stands, before its time; one that is not decided is given up."""
        return self._freeing(calls.end(self.state, call, why, now))

    def prepare(self, model: str, shared: Shared, nbytes: int) -> list[Effect]:
        """Tell workers of this host where the first version of a model will lie."""
        return joining.prepare(self.state, model, shared, nbytes)

    def make_room(
        self, model: str, among: Collection[Snapshot], *, replaces_latest: bool
    ) -> list[Effect]:
        """Give up one of these versions of a model, if one may be, for another.

        Args:
            model: Its name.
            among: What lies in memory that would do.
            replaces_latest: The other one is for every worker and needs no commit.
        """
        versions = self.state.store.get(model)
        if versions is not None:
            versions.give_up(among, replaces_latest=replaces_latest)
        return self._freeing([])

    # What the shell has done.

    def hashed(self, version: Version, now: float) -> list[Effect]:
        """All chunks of a version are hashed, unless it is gone."""
        return [] if version.gone else self._freeing(reports.hashed(self.state, version, now))

    def arrived(self, version: Version, now: float) -> list[Effect]:
        """More of a version is here that was published while it was on its way."""
        if version.gone:
            return []
        effects = serving.arrived(self.state, version, now)
        if version.hashing and version.chunks.digest:
            effects += reports.hashed(self.state, version, now)
        return self._freeing(effects)

    def compared(self, comparison: Comparison, _now: float) -> list[Effect]:
        """What a worker has was compared with its version."""
        return self._freeing(self.observers.checks.compared(comparison))

    def rekeyed(self) -> list[Effect]:
        """Tell workers the group keys that are in force now, once they say something."""
        return sessions.rekeyed(self.state)

    def unshared(self, version: Version) -> None:
        """Workers cannot read a version by its new number; they fetch it instead."""
        version.shared = None

    # Where the shell, or this, has failed at something.

    def drop(self, identity: bytes, why: str, now: float) -> list[Effect]:
        """End the session of a worker, after an exception that it caused; it joins again."""
        return self._freeing(faults.drop(self.state, identity, why, now))

    def give_up(self, version: Version, why: str, now: float) -> list[Effect]:
        """Fail the calls that published a version, of which something cannot be read or sent."""
        return self._freeing([] if version.gone else faults.give_up(self.state, version, why, now))

    def forget(self, number: int) -> None:
        """Forget a call of which it cannot be said what becomes of it."""
        faults.forget(self.state, number)

    def unpublish(self, number: int, offered: Offer) -> bool:
        """Forget a call that failed; return whether the memory of its offer is ours by now."""
        return faults.unpublish(self.state, number, offered)

    def stop_pushing(self, topics: Collection[bytes]) -> None:
        """Push no more on these topics."""
        faults.stop_pushing(self.state, topics)

    def awaits(self, number: int) -> bool:
        """Return whether a call is open: a `Resolve` of it is to come."""
        call = self.state.calls.get(number)
        return call is not None and not call.resolved

    # Pushing.

    @property
    def ready(self) -> list[bytes]:
        """The topics for which `push` has something to send now."""
        return [push.topic for push in self.state.pushes.values() if push.ready]

    def push(self, now: float, topics: Collection[bytes] | None = None) -> list[Effect]:
        """Return the next chunks to publish, of some topics alone if they are given."""
        return self._freeing(publishing.push(self.state, now, topics))

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: beacons, lost workers, deadlines."""
        return self._freeing([effect for _, step in self.steps(now) for effect in step()])

    def steps(self, now: float) -> Iterator[tuple[int | None, Callable[[], list[Effect]]]]:
        """Yield what `tick` does, each with the call that it is about, if it is about one.

        A shell for which one of them fails goes on with the others, then with `freed`.
        """
        state = self.state
        yield None, partial(self._rest, now)
        yield None, partial(sessions.tick, state, now)
        yield None, partial(self._beacons, now)
        yield None, partial(publishing.push, state, now)
        yield None, partial(self.observers.checks.tick, now)
        yield None, partial(absent.overlooked, state, now)
        for number, call in [*state.calls.items()]:
            yield number, partial(calls.settle, state, call, now)

    def _rest(self, now: float) -> list[Effect]:
        self._limits.tick(now)
        return []

    def _beacons(self, now: float) -> list[Effect]:
        state = self.state
        if now < state.beacon_at:
            return []
        state.beacon_at = now + state.timing.ping
        beacons = [self._beacon(model) for model in state.store]
        return [Broadcast(control_topic(b.model), b) for b in beacons if b.version]  # P16

    def freed(self) -> list[Effect]:
        """Say which memory is needed no more."""
        return self._freeing([])

    def close(self, now: float) -> list[Effect]:
        """Resolve every call that is still open, as it stands."""
        return calls.close(self.state, now)

    def known(self) -> PublisherView:
        """Return what any thread may know, which is so until the state is `stale` again."""
        state = self.state
        state.stale = False
        reached = [
            ReachableWorker(peer.name, frozenset(peer.hello.models), peer.shared)
            for peer in state.roster
            if peer.subscribed and peer.phase != "lost"
        ]
        return PublisherView(state.epoch, tuple(reached), state.crowded, state.malformed)

    def crowded(self, text: str, now: float) -> list[Effect]:
        """Say who was turned away before it could say who it is; empty: nobody lately."""
        return absent.crowd(self.state, text, now)

    def present(self, model: str | None) -> int:
        """Return how many workers are there, that want a model, if one is given."""
        live = (peer for peer in self.state.roster if not peer.lost)
        return sum(model is None or model in peer.hello.models for peer in live)

    def status(self, now: float) -> tuple[WorkerStatus, ...]:
        """Return who is there, and who runs which version."""
        return tuple(status_of(self.state, peer, now) for peer in self.state.roster)

    def status_of(self, name: str, now: float) -> WorkerStatus | None:
        """Return how things stand with one worker; None if there is none of that name."""
        peer = self.state.roster.by_name(name)
        return None if peer is None else status_of(self.state, peer, now)

    def _beacon(self, model: str) -> Beacon:
        versions = self.state.store.get(model)
        latest = versions.find(versions.latest.version) if versions and versions.latest else None
        return Beacon(model=model, epoch=self.state.epoch, version=latest.version if latest else 0)
