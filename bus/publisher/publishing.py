"""Publishing: numbers a version, announces it, and pushes it."""

from collections.abc import Collection
from operator import attrgetter

from ..effects import Send
from ..errors import UnknownWorkerError
from ..headers import control_topic, data_topic, patch_topic
from ..limits import CALLS_MAX
from ..messages import DELTA, Progress, Whole
from ..protocol_limits import WHOLE_BYTES_MAX
from . import absent, calls
from .effects import Broadcast, BroadcastWhole, Effect, Settled, Stamp, Withdraw
from .offers import announcement
from .publication import Publication, PublishTerms
from .roster import Peer
from .state import PublisherState
from .store import Versions
from .version import Version, VersionOffer, VersionPatch

NAME = attrgetter("name")


def offer(state: PublisherState, offered: VersionOffer) -> tuple[Version, list[Effect]]:
    """Make a version of an earlier publisher the latest version, before any worker joins."""
    versions = state.versions(offered.model)
    version = versions.number(offered, state.epoch)
    versions.settle(version, None)
    return version, [] if version.shared is None else [Stamp(version)]


def publish(
    state: PublisherState,
    number: int,
    offered: VersionOffer,
    terms: PublishTerms,
    started: float,
    now: float,
) -> tuple[Publication, list[Effect]]:
    """Publish a version to every worker that has the model, or to named workers.

    Raises:
        UnknownWorkerError: A named worker has never joined; nothing was published.
    """
    workers = terms.workers
    if workers and (text := absent.unknown(state, workers)):
        raise UnknownWorkerError(text)
    peers = state.roster.targets(offered.model, workers, now + state.timing.quiet)
    versions = state.store.get(offered.model) or state.versions(offered.model)
    version = versions.number(offered, state.epoch, now)
    names = [*map(NAME, peers)] if workers is None else workers
    call = Publication(number, version, terms, started, names)
    effects: list[Effect] = [] if version.shared is None else [Stamp(version)]
    if versions.pending is not None:
        effects += calls.give_up(state, versions.pending, "superseded by a newer publish", now)
    for name in workers or ():
        if state.roster.by_name(name) is None:
            call.move(name, "left", now, "it left before the publish")
    for peer in peers:
        if peer.phase == "lost":
            call.move(peer.name, "lost", now, "it was lost before the publish")
            continue
        if now < peer.unresponsive_after and not (peer.incoming and versions.serves(peer)):
            version.read_by(peer.name)
    if terms.commit == "together":
        versions.await_commit(version)
    else:
        versions.settle(version, None if workers is None else frozenset(workers))
        if workers is None:
            versions.supersede(version, peers)
            effects.append(Settled(version))
    effects += _announce(state, versions, call, peers, now)
    if terms.hash and not version.chunks.digest:  # P12: hash the version before it is gone
        effects += versions.hash(version)
    state.open(call)
    if len(state.calls) > CALLS_MAX:  # the calls of all models; `bound` counts this model's
        effects += calls.bound(state, version.model, now)
    return call, effects + calls.settle(state, call, now)


def _announce(
    state: PublisherState, versions: Versions, call: Publication, peers: list[Peer], now: float
) -> list[Effect]:
    """Announce a version on its topic, and on the control connections of other targets."""  # P6
    version, effects, alone = call.version, list[Effect](), peers
    if call.terms.workers is None:
        alone, push, patch = list[Peer](), False, False
        for peer in peers:
            if not peer.subscribed:
                alone.append(peer)
            elif not (peer.shared and version.shared):  # S9
                taken = _patch_for(peer, version) if version.patches else None
                push = push or taken is None
                patch = patch or (taken is not None and taken is version.patches[0])
        if state.pushes:
            state.end_pushes(version.model)
        to_all = _to_all(versions, call, push=push)
        effects += [Withdraw(version.model), to_all]
        if push and not isinstance(to_all, BroadcastWhole):
            state.begin_push(version, now)
        if patch:  # D6
            state.begin_push(version.patches[0], now)
    if alone:
        announce = announcement(version, call)
        effects += [Send(announce, to=peer.identity) for peer in alone if not peer.lost]
    return effects


def _to_all(versions: Versions, call: Publication, *, push: bool) -> Broadcast | BroadcastWhole:
    """Return the announcement to all subscribers; with the bytes, if they are few and pushed."""
    version = call.version
    known = version.layout.id == versions.announced_layout
    if not known:
        versions.announce_layout(version.layout.id)
    small = version.plan.count == 1 and version.layout.nbytes <= WHOLE_BYTES_MAX
    if push and known and small and version.chunks.whole and version.receivers:  # P7
        crc = version.chunks.crcs[0]  # most versions were hashed while they were copied
        whole = None if crc is None else Whole(crc=crc, digest=version.chunks.digest)
        return BroadcastWhole(version, announcement(version, call, whole))
    topic, header = control_topic(version.model), None if known else version.layout.header
    return Broadcast(topic, announcement(version, call), header)


def _patch_for(peer: Peer, version: Version) -> VersionPatch | None:
    """Return a patch to a version, for a worker that can decode it; None if there is none."""
    takes = DELTA in peer.hello.features
    return version.patch_on(peer.running.get(version.model)) if takes else None


# Pushing.


def followed(state: PublisherState, report: Progress, now: float) -> None:
    """Pass a worker's report of progress to the push of that version or patch, if any."""
    topic = (data_topic if report.patch is None else patch_topic)(report.model)
    push = state.pushes.get(topic)
    if push is None or push.version.patch != report.patch:
        return
    if push.version.target.version == report.version:
        push.report(report.chunks, now)


def push(
    state: PublisherState, now: float, topics: Collection[bytes] | None = None
) -> list[Effect]:
    """Return the effects that push the next chunks, on these topics (None: on all topics)."""
    effects: list[Effect] = []
    for push in list(state.pushes.values()):
        if topics is not None and push.topic not in topics:
            continue
        version = push.version.target
        versions, held = state.store[version.model], version.phase not in ("reclaimable", "gone")
        if held or versions.hold(version):  # otherwise the version was aborted or overwritten
            effects += push.step(now)
            if push.stalled and push.needs_digest:
                effects += versions.hash(version)
        if push.done or version.phase == "gone":
            state.end_push(push.topic)
    return effects
