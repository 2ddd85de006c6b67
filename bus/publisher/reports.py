"""Handles workers' reports on versions (progress, staged, applied, failed) and checks digests."""

from ...codecs.words import printable
from ..effects import Notice, Send
from ..messages import RELAY, Applied, Failed, Progress, Running, Staged
from ..protocol_limits import TEXT_MAX
from . import calls, publishing, serving
from .effects import Effect
from .offers import abort_of, commit_of, end_of
from .roster import Peer
from .state import PublisherState
from .status import reason_of
from .store import Versions
from .version import Version


def progress(state: PublisherState, peer: Peer, message: Progress, now: float) -> list[Effect]:
    """Handle a report of how many chunks of a version a worker has."""  # P14
    versions = _versions_of(state, message)
    if versions is None or not versions.had(message.version):
        return []
    publishing.advance_push(state, message, now)
    if peer.runs(message.model) >= (message.epoch, message.version):
        return []  # P19: the worker's `applied` on the data connection overtook this report
    receiving = message.phase == "receiving"
    version = versions.get(message.version) if receiving else None
    if receiving and version is None:
        return []  # only a worker that has all of a version may report on it after it is gone
    coming = version.find(message.patch) if version is not None else None
    peer.progressed(message, coming.plan if coming is not None else None, now)
    versions.end_receiving(peer.name, older_than=message.version + (not receiving))
    if version is not None:
        version.add_receiver(peer.name)
    return []


def staged(state: PublisherState, peer: Peer, message: Staged, now: float) -> list[Effect]:
    """Handle a report that a worker has staged a version."""  # P11
    versions = _versions_of(state, message)
    if versions is None:
        return []
    version = versions.get(message.version)
    if version is None:
        text = "the version was aborted or superseded"
        abort = abort_of(message.model, message.epoch, message.version, text)
        return [Send(abort, to=peer.identity)]
    if not version.chunks.digest:
        return _check_later(state, peer, version, message)
    if version.chunks.digest != message.digest:
        return _reject_digest(state, peer, message)
    if peer.runs(message.model) < version.key:  # P19
        peer.stages(message, now)
    versions.end_receiving(peer.name, older_than=message.version + 1)
    calls.record_transport(state, peer, message, version, now)
    effects = calls.move(state, peer, "staged", now, version)
    if version is not versions.pending and not version.gone:
        effects.append(Send(commit_of(version), to=peer.identity))
    return effects


def applied(state: PublisherState, peer: Peer, message: Applied, now: float) -> list[Effect]:
    """Handle `applied` on the control channel: the worker's model is no longer torn."""
    peer.repaired(message.model)
    return runs(state, peer, message, now)


def runs(state: PublisherState, peer: Peer, message: Applied, now: float) -> list[Effect]:
    """Handle a report that a worker runs a version; the report may be delayed."""  # P12
    model, key = message.model, (message.epoch, message.version)
    if model not in peer.hello.models:
        return []
    running, versions = Running(*key, message.digest), _known(state, model)
    if versions is None or message.epoch != state.epoch:
        if message.epoch >= state.epoch:
            return _reject_digest(state, peer, message)
        if peer.runs(model) < key:
            peer.applied(model, running, 0.0, None, current=False)
        return []
    version = versions.find(message.version)
    if version is None or not message.digest or version.chunks.digest != message.digest:
        if version is not None and message.digest and not version.chunks.digest:
            return _check_later(state, peer, version, message)
        if not plausible(state, model, running):
            return _reject_digest(state, peer, message)
    before = peer.running.get(model)
    if before is not None and (before.epoch, before.version) >= key:
        return []  # P19
    took = now - versions.times.get(message.version, now)
    peer.applied(model, running, took, message.patch, current=True)
    if message.digest:
        calls.record_transport(state, peer, message, version, now)
    versions.end_receiving(peer.name, older_than=message.version + 1)
    note = printable(message.note, TEXT_MAX) if message.note else ""
    effects = calls.record_running(state, peer, model, key, now, note)
    # Not `peer.relay`, a slower property: this runs for each report.
    is_relay = RELAY in peer.hello.features
    return effects + serving.announce_owed(state, peer, model, now) if is_relay else effects


def failed(state: PublisherState, peer: Peer, message: Failed, now: float) -> list[Effect]:
    """Handle a report that a worker failed a version."""  # P13
    if message.model not in peer.hello.models:
        return []
    versions = _versions_of(state, message)
    peer.failed(message, current=versions is not None)
    effects = list[Effect]()
    if versions is not None:
        versions.end_receiving(peer.name, older_than=message.version + 1)
        effects = calls.failed(state, peer, message, now)
    current = message.epoch == state.epoch  # else its number means another version
    if current and message.version > peer.runs(message.model)[1]:
        peer.keep_failure(message.model, message.version, reason_of(message))
    return effects


def hashed(state: PublisherState, version: Version, now: float) -> list[Effect]:
    """Handle a version's new digest: send the `end` that workers wait for, and check reports."""
    effects: list[Effect] = []
    awaiters, reports = state.store[version.model].hashed(version)
    for name in sorted(awaiters):
        peer = state.roster.by_name(name)
        if peer is not None and not peer.lost:
            effects.append(Send(end_of(version), to=peer.identity))
    effects += serving.send_checksums(state, version)
    for name, message in reports:
        peer = state.roster.by_name(name)
        if peer is not None and not peer.lost:
            match message:
                case Staged():
                    effects += staged(state, peer, message, now)
                case Applied():
                    effects += runs(state, peer, message, now)
    return effects


def plausible(state: PublisherState, model: str, running: Running) -> bool:
    """True if a worker's report of a running version may be right.

    The report may be right if the version is of an older epoch, is too old to remember, or has the
    reported digest. An empty digest may be right for a version that was in shared memory, here or
    at another publisher of a relay's versions, unless an open call requires a digest.
    """
    versions = _known(state, model)
    if running.epoch != state.epoch or versions is None:
        return running.epoch < state.epoch
    version = versions.find(running.version)
    if not running.digest:
        if calls.must_hash(state, model, running.version):
            return False
        unhashed = version is None or version.shared is not None or bool(version.names)
        return versions.had(running.version) and (unhashed or not state.origin)
    if version is not None:  # False until the version is hashed; the worker repeats the report
        return version.chunks.digest == running.digest
    known = versions.known_digest(running.version)
    if known == "":
        return not calls.must_hash(state, model, running.version)
    return known == running.digest


def _known(state: PublisherState, model: str) -> Versions | None:
    """Return a model's versions; at a relay never None, since its workers may run any model."""
    return state.store.get(model) if state.origin else state.versions(model)


def _versions_of(state: PublisherState, message: Progress | Staged | Failed) -> Versions | None:
    """Return the versions of a message's model; None if it is unknown, or of another epoch."""
    return state.store.get(message.model) if message.epoch == state.epoch else None


def _check_later(
    state: PublisherState, peer: Peer, version: Version, message: Staged | Applied
) -> list[Effect]:
    """Keep a report until its version is hashed, and start to hash the version."""
    versions = state.store[version.model]
    if not versions.hold(version):
        return _reject_digest(state, peer, message)  # the version was overwritten before
    version.check_later(peer.name, message)
    return versions.hash(version)


def _reject_digest(state: PublisherState, peer: Peer, message: Staged | Applied) -> list[Effect]:
    """Reject a report with a wrong digest; return a notice at the first such report.

    The worker repeats the report with each ping, and may send such reports for any version.
    """  # P15
    if not peer.wrong_digest(message.model, message.epoch, message.version):
        return []
    versions = state.store.get(message.model)
    published = versions.known_digest(message.version) if versions is not None else None
    text = (
        f"worker {peer.name} reports digest {message.digest} for version {message.version} of "
        f"{message.model}; published was {published or 'no such version'}"
    )
    return [Notice("wrong-digest", text, peer.name)]
