"""The publisher's behaviour, without sockets, threads or clocks.

Feed it what arrives (`receive`), what the user wants (`publish`) and the passing of time (`tick`);
it answers with effects. `push` gives the next chunks while `pushes.ready` has topics of some.

    hello ──> welcome                          the worker is on the roster       sessions.py
    publish ──> announce, chunk..., end        pushed; or announce and end, to some workers alone
    fetch ──> chunk...  | announce, end | refuse(gone)                           giving.py
    staged ──> commit | abort                  once decided                      publications.py
    applied | staged | failed                  move the publish along            reports.py
    silence ──> lost

It owns the memory of its versions: nobody writes there before it said `Release` or `Lend`. Nothing
here assumes that the publisher is a trainer or that a worker is a leaf.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from ..effects import Notice, Send
from ..errors import ProtocolError
from ..limits import WHOLE_BYTES_MAX, Timing
from ..messages import (
    DELTA,
    TOKEN_BYTES,
    Announce,
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
from ..trust.grants import Grant, Grants
from .absent import Absent, Oversights
from .effects import Broadcast, BroadcastWhole, Effect, HangUp, Resolve, Settled, Withdraw
from .giving import Giving
from .observers import Observers
from .offers import announcement
from .patience import DEAR, Patience, cost_of
from .publication import Publication
from .publications import Publications
from .push import Pushes
from .reports import Reports
from .roster import Peer, Roster
from .sessions import REVOKED, Introduction, Sessions
from .status import WorkerStatus, status_of
from .store import Store
from .verifying import Comparison
from .version import Snapshot, Version, VersionPatch


class PublisherMachine:
    """One publisher.

    Args:
        epoch: Its incarnation; workers refuse a lower one than they have applied from.
        age: Says for how many seconds it has been running, by a clock that never stops; with it the
            epoch may be raised where that is sound. None: the epoch is final.
        data_endpoint: Where PUB is, as workers are told.
        timing: How long it waits.
        shared: A segment by which workers find out that they are on the same host.
        keys: Says which group keys a worker is told, where its connection is encrypted; None: what
            is published goes in the clear.
        secret: Draws 32 hexadecimal digits that nobody can guess; with it workers that can may say
            `applied` on their data connection. Where there are keys, it draws tickets for that.
        grants: What each key may do; None: there are no keys.
        clock: Tells observers the seconds since 1970; None: they are not told.
        recorded: Says whether an epoch may be taken by now, since whoever comes after this one
            will know of it; it must not wait. None: at any time.
    """

    def __init__(
        self,
        epoch: int,
        data_endpoint: str,
        timing: Timing | None = None,
        shared: Shared | None = None,
        age: Callable[[], float] | None = None,
        secret: Callable[[], str] | None = None,
        keys: Callable[[Peer], list[str]] | None = None,
        grants: Grants | None = None,
        clock: Callable[[], float] | None = None,
        recorded: Callable[[int], bool] | None = None,
    ) -> None:
        self.timing = timing = timing or Timing()
        self.roster = roster = Roster(timing.lost_after)
        self.store = store = Store(epoch)
        self.malformed = 0  # messages dropped because they broke the protocol
        self._patience = Patience(timing)
        self._publications = calls = Publications(roster, store, timing, Absent())
        self.pushes = pushes = Pushes(store, timing.quiet)
        self._giving = giving = Giving(store, calls)
        self._reports = Reports(roster, store, calls, pushes)
        introduction = Introduction(data_endpoint, shared, age, secret, keys, grants, recorded)
        self._grants = grants
        plausible = self._reports.plausible
        self._sessions = Sessions(
            introduction, timing, roster, store, calls, pushes, giving, plausible
        )
        self.observers = Observers(roster, store, timing, clock)
        self._oversights = Oversights(roster, store, timing, calls.told)
        self._beacon_at = 0.0

    @property
    def epoch(self) -> int:
        """Its incarnation."""
        return self.store.epoch

    def _freeing(self, effects: list[Effect]) -> list[Effect]:
        """Let memory go before calls are answered: whoever is may publish again at once."""
        freed = self.store.freed()
        if not freed:
            return effects
        others, answers = list[Effect](), list[Effect]()
        for effect in effects:
            (answers if isinstance(effect, Resolve) else others).append(effect)
        return others + freed + answers

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
        peer = self.roster.by_identity(identity)
        if peer is not None and peer.key != key:  # K10: whoever dials may choose its identity
            return [HangUp()]
        if peer is None and not self._patience.has_time(now):
            return [] if self._patience.bears(identity, DEAR, nbytes, now) else [HangUp()]
        grant = self._grants.of(key) if self._grants is not None else None
        if self._grants is not None and grant is None:  # K8
            if not self._patience.bears(identity, DEAR, nbytes, now):
                return [HangUp()]
            return [Send(Refuse(code="revoked", text=REVOKED), to=identity)]
        try:
            message = to_publisher(frames)
        except ProtocolError as error:  # P5
            self.malformed += 1
            if not self._patience.bears(identity, DEAR, nbytes, now):
                return [HangUp()]
            return [Send(Refuse(code=error.code, text=str(error)), to=identity)]
        cost = cost_of(message, known=peer is not None)
        if not self._patience.bears(identity, cost, nbytes, now):
            return [HangUp()]
        if isinstance(message, Observe | Verify):  # P23, P24, K4
            return self.observers.asked(identity, message, grant, now)
        if peer is not None and not isinstance(message, Hello | Bye):
            if peer.phase == "away":  # it has called itself the same on another connection
                peer.move("spoke")
            effects = self._sessions.heard(peer, now) + self._sessions.tell_keys(peer)
            effects += self._heed(peer, message, now)
            self.observers.heard(peer, message, now)
            return self._freeing(effects)
        if isinstance(message, Hello):
            return self._freeing(self._sessions.hello(identity, message, now, key))
        if isinstance(message, Bye):
            gone = [] if peer is None else self._sessions.leave(peer, "it said goodbye", now)
            return self._freeing(gone)
        text = "say hello first: this publisher does not know this connection"
        return [Send(Refuse(code="unknown-worker", text=text), to=identity)]  # P4

    def receive_word(self, word: bytes, now: float) -> list[Effect] | None:
        """Take what somebody said on a data connection; None if it is no worker's word. (P22)

        It may be late, or doubled: all of it is said again on the control channel.
        """
        token, header = word[:TOKEN_BYTES], word[TOKEN_BYTES:]
        peer = self.roster.by_token(token.decode("latin1"))
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
        effects = self._sessions.heard(peer, now) + self._reports.applied(peer, message, now)
        self.observers.heard(peer, message, now)
        return self._freeing(effects)

    def _heed(self, peer: Peer, message: Message, now: float) -> list[Effect]:
        match message:
            case Fetch():
                return self._giving.fetch(peer, message, now)
            case Progress():
                return self._reports.progress(peer, message, now)
            case Staged():
                return self._reports.staged(peer, message, now)
            case Applied():
                peer.torn.discard(message.model)
                return self._reports.applied(peer, message, now)
            case Failed():
                return self._reports.failed(peer, message, now)
            case Ping():
                return self._sessions.ping(peer, message)
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
        return self._freeing(self._sessions.unreachable(identity, now, ended))

    def subscribed(self, topic: bytes) -> Beacon | None:
        """Somebody has subscribed: what to tell it at once, so that it knows it is heard."""
        model = model_of(topic)
        return self._beacon(model) if model is not None else None

    # Keys.

    def redeem(self, ticket: str, now: float) -> tuple[str, str] | None:
        """Return the worker, by name and key, whose ticket somebody has shown; None: nobody's."""
        return self._sessions.redeem(ticket, now)

    def grant(self, by_key: Mapping[str, Grant], now: float) -> list[Effect]:
        """Let these keys in from now on, and no others."""
        if self._grants is None or not self._grants.replace(by_key):
            return []
        return self._freeing(self._sessions.revoke(now))

    # What the user wants.

    def offer(self, version: Version) -> list[Effect]:
        """Have a version of an earlier publisher as the latest, before anybody is there."""
        versions = self.store[version.model]
        effects = versions.number(version, self.epoch)
        versions.settle(version, None)
        return self._freeing(effects)

    def publish(self, publication: Publication, now: float) -> list[Effect]:
        """Publish a version: to every worker that has the model, or to some by name.

        Raises:
            UnknownWorkerError: A name was never on the roster; nothing was published.
        """
        version, workers = publication.version, publication.workers
        peers = self.roster.targets(version.model, workers)
        versions = self.store[version.model]
        effects = versions.number(version, self.store.epoch)
        if versions.pending is not None:
            why = "superseded by a newer publish"
            effects += self._publications.give_up(versions.pending, why, now)
        self._sessions.published(version.model)
        self.observers.published(version, now)
        publication.aim([p.name for p in peers])
        for peer in peers:
            if peer.phase == "lost":
                publication.move(peer.name, "lost", now, "it was lost before the publish")
                continue
            peer.mute_at = min(peer.mute_at, now + self.timing.quiet)
            if now < peer.mute_at:
                version.receivers.add(peer.name)
        if publication.commit == "together":
            versions.await_commit(version)
        else:
            versions.settle(version, None if workers is None else frozenset(workers))
            if workers is None:
                versions.supersede(version, peers)
                effects.append(Settled(version))
        effects += self._announce(publication, peers, now)
        if publication.hash and not version.digest:  # P12: it must be known before it is gone
            effects += self.store.hash(version)
        self._publications.add(publication)
        return self._freeing(effects + self._publications.settle(publication, now))

    def _announce(self, publication: Publication, peers: list[Peer], now: float) -> list[Effect]:
        """Say that a version is there: to all, or to each that would not hear that."""  # P6
        version, effects = publication.version, list[Effect]()
        announce = announcement(version, publication)
        alone = peers
        if publication.workers is None:
            alone, push, patch = list[Peer](), False, False
            for peer in peers:
                if not peer.subscribed:
                    alone.append(peer)
                elif not (peer.shared and version.shared):  # S9
                    taken = _patch_for(peer, version) if version.patches else None
                    push = push or taken is None
                    patch = patch or (taken is not None and taken is version.patches[0])
            effects.append(Withdraw(version.model))
            effects.append(self._broadcast(version, announce, now, push=push))
            if patch:  # D6
                self.pushes.begin(version.patches[0], now)
        for peer in alone:
            if not peer.lost:
                effects.append(Send(announce, to=peer.identity))
        return effects

    def _broadcast(
        self, version: Version, announce: Announce, now: float, *, push: bool
    ) -> Broadcast | BroadcastWhole:
        """Announce a version to all; begin to push it, unless it is so small that it goes along."""
        versions = self.store[version.model]
        self.pushes.end(version.model)
        known = version.layout.id == versions.announced_layout
        versions.announced_layout = version.layout.id
        small = version.plan.count == 1 and version.layout.nbytes <= WHOLE_BYTES_MAX
        if push and known and small and version.receivers:  # P7
            return BroadcastWhole(version, announce)
        if push:
            self.pushes.begin(version, now)
        return Broadcast(
            control_topic(version.model), announce, None if known else version.layout.header
        )

    def prepare(self, model: str, shared: Shared, nbytes: int) -> list[Effect]:
        """Tell workers of this host where the first version of a model will lie."""
        return self._sessions.prepare(model, shared, nbytes)

    def make_room(
        self, model: str, among: Collection[Snapshot], *, replaces_latest: bool
    ) -> list[Effect]:
        """Give up one of these versions of a model, if one may be, for another.

        Args:
            model: Its name.
            among: What lies in memory that would do.
            replaces_latest: The other one is for every worker and needs no commit.
        """
        versions = self.store.get(model)
        if versions is not None:
            versions.give_up(among, replaces_latest=replaces_latest)
        return self._freeing([])

    # What the shell has done.

    def hashed(self, version: Version, now: float) -> list[Effect]:
        """All chunks of a version are hashed, unless it is gone."""
        if version.gone:
            return []
        self.store.hashed(version)
        return self._freeing(self._reports.hashed(version, now))

    def compared(self, comparison: Comparison, _now: float) -> list[Effect]:
        """What a worker has was compared with its version."""
        effects = self.observers.checks.compared(comparison)
        self.store[comparison.version.model].changed = True  # it may be lent again
        return self._freeing(effects)

    def rekeyed(self) -> list[Effect]:
        """Tell workers the group keys that are in force now, once they say something."""
        return self._sessions.rekeyed()

    def unshared(self, version: Version) -> None:
        """Workers cannot read a version by its new number; they fetch it instead."""
        version.shared = None

    # Pushing.

    def push(self, now: float, topics: Collection[bytes] | None = None) -> list[Effect]:
        """Return the next chunks to publish, of some topics alone if they are given."""
        return self._freeing(self.pushes.step(now, topics))

    # Time.

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: beacons, lost workers, deadlines."""
        self._patience.tick(now)
        effects = self._sessions.tick(now)
        if now >= self._beacon_at:
            self._beacon_at = now + self.timing.ping
            beacons = [self._beacon(versions.model) for versions in self.store]
            effects += [Broadcast(control_topic(b.model), b) for b in beacons if b.version]  # P16
        effects += self.pushes.step(now) + self.observers.checks.tick(now)
        effects += self._oversights.tick(now)
        return self._freeing(effects + self._publications.settle_all(now))

    def close(self, now: float) -> list[Effect]:
        """Resolve every call that is still open, as it stands."""
        return self._publications.close(now)

    @property
    def busy(self) -> bool:
        """Whether a publish is under way. Any thread may ask."""
        return self._publications.any_open

    def sends(self, model: str, workers: Collection[str] | None, *, shared: bool) -> bool:
        """Return whether a version for these workers would be sent over the network. (P7, S9)

        `shared`: it lies in shared memory. Any thread may ask: whoever is about to copy a version
        hashes it as well then, in the same pass. What nobody foresaw is hashed when it is sent.
        """
        return any(
            p.subscribed and p.phase != "lost" and not (shared and p.shared)
            for p in self.roster.everybody()
            if model in p.hello.models and (workers is None or p.name in workers)
        )

    def will_send(self, publication: Publication) -> bool:
        """Return whether what is about to be published would be sent over the network."""
        version = publication.version
        shared = version.shared is not None
        return self.sends(version.model, publication.workers, shared=shared)

    def crowded(self, text: str, now: float) -> list[Effect]:
        """Say who was turned away before it could say who it is; empty: nobody lately."""
        news = self._publications.absent.crowd(text, now)
        return [Notice("crowded", text, warning=True)] if news else []

    @property
    def turned_away(self) -> str:
        """What was said of that last. Any thread may ask."""
        return self._publications.absent.crowded

    def present(self, model: str | None) -> int:
        """Return how many workers are there, that want a model, if one is given."""
        live = (peer for peer in self.roster if not peer.lost)
        return sum(model is None or model in peer.hello.models for peer in live)

    def status(self, now: float) -> tuple[WorkerStatus, ...]:
        """Return who is there, and who runs which version."""
        return tuple(status_of(peer, self.store, self.timing, now) for peer in self.roster)

    def status_of(self, name: str, now: float) -> WorkerStatus | None:
        """Return how things stand with one worker; None if there is none of that name."""
        peer = self.roster.by_name(name)
        return None if peer is None else status_of(peer, self.store, self.timing, now)

    def _beacon(self, model: str) -> Beacon:
        versions = self.store.get(model)
        latest = versions.find(versions.latest.version) if versions and versions.latest else None
        return Beacon(model=model, epoch=self.epoch, version=latest.version if latest else 0)


def _patch_for(peer: Peer, version: Version) -> VersionPatch | None:
    """Return the patch by which a version can come to a worker, if there is one."""
    takes = DELTA in peer.hello.features
    return version.patch_on(peer.running.get(version.model)) if takes else None
