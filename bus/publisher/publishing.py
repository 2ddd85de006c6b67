"""Publishing: numbers a version, announces it, and pushes it."""

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

from ..effects import Send
from ..errors import UnknownWorkerError
from ..headers import control_topic, data_topic, patch_topic
from ..limits import CALLS_MAX
from ..messages import DELTA, PARTS, Progress, Whole
from ..protocol_limits import NAMED_MAX, WHOLE_BYTES_MAX
from . import absent, calls, joining, serving
from .effects import Broadcast, BroadcastWhole, Effect, Settled, Stamp, Withdraw
from .offers import abort_of, announcement, commit_of
from .publication import Group, Publication, PublishTerms
from .roster import Peer
from .serving import addressed
from .state import PublisherState
from .store import Versions
from .version import AnnouncedTerms, Version, VersionOffer, VersionPatch

NAME = attrgetter("name")


def offer(state: PublisherState, offered: VersionOffer) -> tuple[Version, list[Effect]]:
    """Make a version of an earlier publisher the latest version, before any worker joins."""
    versions = state.versions(offered.model)
    version = versions.add(offered, state.epoch)
    versions.settle(version, None)
    return version, [] if version.shared is None else [Stamp(version)]


def pass_on(
    state: PublisherState, offered: VersionOffer, now: float
) -> tuple[Version, list[Effect]]:
    """Announce another publisher's version under its own epoch and number, as a relay does. (R1)

    If the announcement asks workers to wait for a commit, call `decide` later.

    Raises:
        ValueError: The offer has no key, or the relay has offered the same or a newer version.
    """
    if offered.key is None or offered.key[0] < state.epoch:
        raise ValueError(f"a relay of epoch {state.epoch} cannot offer {offered.key}")
    epoch, _ = offered.key
    effects = joining.follow_epoch(state, epoch) if epoch > state.epoch else list[Effect]()
    versions = state.versions(offered.model)
    _check_named(state, offered.only or ())
    if versions.pending is not None and versions.pending.version <= offered.key[1]:
        effects += decide(state, versions.pending, commit=False, why="another version is here")
    version = versions.add(offered, epoch, now)
    if version.shared is not None:
        effects.append(Stamp(version))
    workers = None if offered.only is None else sorted(offered.only)
    targets = state.roster.targets(offered.model, workers, now + state.timing.quiet)
    # a worker may have received the version elsewhere
    peers = [peer for peer in targets if peer.runs(version.model) < version.key]
    effects += _announce(state, versions, version, version.terms, workers, peers, now)
    versions.limit()
    return version, effects


def keep_part(state: PublisherState, offered: VersionOffer) -> list[Effect]:
    """Keep some chunks of another publisher's version, as its source; do not announce it. (N5)

    Raises:
        ValueError: The offer has no key, or this publisher has published versions of the model.
    """
    if offered.key is None:
        raise ValueError("a part of a version needs a key: its publisher's epoch and number")
    epoch, _ = offered.key
    versions = state.versions(offered.model)
    if versions.latest is not None or versions.pending is not None:
        raise ValueError(
            f"this publisher has published {offered.model} by itself: on ranks other than 0, use "
            "it only for models that all ranks publish together"
        )
    effects = joining.follow_epoch(state, epoch) if epoch != state.epoch else list[Effect]()
    versions.keep_part(versions.add(offered, epoch))
    return effects


def obtained(
    state: PublisherState, version: Version, chunks: Sequence[tuple[int, int]], now: float
) -> list[Effect]:
    """Handle chunks (index, CRC-32C) from sources: send them to the workers that wait. (N4)"""
    for index, crc in chunks:
        version.chunks.put(index, crc)
    version.chunks.proves(version.chunks.digest)
    return serving.send_arrived(state, version, now)


def withdraw(state: PublisherState, version: Version, why: str, now: float) -> list[Effect]:
    """End the calls of a version that cannot be sent whole, and make workers drop the version."""
    effects = calls.give_up(state, version, why, now)
    return effects if version.gone else effects + serving.abandon(state, version)


def share(state: PublisherState, version: Version) -> list[Effect]:
    """Announce a relay's version, which is complete now, to workers that read it in its segment.

    Until then, the version was not announced to these workers.
    """
    if version.unstamped is None or not version.chunks.whole or not version.share():
        return []
    effects: list[Effect] = [Stamp(version)]
    versions, wanting = state.store[version.model], list[Peer]()
    if version.phase not in ("old", "gone"):
        wanting = [p for p in state.roster.sessions() if p.shared and not p.lost]
        wanting = [peer for peer in wanting if version.model in peer.hello.models]
        wanting = [peer for peer in wanting if state.roster.is_for(peer, version.only)]
    if version.only is None and any(peer.subscribed for peer in wanting):
        effects.append(_to_all(versions, version, version.terms, push=False))
        wanting = [peer for peer in wanting if not peer.subscribed]
    announce = announcement(version, version.terms)
    return effects + [Send(announce, to=peer.identity) for peer in wanting]


def decide(state: PublisherState, version: Version, *, commit: bool, why: str) -> list[Effect]:
    """Commit or abort a relay's pending version as its origin decided; `why`: the abort's text."""
    versions = state.store[version.model]
    if version is not versions.pending:
        return []
    wanting = [p for p in state.roster.sessions() if not p.lost and version.model in p.hello.models]
    if not commit:
        versions.drop(version)
        abort = abort_of(version.model, version.epoch, version.version, why)
        return [Send(abort, to=peer.identity) for peer in wanting]
    version.commit()
    versions.settle(version, version.only)
    staged = [peer for peer in wanting if peer.has_staged(version.model, version.version)]
    return [Send(commit_of(version), to=peer.identity) for peer in staged]


def publish(
    state: PublisherState,
    number: int,
    offered: VersionOffer,
    terms: PublishTerms,
    started: float,
    now: float,
    *,
    as_one: bool = False,
) -> tuple[Publication, list[Effect]]:
    """Publish a version to every worker that has the model, or to named workers.

    `as_one`: whether the call is part of `publish_as_one`, which settles all of its calls together.

    Raises:
        UnknownWorkerError: A named worker has never joined; nothing was published.
        ValueError: Too many workers behind one relay are named; nothing was published.
    """
    workers = terms.workers
    if workers is not None:
        _check_known(state, workers)
        if as_one:
            workers = tuple([name for name in workers if _is_for(state, offered, name)])
        offered.restrict(workers)
    if offered.key is not None and offered.key[0] != state.epoch:
        raise ValueError(f"the epoch changed from {offered.key[0]} to {state.epoch} meanwhile")
    peers = state.roster.targets(offered.model, workers, now + state.timing.quiet)
    versions = state.store.get(offered.model) or state.versions(offered.model)
    version = versions.add(offered, state.epoch, now)
    names: Collection[str] = workers or ()
    if workers is None:
        relays = state.roster.relays
        names = state.roster.wanting(offered.model) if relays else [*map(NAME, peers)]
    call = Publication(number, version, terms, started, names)
    effects: list[Effect] = [] if version.shared is None else [Stamp(version)]
    if versions.pending is not None:
        effects += calls.give_up(state, versions.pending, "superseded by a newer publish", now)
    for name in workers or ():
        if state.roster.by_name(name) is None:
            call.move(name, "left", now, "it left before the publish")
    for peer in filter(None, map(state.roster.by_name, workers or ())):
        if peer.phase == "lost":
            call.move(peer.name, "lost", now, "it was lost before the publish")
    if terms.commit == "auto" and workers is None:
        effects.append(Settled(version))
    effects += _announce(state, versions, version, call.announced, workers, peers, now)
    if terms.hash and not version.chunks.digest:  # P12: hash the version before it is gone
        effects += versions.hash(version)
    state.open(call)
    if len(state.calls) > CALLS_MAX:  # the calls of all models; `bound` counts this model's
        effects += calls.bound(state, version.model, now)
    return call, effects if as_one else effects + calls.settle(state, call, now)


def publish_as_one(
    state: PublisherState,
    offers: Mapping[int, VersionOffer],
    terms: PublishTerms,
    started: float,
    now: float,
) -> tuple[list[Publication], list[Effect]]:
    """Publish versions of several models, all or none. `offers`: by the calls' numbers. (C1)

    Raises:
        UnknownWorkerError, ValueError: As in `publish`.
    """
    if terms.workers is not None:
        _check_known(state, terms.workers)
    numbers = {offer.model: state.versions(offer.model).next_number for offer in offers.values()}
    parts, effects = list[Publication](), list[Effect]()
    for number, offer in offers.items():
        offer.join({model: n for model, n in numbers.items() if model != offer.model})
        call, sent = publish(state, number, offer, terms, started, now, as_one=True)
        parts.append(call)
        effects += sent
    return parts, effects + calls.settle(state, Group(parts), now)


def _announce(
    state: PublisherState,
    versions: Versions,
    version: Version,
    terms: AnnouncedTerms,
    workers: Collection[str] | None,
    peers: list[Peer],
    now: float,
) -> list[Effect]:
    """Make a version the newest, or pending, and announce it to its recipients. (P6)

    The announcement is published on the data socket, and sent on the control connection to each
    recipient that does not get it there.
    """
    if workers is not None:
        relays = state.roster.relays_before(workers)
        peers = [*peers, *(relay for relay in relays if relay.runs(version.model) < version.key)]
    for peer in peers:
        if peer.phase == "lost" or now >= peer.unresponsive_after:
            continue
        if not (peer.incoming and versions.serves(peer)):
            version.add_receiver(peer.name)
    if terms.commit == "together":
        versions.await_commit(version, now + state.timing.ping)
    else:
        versions.settle(version, None if workers is None else frozenset(workers))
        if workers is None:
            versions.supersede(version, peers)
    effects, alone = list[Effect](), peers
    if workers is None:
        alone, push, patch, postponed = list[Peer](), False, False, False
        for peer in peers:
            if peer.shared and version.unstamped:
                postponed = True  # until `share`
            elif not peer.subscribed:
                alone.append(peer)
            elif PARTS in peer.hello.features:  # T1
                continue
            elif not (peer.shared and version.shared):  # S9
                usable = _patch_for(peer, version) if version.patches else None
                push = push or usable is None
                patch = patch or (usable is not None and usable is version.patches[0])
        if state.pushes:
            state.end_pushes(version.model)
        if postponed:  # on this topic, the announcement does not reach the postponed workers
            header, topic = version.layout.header, data_topic(version.model)
            to_all: Broadcast | BroadcastWhole = Broadcast(
                topic, announcement(version, terms), header
            )
        else:
            to_all = _to_all(versions, version, terms, push=push)
        effects += [Withdraw(version.model), to_all]
        if push and not isinstance(to_all, BroadcastWhole):
            state.begin_push(version, now)
        if patch:  # D6
            state.begin_push(version.patches[0], now)
    if workers is not None and state.roster.relays:  # R8: a relay gets older versions first
        model = version.model
        alone = [p for p in alone if not p.relay or serving.next_owed(state, p, model) is version]
    if alone:
        announce = announcement(version, terms)
        live = [p for p in alone if not (p.lost or (p.shared and version.unstamped))]
        effects += [Send(addressed(state, announce, version, p), to=p.identity) for p in live]
    return effects


def _check_known(state: PublisherState, workers: Collection[str]) -> None:
    """Raise the error of a publish to these workers if it is impossible."""
    if text := absent.unknown_names_text(state, workers):
        raise UnknownWorkerError(text)
    _check_named(state, workers)


def _is_for(state: PublisherState, offered: VersionOffer, name: str) -> bool:
    """Return whether a named worker counts: it wants this model, or no companion's model."""
    peer = state.roster.by_name(name)
    if peer is None or offered.model in peer.hello.models:
        return True
    return offered.companions.keys().isdisjoint(peer.hello.models)


def _check_named(state: PublisherState, workers: Collection[str]) -> None:
    """Raise ValueError if too many of these workers are behind one relay."""
    for relay in state.roster.relays_before(workers):
        count = len(state.roster.named_behind(relay, workers))
        if count > NAMED_MAX:
            raise ValueError(
                f"{count} of the named workers are behind relay {relay.name}: name at most "
                f"{NAMED_MAX}, or publish to all"
            )


def _to_all(
    versions: Versions, version: Version, terms: AnnouncedTerms, *, push: bool
) -> Broadcast | BroadcastWhole:
    """Return the announcement to all subscribers, with the bytes if these are few and pushed."""
    known = version.layout.id == versions.announced_layout
    if not known:
        versions.note_layout_announced(version.layout.id)
    small = version.plan.count == 1 and version.layout.nbytes <= WHOLE_BYTES_MAX
    if push and known and small and version.chunks.whole and version.receivers:  # P7
        crc = version.chunks.crcs[0]  # most versions were hashed while they were copied
        whole = None if crc is None else Whole(crc=crc, digest=version.chunks.digest)
        return BroadcastWhole(version, announcement(version, terms, whole))
    topic, header = control_topic(version.model), None if known else version.layout.header
    return Broadcast(topic, announcement(version, terms), header)


def _patch_for(peer: Peer, version: Version) -> VersionPatch | None:
    """Return the patch to a version that a worker can use; None if there is none."""
    decodes = DELTA in peer.hello.features
    return version.patch_on(peer.running.get(version.model)) if decodes else None


# Pushing.


def advance_push(state: PublisherState, report: Progress, now: float) -> None:
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
