"""Serves fetches: sends a worker the announcement, chunks or `end` that it requests."""

from collections.abc import Iterable

from msgspec.structs import replace

from ..cut import ranges_of
from ..effects import Notice, Send
from ..headers import patch_topic
from ..messages import Announce, Fetch, Refuse
from ..protocol_limits import NAMED_MAX
from .calls import announced_terms
from .effects import Effect, Obtain, SendChunk
from .offers import announcement, checksums_of, end_of, refusal_of
from .roster import Peer
from .state import PublisherState
from .version import Chunked, Version


def fetch(state: PublisherState, peer: Peer, fetch: Fetch, now: float) -> list[Effect]:
    """Answer a fetch of a version's announcement, chunks or `end`, or of a patch."""  # P8
    versions = state.store.get(fetch.model) if fetch.epoch == state.epoch else None
    version = versions.get(fetch.version) if versions else None
    if version is None and versions and fetch.version == 0:
        version = versions.latest_for(peer.name)
        if version is not None and _counts_as_receiving(peer, version):
            version = versions.get_latest_for(peer.name)
    if version is not None and fetch.patch is not None:
        return _send_patch(state, peer, version, fetch, now)
    code, text = refusal_of(fetch, version)
    if version is None or code:
        return _refuse_fetch(state, peer, fetch, code, text)
    notices = _unpatched_notice(peer, version, fetch.unpatched)
    if fetch.count:
        return notices + _send_chunks(state, peer, version, fetch, now)
    if fetch.checksums:
        return _send_checksums(state, peer, version)
    if versions is not None:  # the worker begins this version, and so drops older versions
        versions.end_receiving(peer.name, older_than=version.version)
    end = fetch.version > 0 and not fetch.layout  # such a fetch requests the `end`
    return notices + describe(state, peer, version, layout=fetch.layout, end=end)


def _send_patch(
    state: PublisherState, peer: Peer, version: Version, fetch: Fetch, now: float
) -> list[Effect]:
    """Return the requested chunks of a patch, or its `end`; refuse if there is no such patch."""
    patch = version.find(fetch.patch) if fetch.version else None
    if patch is None or fetch.first + fetch.count > patch.plan.count:  # D8
        return [_refuse_patch(peer, version, fetch.version)]
    if fetch.count:
        return _send_chunks(state, peer, patch, fetch, now)
    if not patch.digest:  # a relay does not have it yet
        patch.await_end(peer.name)
        return []
    return [Send(end_of(patch), to=peer.identity)]


def _refuse_patch(peer: Peer, version: Version, number: int) -> Send:
    refuse = Refuse(
        code="no-patch",
        text=f"version {version.version} of {version.model} has no such patch, or a smaller one",
        model=version.model,
        epoch=version.epoch,
        version=number,
    )
    return Send(refuse, to=peer.identity)


def _unpatched_notice(peer: Peer, version: Version, why: str) -> list[Effect]:
    """Return a notice, once per version, that a worker uses no patch, and `why`."""  # D10
    if not why or not version.patches or not version.note_unpatched(peer.name):
        return []
    text = (
        f"worker {peer.name} takes all of version {version.version} of {version.model}, for "
        f"which there was a patch: {why}"
    )
    return [Notice("unpatched", text, peer.name)]


def _refuse_fetch(
    state: PublisherState, peer: Peer, fetch: Fetch, code: str, text: str
) -> list[Effect]:
    """Refuse a fetch. If the version is gone, also announce the newest version."""
    refuse = Refuse(
        code=code, text=text, model=fetch.model, epoch=fetch.epoch, version=fetch.version
    )
    effects: list[Effect] = [Send(refuse, to=peer.identity)]
    versions = state.store.get(fetch.model)
    latest = versions.get_latest_for(peer.name) if versions and code == "gone" else None
    if latest is not None and latest.key != (fetch.epoch, fetch.version):
        effects += describe(state, peer, latest)
    return effects


def _send_chunks(
    state: PublisherState, peer: Peer, chunked: Chunked, fetch: Fetch, now: float
) -> list[Effect]:
    version = chunked.target
    if _counts_as_receiving(peer, version):
        version.add_receiver(peer.name)
        peer.fetches(version.model, version.version, chunked.patch, now)
    state.store[version.model].end_receiving(peer.name, older_than=version.version)
    indexes: Iterable[int] = range(fetch.first, fetch.first + fetch.count)
    ranges = ranges_of(fetch.ranges) if fetch.ranges and chunked is version else ()
    effects = list[Effect]()
    if not chunked.chunks.whole:
        missing = [index for index in indexes if not chunked.chunks.has(index)]
        indexes = [index for index in indexes if chunked.chunks.has(index)]
        chunked.await_chunks(peer.name, missing, now + state.timing.patience_max, ranges)
        if missing and version.obtain is not None and chunked is version:
            effects.append(Obtain(version))
    return [*effects, *(SendChunk(chunked, index, peer.identity, ranges) for index in indexes)]


def _send_checksums(state: PublisherState, peer: Peer, version: Version) -> list[Effect]:
    """Send a worker the checksums of all chunks, now or once they are known."""  # T4
    version.await_checksums(peer.name)
    versions = state.store[version.model]
    lacking = version.chunks.whole and version.chunks.checksums is None
    hashes = versions.hash(version) if lacking and versions.hold(version) else []
    return hashes + send_checksums(state, version)


def send_checksums(state: PublisherState, version: Version) -> list[Effect]:
    """Send the checksums of all chunks, if they are known now, to the workers that wait for them.

    The `end` has the digest of these checksums.
    """
    awaiting = _live(state, version.end_awaited_checksums())
    return [Send(*checksums_of(version), to=peer.identity) for peer in awaiting]


def send_arrived(state: PublisherState, version: Version, now: float) -> list[Effect]:
    """Send new chunks of a version and its patches to the workers that wait for them.

    Also send each `end` of a patch and the version's checksums, if they are awaited and known now.
    """
    effects: list[Effect] = []
    for chunked in (version, *version.patches):
        for name, index, until, ranges in chunked.end_waits():
            peer = state.roster.by_name(name)
            if peer is not None and not peer.lost and now < until:
                effects.append(SendChunk(chunked, index, peer.identity, ranges))
    for patch in version.patches:
        awaiting = _live(state, patch.end_awaited())
        effects += [Send(end_of(patch), to=peer.identity) for peer in awaiting]
    return effects + send_checksums(state, version)


def _live(state: PublisherState, names: Iterable[str]) -> list[Peer]:
    peers = map(state.roster.by_name, names)
    return [peer for peer in peers if peer is not None and not peer.lost]


def unpatch(state: PublisherState, version: Version) -> list[Effect]:
    """Offer a version only whole, since its patch does not arrive or is of no use.

    Workers that wait for chunks of the patch get a refusal now. Others get it when they fetch.
    """
    patches = version.unpatch()
    push = state.pushes.get(patch_topic(version.model))
    if push is not None and push.version in patches:
        state.end_push(push.topic)
    waiting = {name for patch in patches for name in patch.awaiting}
    number = version.version
    return [_refuse_patch(peer, version, number) for peer in _live(state, sorted(waiting))]


def abandon(state: PublisherState, version: Version) -> list[Effect]:
    """Drop a version that does not arrive whole, and send a refusal to the workers that receive it.

    Otherwise such a worker would fetch again and again, and get neither chunks nor a refusal.
    """
    waiting = version.receivers | version.waits.keys() | version.end_awaiters
    state.store[version.model].abandon(version)
    epoch, number = version.key
    text = f"version {number} of epoch {epoch} will not arrive whole here"
    refuse = Refuse(code="gone", text=text, model=version.model, epoch=epoch, version=number)
    return [Send(refuse, to=peer.identity) for peer in _live(state, sorted(waiting))]


def describe(
    state: PublisherState, peer: Peer, version: Version, *, layout: bool = False, end: bool = False
) -> list[Effect]:
    """Announce a version to one worker, followed by the `end`.

    A worker that reads the version in shared memory gets no `end`, unless `end` is True. The `end`
    contains the digest, so it is sent later if the digest is not known yet. `layout`: whether the
    announcement includes the layout.
    """
    if peer.shared and version.unstamped and not end:
        return []  # once the version is complete, `publishing.share` announces it
    header = version.layout.header if layout else None
    announce = announcement(version, announced_terms(state, version))
    announce = addressed(state, announce, version, peer)
    if _counts_as_receiving(peer, version) and not state.store[version.model].serves(peer):
        version.add_receiver(peer.name)
    effects: list[Effect] = [Send(announce, header, to=peer.identity)]
    if not end and peer.shared and version.shared:  # S10
        return effects
    if version.chunks.digest:
        return [*effects, Send(end_of(version), to=peer.identity)]
    versions = state.store[version.model]
    if not versions.hold(version):
        return effects  # a newer publish has taken the version's memory
    version.await_end(peer.name)
    return effects + versions.hash(version)


def missed(state: PublisherState, peer: Peer, model: str, now: float) -> Version | None:
    """Return the undecided version that a worker should be receiving, and is not. (P10)

    The announcement may have been lost, or ignored while the worker was catching up. Neither a pong
    nor the answer to a fetch of version 0 names an undecided version.
    """
    versions = state.store.get(model)
    version = versions.pending if versions is not None else None
    if versions is None or version is None or not state.roster.is_for(peer, version.only):
        return None
    if peer.relay and version.only is not None:
        return None  # `announce_owed` announces it
    if not versions.may_announce_again(peer.name, now):
        return None
    failed, _ = peer.seen.failed.get(model, (0, ""))
    if peer.runs(model) >= version.key or failed == version.version:
        return None
    return None if _is_under_way(state, peer, version, now) else version


def _is_under_way(state: PublisherState, peer: Peer, version: Version, now: float) -> bool:
    """Return whether a version is staged at a worker, or arrives there and makes progress.

    A worker does not report that it drops an arriving version.
    """
    doing = peer.incoming.get(version.model)
    if doing is None or doing.version != version.version:
        return False
    return doing.phase == "staged" or now - doing.since < state.timing.lost_after


def announce_undecided(
    state: PublisherState, peer: Peer, version: Version, now: float
) -> list[Effect]:
    """Announce an undecided version to one worker again."""
    state.store[version.model].postpone_announcing(peer.name, now + state.timing.ping)
    return describe(state, peer, version)


def next_owed(state: PublisherState, relay: Peer, model: str) -> Version | None:
    """Return the oldest version for named workers behind a relay that the relay still needs. (R8)

    If a newer version is announced while one arrives, a relay drops the arriving one. So these
    versions are announced to the relay one after another. None: the relay needs no more of them.
    """
    versions = state.store.get(model)
    failed, _ = relay.seen.failed.get(model, (0, ""))
    for version in versions.named() if versions is not None else ():
        names = state.roster.named_behind(relay, version.only or ())
        peers = (state.roster.by_name(name) for name in names)
        lacking = any(p is not None and p.runs(model) < version.key for p in peers)
        if lacking and relay.runs(model) < version.key and version.version != failed:
            return version
    return None


def announce_owed(state: PublisherState, relay: Peer, model: str, now: float) -> list[Effect]:
    """Announce to a relay the next version that it needs for named workers behind it. (R8)

    Do nothing if that version is arriving there. A named worker may have moved behind the relay
    after the publish.
    """
    version = next_owed(state, relay, model)
    if version is None or _is_under_way(state, relay, version, now):
        return []
    return describe(state, relay, version)


def addressed(state: PublisherState, announce: Announce, version: Version, peer: Peer) -> Announce:
    """Return the announcement for one peer. For a relay, add the names of the named workers.

    The names include workers that are not behind the relay, since these may move there.
    """
    if version.only is None or not peer.relay:
        return announce
    behind = state.roster.named_behind(peer, version.only)
    others = sorted(version.only.difference(behind))
    return replace(announce, workers=[*behind, *others][:NAMED_MAX])  # R8


def _counts_as_receiving(peer: Peer, version: Version) -> bool:
    """True if a worker that fetches a version counts as receiving it.

    A worker that already runs the version does not count: its report on the data connection can
    overtake its earlier fetch. (P19)
    """
    return peer.runs(version.model) < version.key
