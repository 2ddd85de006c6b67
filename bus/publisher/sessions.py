"""Who is in: workers that join, come back, are lost, and leave; and which publisher comes first."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import msgspec

from ..effects import Notice, Send
from ..epochs import epoch_above
from ..limits import TICKET_SECONDS, Timing
from ..messages import (
    MAPPING,
    RENAMING,
    TICKET,
    UPSTREAM,
    Hello,
    Ping,
    Pong,
    Prepare,
    Refuse,
    Rekey,
    Rename,
    Running,
    Shared,
    Welcome,
)
from ..trust.grants import Grants
from ..units import span
from .effects import DropRevoked, Effect, Follow, Settled, Withdraw
from .giving import Giving
from .phases import WorkerEvent
from .publications import Publications
from .push import Pushes
from .roster import Peer, Roster
from .status import is_stuck, phase_of
from .store import Store

FAILURES_TOLD = 3  # of a worker that leaves: as many models as fit a line
REVOKED = "this publisher does not allow the key any more: ask whoever keeps its folder of keys"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a publisher says of itself.

    Attributes:
        data_endpoint: Where PUB is, as workers are told.
        shared: A segment by which workers find out that they are on the same host.
        age: Says for how many seconds it has been running; None: its epoch is final.
        secret: Draws tokens for words on data connections, or tickets for these; None: no worker is
            to say any there.
        keys: Says which group keys a worker is told; None: nothing is sealed.
        grants: What each key may do; None: there are no keys, and everybody may do everything.
        recorded: Says whether an epoch may be taken by now; None: at any time.
    """

    data_endpoint: str
    shared: Shared | None
    age: Callable[[], float] | None
    secret: Callable[[], str] | None
    keys: Callable[[Peer], list[str]] | None = None
    grants: Grants | None = None
    recorded: Callable[[int], bool] | None = None


class Sessions:
    """The sessions of one publisher.

    Args:
        introduction: What it says of itself.
        plausible: Tells whether a worker may run what it says it runs.
    """

    def __init__(
        self,
        introduction: Introduction,
        timing: Timing,
        roster: Roster,
        store: Store,
        publications: Publications,
        pushes: Pushes,
        giving: Giving,
        plausible: Callable[[str, Running], bool],
    ) -> None:
        self._introduction, self._age = introduction, introduction.age
        self._grants = introduction.grants
        self._timing, self._roster, self._store = timing, roster, store
        self._publications, self._absent = publications, publications.absent
        self._pushes, self._giving, self._plausible = pushes, giving, plausible
        self._prepared: dict[str, Prepare] = {}  # by model, until its first version is published
        self._renewed_at = -math.inf

    # Joining.

    def hello(self, identity: bytes, hello: Hello, now: float, key: str = "") -> list[Effect]:
        """Somebody wants to join; `key` is its public key, where there are keys."""  # P3
        effects: list[Effect] = []
        grant = self._grants.of(key) if self._grants is not None else None
        if grant is not None and not grant.fits(hello.name):  # K3
            text = f"its key is for the name {grant.name}; use that, or make a key for this one"
            return self._turn_away(identity, hello, "wrong-name", text, now)
        if grant is not None and grant.role == "observer":  # K4
            text = "an observer's key reads how things stand, and gets no weights"
            return self._turn_away(identity, hello, "not-allowed", text, now)
        if self._runs_another(hello):
            epoch = epoch_above(hello, None if self._age is None else self._age())
            if epoch is None:
                return self._turn_away(identity, hello, "stale-epoch", self._stale(hello), now)
            if now - self._renewed_at < self._timing.lost_after:
                return []  # it says hello again; whatever is said, workers start anew only so often
            recorded = self._introduction.recorded
            if recorded is not None and not recorded(epoch):  # P1
                return []  # it is by the time that it says hello again
            effects = self._renew(epoch, hello, now)
        other = self._roster.by_identity(identity)
        if other is not None and other.name != hello.name:
            effects += self.leave(other, "its connection has taken another name", now)
        return effects + self._admit(identity, hello, now, key)

    def _admit(self, identity: bytes, hello: Hello, now: float, key: str) -> list[Effect]:
        admission, peer = self._roster.admit(identity, hello, now, key)
        match admission:
            case "contested" if peer is not None and peer.phase == "away":
                lost = self._lose(peer, now, "contested", "its connection is closed")
                return lost + self._admit(identity, hello, now, key)
            case "contested" if peer is not None:
                return [Send(Ping(token=0), to=peer.identity)]
            case "taken" if peer is not None:
                return self._turn_away(identity, hello, "name-taken", _name_taken(peer), now)
            case "full":
                text = "the roster is full: stop some workers, or start another publisher"
                return self._turn_away(identity, hello, "limit", text, now)
            case _:
                assert peer is not None  # noqa: S101 - the other admissions have one
                return self._welcome(peer, admission, now)

    def _turn_away(
        self, identity: bytes, hello: Hello, code: str, text: str, now: float
    ) -> list[Effect]:
        """Refuse a worker; say so once, though it asks again and again.

        Of a full roster all names are news, and there may be any number: the log counts them.
        """
        effects: list[Effect] = [Send(Refuse(code=code, text=text), to=identity)]
        told = f"worker {hello.name} is refused ({code}): {text}"
        news = self._absent.note(hello.name, hello.models, code, told, now)
        full = code == "limit"
        if full:
            effects.append(Notice("full", told, hello.name, warning=True))
        if news:
            effects.append(Notice("refused", told, hello.name, warning=not full))
        return effects

    def _welcome(self, peer: Peer, admission: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        peer.subscribed, peer.contested_at, peer.mute_at = False, None, math.inf
        peer.rekeyed = False
        self._absent.forget(peer.name)
        if admission != "known":
            effects.append(Notice("joined", f"worker {peer.name} joined", peer.name))
        peer.incoming.clear()
        peer.running = {
            model: running
            for model, running in peer.hello.models.items()
            if running is not None and self._plausible(model, running)
        }
        effects += self._back(peer, now)
        for model in peer.running:
            epoch, version = peer.runs(model)
            if epoch == self._store.epoch:
                self._store[model].left(peer.name, older_than=version + 1)
                effects += self._publications.arrived(peer, model, now)
        welcome = Welcome(
            epoch=self._store.epoch,
            data=self._introduction.data_endpoint,
            ping_ms=max(1, round(self._timing.ping * 1000)),
            lost_ms=max(2, round(self._timing.lost_after * 1000)),
            models=self._kept(peer),
            shared=self._introduction.shared,
            age_ms=0 if self._age is None else math.floor(self._age() * 1000),
            features=self._features(peer, now),
            keys=self._keys(peer),
        )
        prepared = self._prepared.values()
        told = [e for each in prepared for e in self._tell_prepared(peer, each)]
        follow = Follow(peer.hello.pid)
        return [Send(welcome, to=peer.identity), follow, *self._rename(peer), *told, *effects]

    def _features(self, peer: Peer, now: float) -> list[str]:
        """Give a worker a ticket for its data connection, where there are keys.

        Else let one that can say `applied` there, by a token of its own; not both, since whoever
        sees that connection could say it, too. (K9, P22)
        """
        secret = self._introduction.secret
        if self._grants is not None and secret is not None:
            self._roster.ticket(peer, secret(), now)
            return [f"{TICKET}.{peer.ticket}"]
        secret = None if self._introduction.keys is not None else secret
        if secret is None or UPSTREAM not in peer.hello.features:
            return []
        if not peer.token:
            self._roster.give(peer, secret())
        return [f"{UPSTREAM}.{peer.token}"]

    def _keys(self, peer: Peer) -> list[str]:
        keys = self._introduction.keys
        return [] if keys is None else keys(peer)

    def rekeyed(self) -> list[Effect]:
        """Have everybody who is there say something, which other group keys are the answer to.

        Nobody is told a secret unasked: a connection may be another's by the time that it goes out.
        """  # E6
        for peer in self._roster:
            peer.rekeyed = True
        return [Send(Ping(token=0), to=peer.identity) for peer in self._roster if not peer.lost]

    def tell_keys(self, peer: Peer) -> list[Effect]:
        """A worker has said something on its own connection: tell it group keys that are news."""
        keys = self._keys(peer) if peer.rekeyed else []
        peer.rekeyed = False
        return [Send(Rekey(epoch=self._store.epoch, keys=keys), to=peer.identity)] if keys else []

    def _latest(self, peer: Peer) -> dict[str, int]:
        """Return the newest version that there is for a worker, of each of its models."""
        latest: dict[str, int] = {}
        for model in peer.hello.models:
            versions = self._store.get(model)
            version = versions.latest_for(peer.name) if versions else None
            if version is not None:
                latest[model] = version.version
        return latest

    def _kept(self, peer: Peer) -> dict[str, int]:
        """Return the same, for one that was not there: what it will ask for is kept until then.

        Else whoever publishes next may have begun to write over it when the question comes.
        """  # P9
        for model in peer.hello.models:
            versions = self._store.get(model)
            version = versions.latest_for(peer.name) if versions else None
            if versions is None or version is None or peer.runs(model) >= version.key:
                continue
            version = versions.get_latest_for(peer.name)
            if version is not None and peer.runs(model) < version.key:
                version.receivers.add(peer.name)
        return self._latest(peer)

    def _rename(self, peer: Peer) -> list[Effect]:
        """Tell a worker which of the versions that it runs are the latest under another name."""
        effects: list[Effect] = []
        for model, running in peer.running.items() if RENAMING in peer.hello.features else ():
            versions = self._store.get(model)
            version = versions.latest_for(peer.name) if versions else None
            if version is None or version.key <= peer.runs(model):
                continue
            unproven = not running.digest and self._publications.must_hash(model, version.version)
            if version.is_known_as(running) and not unproven:  # P21, S7
                epoch, number = version.key
                rename = Rename(
                    model=model,
                    epoch=epoch,
                    version=number,
                    was=running,
                    metadata=dict(version.metadata),
                )
                effects.append(Send(rename, to=peer.identity))
        return effects

    # Memory that waits for a first version.

    def prepare(self, model: str, shared: Shared, nbytes: int) -> list[Effect]:
        """Tell workers of this host where the first version of a model will lie."""
        prepared = Prepare(model=model, epoch=self._store.epoch, nbytes=nbytes, shared=shared)
        self._prepared[model] = prepared
        here = [peer for peer in self._roster if peer.shared]
        return [effect for peer in here for effect in self._tell_prepared(peer, prepared)]

    def published(self, model: str) -> None:
        """A version lies there now."""
        self._prepared.pop(model, None)

    def _tell_prepared(self, peer: Peer, prepared: Prepare) -> list[Effect]:
        """Tell a worker that understands it where the first version of its model will lie."""
        wanted = prepared.model in peer.hello.models and MAPPING in peer.hello.features
        return [Send(prepared, to=peer.identity)] if wanted and not peer.lost else []

    # Which publisher comes first.

    def _runs_another(self, hello: Hello) -> bool:
        """Return whether a worker runs weights of a publisher that may be later than this one."""
        return hello.epoch > self._store.epoch or any(
            running is not None
            and running.epoch == self._store.epoch
            and not self._had(model, running)
            for model, running in hello.models.items()
        )

    def _had(self, model: str, running: Running) -> bool:
        versions = self._store.get(model)
        return versions is not None and versions.had(running.version)

    def _stale(self, hello: Hello) -> str:
        chosen = (
            "its epoch was chosen, and stays"
            if self._age is None
            else "it did not start after that"
        )
        return (
            f"this publisher is of epoch {self._store.epoch}, but {hello.name} runs weights of "
            f"epoch {hello.epoch}, from another publisher, and {chosen}: if the other one is the "
            "newer, stop this one; if not, stop the other and restart this one, which then takes "
            "over"
        )

    def _renew(self, epoch: int, hello: Hello, now: float) -> list[Effect]:
        """Take a later epoch. For workers it is as if the publisher had restarted."""
        text = (
            f"epoch {self._store.epoch} becomes {epoch}: {hello.name} runs weights of epoch "
            f"{hello.epoch}, whose publisher started before this one; one of two clocks is wrong"
        )
        effects: list[Effect] = [Notice("renewed", text, warning=True)]
        for versions in self._store:
            gone = self._publications.give_up(
                versions.pending, "its publisher takes a new epoch", now
            )
            effects += [*gone, Withdraw(versions.model), *versions.renew(epoch)]
            effects += [Settled(versions.latest)] if versions.latest else []
            self._pushes.end(versions.model)
        self._store.epoch, self._renewed_at = epoch, now
        self._publications.renewed(epoch)
        self._prepared = {
            model: msgspec.structs.replace(prepared, epoch=epoch)
            for model, prepared in self._prepared.items()
        }
        for peer in self._roster:
            peer.subscribed = False
            peer.incoming.clear()
        return effects + [  # of another epoch than theirs: they say hello
            Send(Pong(epoch=epoch), to=peer.identity) for peer in self._roster if not peer.lost
        ]

    # Staying and leaving.

    def ping(self, peer: Peer, ping: Ping) -> list[Effect]:
        """A worker asks for a sign of life."""  # P17
        peer.subscribed, peer.shared = ping.subscribed, ping.shared
        pong = Pong(token=ping.token, epoch=self._store.epoch, models=self._latest(peer))
        return [Send(pong, to=peer.identity)]

    def heard(self, peer: Peer, now: float) -> list[Effect]:
        """A worker has said something."""
        lost, mute = peer.phase == "lost", now >= peer.mute_at
        peer.heard_at, peer.mute_at = now, math.inf
        if lost or mute:
            self._kept(peer)
        return self._back(peer, now) if lost else []

    def _back(self, peer: Peer, now: float) -> list[Effect]:
        """A worker is there, and may have missed what others were told."""
        effects: list[Effect] = []
        if peer.lost:
            peer.move("spoke")
            effects.append(Notice("back", f"worker {peer.name} answers again", peer.name))
        for version in self._publications.returned(peer, now):
            effects += self._giving.describe(peer, version)
        return effects

    def unreachable(self, identity: bytes, now: float, ended: str = "") -> list[Effect]:
        """A connection is closed, and if `ended` says so its worker's process has ended, too.

        Else it may dial again, which takes a moment, unless another wants its name.
        """  # P18
        peer = self._roster.by_identity(identity)
        if peer is None:
            return []
        if peer.lost:  # it was silent: calls that wait for it need not
            return self._publications.lost(peer, now, gone=True) if ended else []
        if ended:
            return self._lose(peer, now, "ended", ended)
        if peer.phase == "here":
            peer.closed_at = now
        peer.move("closed")
        if peer.contested_at is not None:
            return self._lose(peer, now, "contested", "its connection is closed")
        return []

    def tick(self, now: float) -> list[Effect]:
        """Look for workers that are silent, or stuck."""  # P18
        effects: list[Effect] = []
        for peer in self._roster.silent(now):
            effects += self._lose(peer, now, "silent", f"silent for {span(now - peer.heard_at)}")
        for peer in self._roster.gone(now, self._timing.gone_after):
            why = f"its connection is closed, and it made no other in {self._timing.gone_after:g} s"
            effects += self._lose(peer, now, "overdue", why)
        effects += [self._moved(p, now) for p in self._roster if self._turned(p, now)]
        self._forget_mute(now)
        return effects

    def _forget_mute(self, now: float) -> None:
        """Keep nothing for those who say nothing but what they were heard to be at."""  # P9
        for peer in self._roster:
            if not peer.lost and now >= peer.mute_at:
                for versions in self._store:
                    incoming = peer.incoming.get(versions.model)
                    versions.left_all(peer.name, but=incoming.version if incoming else 0)

    def _lose(self, peer: Peer, now: float, event: WorkerEvent, why: str) -> list[Effect]:
        """An event by which a worker is lost; of one that is only silent, it may be there."""
        phases = self._doing(peer, now)
        peer.why = why + (f" while {phases}" if phases else "")
        peer.move(event)
        peer.stuck = False
        self._forget(peer)
        notice = Notice("lost", f"worker {peer.name} is lost: {peer.why}", peer.name, warning=True)
        return [notice, *self._publications.lost(peer, now, gone=event != "silent")]

    def _turned(self, peer: Peer, now: float) -> bool:
        """Return whether a worker is stuck and was not, or the other way round."""
        return not peer.lost and peer.stuck != is_stuck(peer, self._timing, now)

    def _moved(self, peer: Peer, now: float) -> Notice:
        peer.stuck = not peer.stuck
        if not peer.stuck:
            return Notice("back", f"worker {peer.name} moves again", peer.name)
        return Notice("stuck", f"worker {peer.name} is stuck: {self._doing(peer, now)}", peer.name)

    def _doing(self, peer: Peer, now: float) -> str:
        return "; ".join(
            phase_of(m, i, self._store, self._timing, now) for m, i in peer.incoming.items()
        )

    def _forget(self, peer: Peer) -> None:
        """A worker is no longer there: nothing is kept for its sake."""
        peer.subscribed = False
        for versions in self._store:
            versions.forget_worker(peer.name)
        peer.incoming.clear()

    def leave(self, peer: Peer, why: str, now: float) -> list[Effect]:
        """A worker leaves in order: nobody waits for it."""
        self._forget(peer)
        self._roster.remove(peer)
        text = f"worker {peer.name} has left: {why}"
        failed = ((m, v, r) for m, (v, r) in peer.seen.failed.items() if v > peer.runs(m)[1])
        for model, version, reason in islice(failed, FAILURES_TOLD):
            text += f"; it had failed version {version} of {model}: {reason}"
        self._absent.note(peer.name, peer.hello.models, "left", text, now)
        return [Notice("left", text, peer.name), *self._publications.move(peer, "left", now)]

    # Keys.

    def redeem(self, ticket: str, now: float) -> tuple[str, str] | None:
        """Return whose ticket this is, by name and key, for the only time; None: nobody's."""  # K6
        peer = self._roster.redeem(ticket)
        return (peer.name, peer.key) if peer and now - peer.ticket_at < TICKET_SECONDS else None

    def revoke(self, now: float) -> list[Effect]:
        """What keys may do has changed: send those away that may not be here any more."""  # K8
        effects: list[Effect] = []
        for peer in list(self._roster):
            grant = self._grants.of(peer.key) if self._grants is not None else None
            if grant is None or not grant.fits(peer.name) or grant.role != "worker":
                effects.append(Send(Refuse(code="revoked", text=REVOKED), to=peer.identity))
                effects += self.leave(peer, "its key was revoked", now)
        return [*effects, DropRevoked()]


def _name_taken(peer: Peer) -> str:
    return (
        f"the name {peer.name!r} belongs to a living worker (host {peer.hello.host or 'unknown'}, "
        f"process {peer.hello.pid}): give this one another name, or stop that one"
    )
