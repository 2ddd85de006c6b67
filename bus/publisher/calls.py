"""Advances the open calls of publish with the workers' reports, until each call is resolved.

A call is open until its result is known. A call whose workers commit together also stays open until
its commit is decided, even if its caller no longer waits.
"""

from ..effects import Notice, Send
from ..limits import CALLS_MAX
from ..messages import COMPANIONS, PARTS, Applied, Failed, PatchId, Staged
from ..units import span
from .absent import reasons, wanted_models_text
from .effects import Effect, Resolve, Settled
from .offers import abort_of, commit_of
from .publication import Group, Publication
from .roster import Peer
from .state import PublisherState
from .status import phase_of, reason_of
from .tables import TargetEvent
from .version import AnnouncedTerms, Chunked, Version, VersionPatch

# the end of the text for an apply that failed half-way
NOTHING_RUNS = "; it runs no version now, until one is applied"


def announced_terms(state: PublisherState, version: Version) -> AnnouncedTerms:
    """Return the terms that an announcement of this version contains now."""
    for call in state.calls.values():
        if call.version is version and call.decision != "commit":
            return call.announced
    return version.terms


def must_hash(state: PublisherState, model: str, version: int) -> bool:
    """True if an open call requires that workers hash this version."""
    for call in state.calls.values():
        published = call.version
        if call.terms.hash and (published.model, published.version) == (model, version):
            return True
    return False


def record_transport(
    state: PublisherState, peer: Peer, report: Staged | Applied, version: Version | None, now: float
) -> None:
    """Record how a worker received a version, whole or as a patch, and how fast. (D11)"""
    by: Chunked | None = version
    if version is not None and report.patch is not None:
        by = version.find(report.patch)
    by_shared_memory = version is not None and version.shared is not None and peer.shared
    if by is None or by_shared_memory or not report.digest or PARTS in peer.hello.features:
        return
    # The time of a version of one chunk says little about the link's rate.
    whole = isinstance(by, Version) and by.plan.count > 1 and isinstance(report, Applied)
    if isinstance(by, VersionPatch) and isinstance(report, Applied):
        peer.decoded(report.decode_us / 1e6, by.work, classes=by.classes)
    for call in state.calls.values():
        if call.version is version:
            call.record_transport(peer.name, by)
            if whole:
                peer.link.observe_rate(by.plan.nbytes, now - call.started)


def record_transport_behind(
    state: PublisherState, peer: Peer, version: Version | None, patch: PatchId | None
) -> None:
    """Record by which patch a worker behind a relay received a version (None: whole). (R5)"""
    by = version.find(patch) if version is not None and not peer.shared else None
    for call in state.calls.values():
        if by is not None and call.version is version:
            call.record_transport(peer.name, by)


# Events.


def give_up(state: PublisherState, pending: Version | None, why: str, now: float) -> list[Effect]:
    """End the calls that published a version. Abort the version if it is not committed yet."""
    effects: list[Effect] = []
    for call in [*state.calls.values()]:
        if call.version is pending:
            call.end(why)
            effects += settle(state, call, now)
    return effects


def end(state: PublisherState, call: Publication, why: str, now: float) -> list[Effect]:
    """End a call with the results so far. Abort its version if that is not committed yet."""
    if call.resolved:
        return []
    call.end(why)
    return settle(state, call, now)


def bound(state: PublisherState, model: str, now: float) -> list[Effect]:
    """End a model's oldest call if too many are open, for example if no worker applies versions."""
    same = [call for call in state.calls.values() if call.version.model == model]
    if len(same) <= CALLS_MAX:
        return []
    same[0].end(f"{CALLS_MAX} newer versions of {model} are open, and no worker applies them")
    return settle(state, same[0], now)


def renewed(state: PublisherState, epoch: int) -> None:
    """Reset the calls of versions that were moved to this new epoch."""
    for call in state.calls.values():
        if call.version.epoch == epoch:
            call.renew()


def returned(state: PublisherState, peer: Peer, now: float) -> list[Version]:
    """Handle a worker's (re)join: return the undecided versions that the worker has to stage.

    A relay is not a target of a call, but has to pass these versions to the workers behind it. (R5)
    """
    if peer.relay:
        return [
            call.version
            for call in state.calls.values()
            if call.terms.commit == "together"
            and call.decision == "open"
            and call.version.model in peer.hello.models
            and not call.version.gone
            and state.roster.is_for(peer, call.terms.workers)
        ]
    state.note_reached(peer.hello.models)
    waiting: list[Version] = []
    for call in state.calls.values():
        version = call.version
        if call.terms.workers is None and version.model in peer.hello.models:
            call.welcome(peer.name)
        call.move(peer.name, "returned", now)
        target = call.targets.get(peer.name)
        open_ = call.terms.commit == "together" and call.decision == "open"
        if open_ and not version.gone and target is not None and target.state == "behind":
            waiting.append(version)
    return waiting


def lost(state: PublisherState, peer: Peer, now: float, *, gone: bool) -> list[Effect]:
    """Handle a worker's loss in all calls; `gone` is true if its connection or process ended."""
    effects: list[Effect] = []
    for call in [*state.calls.values()]:
        call.lose(peer.name, now, peer.why, gone=gone)
        effects += settle(state, call, now)
    return effects


def move(
    state: PublisherState, peer: Peer, event: TargetEvent, now: float, of: Version | None = None
) -> list[Effect]:
    """Apply a worker's event to the calls of the version `of` (None: to all calls)."""
    effects: list[Effect] = []
    for call in [*state.calls.values()]:
        if of is None or call.version is of:
            call.move(peer.name, event, now)
            effects += settle(state, call, now)
    return effects


def failed(state: PublisherState, peer: Peer, message: Failed, now: float) -> list[Effect]:
    """Handle a worker's report that a version failed, in the calls of that version."""
    effects: list[Effect] = []
    for call in [*state.calls.values()]:
        v = call.version
        if (v.model, v.version) != (message.model, message.version):
            continue
        target = call.targets.get(peer.name)
        if target is not None and target.state in ("behind", "staged"):
            detail = f"{message.code}: {message.text}"
            if not message.intact:
                detail += NOTHING_RUNS
            text = f"worker {peer.name} failed version {v.version} of {v.model}: {detail}"
            _, before = peer.seen.failed.get(v.model, (0, ""))
            news = before != reason_of(message)
            effects.append(Notice("failed", text, peer.name, warning=news))
            call.move(peer.name, "failed", now, detail)
        effects += settle(state, call, now)
    return effects


def record_running(
    state: PublisherState,
    peer: Peer,
    model: str,
    runs: tuple[int, int],
    now: float,
    note: str = "",
) -> list[Effect]:
    """Record that a worker runs version `runs`, in the calls of that and of older versions."""
    effects: list[Effect] = []
    for call in [*state.calls.values()]:
        published = call.version
        key = published.epoch, published.version
        if published.model != model or key > runs:
            continue
        if key == runs:
            call.move(peer.name, "applied", now, note)
        else:
            call.move(peer.name, "skipped", now, f"it runs version {runs[1]}")
        effects += settle(state, call, now)
    return effects


# Deciding and resolving.


def settle_all(state: PublisherState, now: float) -> list[Effect]:
    """Settle every open call."""
    return [effect for call in [*state.calls.values()] for effect in settle(state, call, now)]


def close(state: PublisherState, now: float) -> list[Effect]:
    """Resolve every open call with the results so far."""
    for call in state.calls.values():
        call.expire(now)  # P20
    return settle_all(state, now)


def settle(state: PublisherState, call: Publication, now: float) -> list[Effect]:
    """Decide a call's commit and resolve the call, as soon as each is possible.

    The calls of a group are decided and resolved together.
    """
    effects: list[Effect] = []
    group = call.group
    whole, parts = (call, (call,)) if group is None else (group, group.parts)
    open_ = whole.terms.commit == "together" and whole.decision == "open"
    if open_ and whole.decide(now) != "open":
        for part in parts:
            effects += _carry_out_decision(state, part)
    achieved = whole.verdict(now)
    if achieved is not None and not whole.resolved:
        for part in parts:
            missing, why, named = 0, "", part.terms.named
            if not achieved:
                missing, why = whole.missing, _shortfall_reason(state, part, whole)
            if not (achieved and part.for_all):  # otherwise every target is done
                _set_details(state, part, now)
            if state.roster.relays:
                _set_relays(state, part)
            if group is not None:
                named = _named_in(part, group)
                _set_one_by_one(state, part)
            receipt, require = part.resolve(now, part.version.chunks.digest), part.terms.require
            about = receipt, achieved, part.done, missing, require, why, named
            effects.append(Resolve(part.number, *about))
            if achieved and part.has_no_recipient:
                effects += _no_worker_notice(state, part)
        if group is not None:
            group.close()
    if whole.resolved and (whole.terms.commit == "auto" or whole.decision != "open"):
        for part in parts:
            state.close(part.number)
    return effects


def _named_in(part: Publication, group: Group) -> frozenset[str] | None:
    """Return the named workers that one call of a group waits for; None if it names none."""
    named = part.terms.named
    if named is None:
        return None
    return frozenset(n for n in named if n in part.targets or n not in group.targets)


def _carry_out_decision(state: PublisherState, call: Publication) -> list[Effect]:
    # Commit or abort the version of a call, as decided.
    version = call.version
    versions = state.store[version.model]
    found = (state.roster.by_name(name) for name in call.targets)
    peers = [peer for peer in found if peer is not None and not (peer.lost or peer.through)]
    relays = [p for p in state.roster.relaying(version.model) if p.name not in call.targets]
    if call.decision == "commit":
        versions.settle(version, version.only)
        staged = [p for p in peers if call.targets[p.name].state == "staged"]
        staged += [p for p in relays if p.has_staged(version.model, version.version)]
        settled = [Settled(version)] if version.only is None else list[Effect]()
        return [*settled, *(Send(commit_of(version), to=p.identity) for p in staged)]
    versions.drop(version)
    text = call.ended or "not enough staged"
    abort = abort_of(version.model, version.epoch, version.version, text)
    return [Send(abort, to=p.identity) for p in [*peers, *relays]]


def _absence_reasons(state: PublisherState, call: Publication) -> list[str]:
    """Return, for each absent worker that wants the call's model, a text on why it is absent."""
    model = call.version.model
    lost = [p for p in state.roster if p.lost and model in p.hello.models]
    others = [p for p in lost if call.terms.alive or p.name not in call.targets]
    return [f"worker {p.name} is lost: {p.why}" for p in others] + reasons(state, model)


def _other_models_text(state: PublisherState, model: str) -> str:
    """Return a text with the models that live workers want; "" if one of them wants this model."""
    live = (peer for peer in state.roster if not (peer.lost or peer.relay))
    wanted = {model for peer in live for model in peer.hello.models}
    return "" if model in wanted or not wanted else wanted_models_text(model, sorted(wanted))


def _shortfall_reason(state: PublisherState, call: Publication, whole: Publication) -> str:
    """Return a text: why a call was ended early, and why expected workers are missing."""
    reasons = [call.ended] if call.ended else []
    if call.terms.named is not None:
        return "; ".join(reasons)
    if missing := whole.missing:
        away = _absence_reasons(state, call)
        what = "are missing" if away else "never came"
        why = "; ".join(away) or _other_models_text(state, call.version.model)
        why = why or "no worker was refused, is lost or has left"
        reasons.append(f"{missing} of {call.terms.expect} workers {what} ({why})")
    return "; ".join(reasons)


def _no_worker_notice(state: PublisherState, call: Publication) -> list[Effect]:
    """Return a warning that a version has no recipient; none again until a worker joins."""
    version = call.version
    if not state.note_unreached(version.model):
        return []
    away, wanted = _absence_reasons(state, call), _other_models_text(state, version.model)
    if wanted and not away:
        state.note_hinted(version.model)
    why = "; ".join(away) or wanted or "no worker has joined"
    text = (
        f"version {version.version} of {version.model} was published to no worker: {why}. It "
        "waits for those that join; publish(expect=N) waits for N workers"
    )
    return [Notice("nobody", text, warning=True)]


def _set_relays(state: PublisherState, call: Publication) -> None:
    """Record, for each target, the relays between this publisher and the worker."""
    for target in call.targets.values():
        peer = state.roster.by_name(target.name)
        if peer is not None and peer.through:
            target.reached_through(peer.through)


def _set_one_by_one(state: PublisherState, call: Publication) -> None:
    """Explain which targets do not apply this version at once with its companions."""
    for target in call.targets.values():
        peer = state.roster.by_name(target.name)
        if peer is None or peer.through or COMPANIONS in peer.hello.features or target.detail:
            continue
        if not call.version.companions.keys().isdisjoint(peer.hello.models):
            target.explain("it applies models one after another")


def _set_details(state: PublisherState, call: Publication, now: float) -> None:
    """Explain, for each target that is not done, what the worker is doing."""
    model = call.version.model
    for target in call.targets.values():
        if target.state in call.done or target.detail:
            continue
        peer = state.roster.by_name(target.name)
        if peer is not None:
            incoming = peer.incoming.get(model)
            doing = phase_of(state, model, incoming, now) if incoming else "nothing heard of it yet"
            if incoming and incoming.phase == "staged" and call.terms.commit == "auto":
                doing += ", and waits for start() or receive() there"
            target.explain(f"{doing}; last heard {span(now - peer.heard_at)} ago")
