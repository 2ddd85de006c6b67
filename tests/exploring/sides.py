"""The two kinds of processes of a small world: a machine, and whoever uses it.

Each is told of one event at a time, and says what it does: words for the network, and what its
invariants and the world's are about. Bytes of a version are its label, four times over; of one that
may come as a patch, which must be smaller than all of it, its label and zeros, two times over.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from weightbus.bus.effects import (
    Connect,
    Decode,
    Effect,
    Ready,
    Redial,
    Refused,
    Rejected,
    Renamed,
    Send,
    Subscribe,
)
from weightbus.bus.headers import encode
from weightbus.bus.limits import BUFFERS_MAX, Timing
from weightbus.bus.messages import DELTA, RENAMING, Applied, Hello
from weightbus.bus.net.copier import decoded
from weightbus.bus.publisher.effects import Broadcast, HangUp, Hash, Resolve, Settled
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import OfferedPatch, Version, VersionOffer
from weightbus.bus.staged import Patching, StagedVersion
from weightbus.bus.worker.events import Decoded, Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.version_store import IN_MEMORY
from weightbus.codecs.delta.encoding import encode as encode_patch
from weightbus.codecs.layout import Layout
from weightbus.python_client.settings import BASES
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform

MODEL = "a"
NBYTES = 4  # of a version: one chunk
PATCHED_CHUNK = 256  # bytes of each of the two chunks of a version that may come as a patch, of one
LAYOUT = Layout.plan([("w", "U8", (NBYTES,))])
PATCHED_LAYOUT = Layout.plan([("w", "U8", (2 * PATCHED_CHUNK,))])
TORN = -1  # the label of a model that holds parts of two versions
NOTHING = 0  # that of one in which no version is yet

Did = tuple[Any, ...]
Event = tuple[Any, ...]
Key = tuple[int, int]


class Ticks(Timing):
    """Times so short that every timer ends within a few ticks: the world decides when those are."""

    def __init__(self) -> None:
        super().__init__()
        self.ping = self.hello_retry = self.quiet = self.report = self.patience = 1.0
        self.lost_after = self.patience_max = 2.0
        self.deaf_after = self.stuck_after = math.inf


TIMING = Ticks()


class Unlimited:
    """No rate limits: how often the workers of a small world send says nothing of floods."""

    def allow_unknown(self, _now: float) -> bool:
        return True

    def allow(self, _identity: bytes, _cost: int, _nbytes: int, _now: float) -> bool:
        return True

    def tick(self, _now: float) -> None:
        pass


def takes_all(_model: str, _layout: Layout) -> str:
    """Accept every layout."""
    return ""


def label_of(data: Any) -> int:
    """Return the label of a version's bytes; TORN if they are of two."""
    step = 1 if len(data) == NBYTES else PATCHED_CHUNK
    found = {int(byte) for byte in data[::step]}
    alone = np.count_nonzero(data[::step]) == np.count_nonzero(data)
    return found.pop() if len(found) == 1 and alone else TORN


@cache
def bytes_of(label: int, *, patched: bool) -> bytes:
    """Return the bytes of a version."""
    return bytes([label, *bytes(PATCHED_CHUNK - 1)]) * 2 if patched else bytes([label]) * NBYTES


@cache
def patch_of(base: int, label: int) -> bytes:
    """Return the patch from one version to another."""
    old, new = (bytes_of(each, patched=True) for each in (base, label))
    patch = encode_patch(PATCHED_LAYOUT, old, new, chunk_bytes=PATCHED_CHUNK)
    assert len(patch) <= PATCHED_CHUNK, "a patch of more than one chunk"
    return patch


class WorkerSide:
    """A worker and its user, who may apply a version or fail to."""

    def __init__(self, name: str, incarnation: int, *, renaming: bool, patched: bool) -> None:
        features = (RENAMING,) * renaming + (DELTA,) * patched
        identity = Hello(name=name, instance=f"{incarnation:032x}", models={}, features=[*features])
        self.machine = WorkerMachine(identity, [MODEL], takes_all, timing=TIMING)
        self.machine._whole = bytearray()  # noqa: SLF001 # pyright: ignore - for leases alone
        self.label = NOTHING  # of what lies in the model
        self.ready: StagedVersion | None = None
        self.applying: StagedVersion | None = None
        self.patches: list[Patching] = []  # that are being decoded
        self.topics: frozenset[bytes] = frozenset()
        self.refusal = ""

    @property
    def follower(self) -> Any:
        """Its only model."""
        return self.machine.followers[MODEL]

    @property
    def runs(self) -> Key:
        """The version that it runs; (0, 0): none."""
        running = self.follower.running
        return (running.epoch, running.version) if running else (0, 0)

    def act(self, event: Event, now: float) -> list[Did]:
        """Take an event."""
        did: list[Did] = []
        match event:
            case ("hear", frames):
                self.do(self.machine.receive(frames, now), did, now)
            case ("hear-published", frames):
                self.do(self.machine.receive_published(frames, now), did, now)
            case ("changed",):
                self.machine.changed(now)
            case ("tick", up):
                self.do(self.machine.tick(now), did, now)
                self.do(self.machine.connected(now) if up else [], did, now)
            case ("take",):
                self.applying, self.ready = self.ready, None
                self.do(self.report(self.applying, "taken", now), did, now)
            case ("apply", outcome):
                self.apply(outcome, did, now)
            case ("decode", fault):
                job = self.patches.pop(0)
                found = decoded(job).fault  # in no time
                assert not (job.live and found), f"a sound patch: {found}"
                self.do(self.machine.happened(Decoded(job, fault or found), now), did, now)
            case _:
                raise AssertionError(event)
        return did

    def apply(self, outcome: Any, did: list[Did], now: float) -> None:
        staged, self.applying = self.applying, None
        assert staged is not None
        if outcome == "applied":
            assert staged.key > self.runs, f"it went back from {self.runs} to {staged.key}"
            self.label = label_of(staged.data)
            did.append(("applied", staged.key, self.label))
        elif outcome == "torn":
            self.label = TORN
        self.do(self.report(staged, outcome, now), did, now)

    def report(self, staged: StagedVersion | None, what: Any, now: float) -> list[Effect]:
        assert staged is not None
        kept = staged.private_bytes if what == "applied" else None
        return self.machine.happened(Report(MODEL, staged.key, what, "no", bytes=kept), now)

    def do(self, effects: list[Effect], did: list[Did], now: float) -> None:
        for effect in done(self.machine, effects, now, takes=lambda n: np.zeros(n, np.uint8)):
            match effect:
                case Send(message):
                    if isinstance(message, Applied):
                        did.append(("claims", (message.epoch, message.version), self.label))
                    if isinstance(message, Hello) and (was := message.models[MODEL]) is not None:
                        did.append(("claims", (was.epoch, was.version), self.label))
                    did.append(("say", encode(message)))
                case Redial():
                    did.append(("redial",))
                case Connect():
                    self.topics = frozenset()
                    did.append(("connect",))
                case Subscribe(topic, on):
                    if on != (topic in self.topics):
                        self.topics = self.topics ^ {topic}
                        did.append(("subscribe", topic, on))
                case Ready(staged):
                    older, self.ready = self.ready, staged
                    if older is not None:
                        self.do(self.report(older, "newer", now), did, now)
                case Renamed(_, epoch, version):
                    did.append(("applied", (epoch, version), self.label))
                case Decode(job):
                    self.patches.append(job)
                case Refused(code):
                    self.refusal = code
                case Rejected(_, epoch, version, code):
                    did.append(("rejected", (epoch, version), code))
                case _:
                    pass

    def check(self) -> None:
        """Look at it between two events."""
        holds = self.follower.versions
        held = [h for h in holds.all(*IN_MEMORY) if h.chunks is not None]
        free = holds._free  # noqa: SLF001
        assert len(held) <= BUFFERS_MAX, f"{len(held)} copies of a model are held"
        self.check_base()
        most = BUFFERS_MAX + (DELTA in self.machine.identity.features)
        own = holds.base is not None and holds.base.chunks is not None
        assert len(held) + len(free) + own <= most, f"{len(free)} buffers are kept for nobody"
        whole = self.label > 0
        assert whole == (self.runs != (0, 0)), f"it runs {self.runs}, its label is {self.label}"
        for each in holds.all("staged", "ready", "applying"):
            assert label_of(each.staged.data) > 0, f"{each.key} is torn"
        given = {s.key for s in (self.ready, self.applying) if s is not None}
        waiting = {h.key for h in holds.all("ready", "applying")}
        assert given == waiting, f"the user has {given}, the machine thinks {waiting}"

    def check_base(self) -> None:
        """What patches build on is what runs, or is needed for one that arrives."""
        base = self.follower.versions.base
        if base is not None and base.running == self.follower.running:
            assert label_of(base.data) == self.label, "what patches build on is not what runs"
        else:
            assert base is None or base.users, f"{base.running} is kept for nothing"


class Unasked:
    """Nobody has a worker's weights verified."""

    def tick(self, _now: float) -> list[Effect]:
        return []


class Unobserved:
    """Nobody looks on: nothing is kept for those who would."""

    checks = Unasked()
    until = -math.inf

    def heard(self, _peer: object, _message: object, _now: float) -> None:
        pass

    def published(self, _version: object, _now: float) -> None:
        pass


class PublisherSide:
    """A publisher and its trainer."""

    def __init__(self, epoch: int, *, patched: bool) -> None:
        self._patched = patched
        self._bases: tuple[int, ...] = ()  # labels of the versions that patches may build on
        self.machine = PublisherMachine(PublisherState(epoch, "tcp://p:1", TIMING))
        self.machine._limits = Unlimited()  # type: ignore[assignment]  # noqa: SLF001 # pyright: ignore
        self.machine.observers = Unobserved()  # type: ignore[assignment] # pyright: ignore

    def act(self, event: Event, now: float) -> list[Did]:
        """Take an event."""
        did: list[Did] = []
        match event:
            case ("hear", identity, frames):
                self.do(self.machine.receive(identity, frames, now), did, now)
            case ("tick",):
                self.do(self.machine.tick(now), did, now)
                late = [n for n, call in self.machine.state.calls.items() if now >= call.deadline]
                assert not late, f"{late} are open after their deadline"
            case ("unreachable", identity):
                self.do(self.machine.unreachable(identity, now), did, now)
            case ("subscribed", topic):
                beacon = self.machine.subscribed(topic)
                did += [("greet", topic, encode(beacon))] if beacon is not None else []
            case ("hashed",):
                for version in [v for v in self.versions if v.hashing]:
                    hash_all(version)
                    self.do(self.machine.hashed(version, now), did, now)
            case ("take",):
                for version in self.versions:
                    if version.reclaimable and isinstance(version.snapshot, PlainSnapshot):
                        version.snapshot.release()
            case ("withdraw",):
                for version in self.versions:
                    version.patches = ()
            case ("publish", label, commit, wait):
                self.publish(label, commit, wait, did, now)
            case ("offer", label, key):
                self.offer(label, key, did, now)
            case _:
                raise AssertionError(event)
        while self.machine.ready:
            self.do(self.machine.push(now), did, now)
        return did

    @property
    def versions(self) -> list[Version]:
        """The versions that it has."""
        return [version for versions in self.machine.state.store.values() for version in versions]

    @property
    def latest(self) -> Key:
        """The latest version for all; (0, 0): none."""
        versions = self.machine.state.store.get(MODEL)
        version = versions.latest if versions else None
        return version.key if version is not None else (0, 0)

    @property
    def open(self) -> bool:
        """Whether a call of publish is open."""
        return bool(self.machine.state.calls)

    @property
    def reclaimable(self) -> bool:
        """Whether the trainer may write over the latest version."""
        return any(v.reclaimable and v.snapshot.exists for v in self.versions)

    @property
    def hashing(self) -> bool:
        """Whether a version is being hashed."""
        return any(v.hashing for v in self.versions)

    @property
    def patches(self) -> bool:
        """Whether there are any."""
        return any(version.patches for version in self.versions)

    def made(self, label: int) -> VersionOffer:
        layout, chunk_bytes = (PATCHED_LAYOUT, PATCHED_CHUNK) if self._patched else (LAYOUT, NBYTES)
        snapshot = PlainSnapshot(bytes_of(label, patched=self._patched))
        return VersionOffer.of(MODEL, layout, chunk_bytes, snapshot)

    def patch(self, offer: VersionOffer, label: int) -> None:
        """Do as `python_client.publishing.models.Bases` does."""
        patch_candidates = self.machine.state.roster.patch_candidates(MODEL, None, shared=False)
        if not patch_candidates:
            self._bases = ()
            return
        known = {hash_all(self.made(base)): base for base in self._bases}
        hash_all(offer)
        runs = {
            t.running: known[t.running.digest]
            for t in patch_candidates
            if t.running is not None and t.running.digest in known
        }
        offer.patches = tuple(
            OfferedPatch(DELTA, running, patch_of(base, label)) for running, base in runs.items()
        )
        offer.keep, self._bases = True, (*self._bases, label)[-BASES:]

    def publish(self, label: int, commit: Any, wait: Any, did: list[Did], now: float) -> None:
        offer = self.made(label)
        if self._patched:
            self.patch(offer, label)
        terms = PublishTerms(wait=wait, commit=commit, timeout=2.0, grace=TIMING.lost_after)
        call, effects = self.machine.publish(label, offer, terms, now, now)
        did.append(("published", call.version.key, label))
        self.do(effects, did, now)

    def offer(self, label: int, key: Key, did: list[Did], now: float) -> None:
        offer = self.made(label)
        offer.chunks.fill(hash_all(self.made(label)))
        offer.names = frozenset({key})
        version, effects = self.machine.offer(offer)
        did.append(("published", version.key, label))
        self.do(effects, did, now)

    def do(self, effects: list[PublisherEffect], did: list[Did], now: float) -> None:
        for effect in effects:
            if not isinstance(effect, Hash):  # an event of its own
                for each in perform(self.machine, [effect], now):
                    self.say(each, did)

    def say(self, effect: PublisherEffect, did: list[Did]) -> None:
        match effect:
            case Send(message, payload, to):
                payloads = () if payload is None else (bytes(payload),)
                did.append(("tell", to, (encode(message), *payloads)))
            case Broadcast(topic, message, payload):
                payloads = () if payload is None else (bytes(payload),)
                did.append(("tell-all", topic, (topic, encode(message), *payloads)))
            case Resolve(_, receipt, achieved):
                states = tuple((w.name, w.state) for w in receipt.workers.values())
                key = (receipt.epoch, receipt.version)
                did.append(("resolved", key, achieved, states))
            case Settled(version):
                did.append(("settled", version.key))
            case HangUp():
                raise AssertionError("a worker was taken for a flood")
            case _:
                pass

    def check(self) -> None:
        """Look at it between two events."""
        for version in self.versions:
            snapshot = version.snapshot
            assert isinstance(snapshot, PlainSnapshot)
            assert version.reclaimable or snapshot.phase == "held", f"{version} is {snapshot.phase}"
        roster = list(self.machine.state.roster)
        assert len({p.identity for p in roster}) == len(roster)
