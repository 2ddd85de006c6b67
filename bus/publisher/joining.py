"""Handles hellos: admits or refuses workers, and moves to a later epoch if a hello requires it."""

import math

from ..effects import Notice, Send
from ..epochs import contradiction, epoch_above
from ..messages import (
    MAPPING,
    PARTS,
    RELAY,
    RENAMING,
    TICKET,
    UPSTREAM,
    Hello,
    Ping,
    Pong,
    Prepare,
    Refuse,
    Rename,
    Shared,
    Welcome,
)
from ..protocol_limits import EPOCH_LEAP_MAX_MS
from ..units import span
from . import calls
from .effects import Effect, Follow, Settled, Withdraw
from .reports import plausible
from .roster import Peer
from .sessions import keep_newest, leave, lose, resume
from .state import PublisherState

NO_RELAY = (
    "its key is a worker's, which may not pass versions on: make a relay's with "
    "`weightbus keygen DIR --relay NAME`"
)


def hello(
    state: PublisherState, identity: bytes, hello: Hello, now: float, key: str = ""
) -> list[Effect]:
    """Handle a hello: admit or refuse its worker. `key`: its public key; empty: none. (P3)"""
    effects: list[Effect] = []
    grant = state.grants.of(key) if state.grants is not None else None
    if grant is not None and not grant.fits(hello.name):  # K3
        text = f"its key is for the name {grant.pattern}; use that, or make a key for this one"
        return refuse_hello(state, identity, hello, "wrong-name", text, now)
    if grant is not None and grant.role == "observer":  # K4
        text = "an observer's key may only watch: give a worker a key of its own"
        return refuse_hello(state, identity, hello, "not-allowed", text, now)
    if grant is not None and not grant.admits(hello.name, relay=RELAY in hello.features):  # K11
        return refuse_hello(state, identity, hello, "not-allowed", NO_RELAY, now)
    fault = contradiction(hello)
    if fault:
        state.count_malformed()
        return refuse_hello(state, identity, hello, "malformed", fault, now)
    loop = state.loop_with(hello.instance, now)
    if loop:  # R7
        return refuse_hello(state, identity, hello, "name-taken", loop, now)
    never = _never_published(state, hello)
    if never:
        return refuse_hello(state, identity, hello, "stale-epoch", never, now)
    if hello.epoch > state.epoch:
        if not state.origin:
            state.note_claim(hello.epoch, hello.age_ms, now)
        effects = _outbid(state, identity, hello, now)
        if hello.epoch > state.epoch:
            # R10: if only workers behind a relay run the later epoch, the relay is admitted.
            runs = [its.epoch for its in hello.models.values() if its is not None]
            if RELAY not in hello.features or max(runs, default=0) > state.epoch:
                return effects
            effects = []
    other = state.roster.by_identity(identity)
    if other is not None and other.name != hello.name:
        effects += leave(state, other, "its connection has taken another name", now)
    return effects + _admit(state, identity, hello, now, key)


def _outbid(state: PublisherState, identity: bytes, hello: Hello, now: float) -> list[Effect]:
    """Move to an epoch later than the hello's, or refuse the hello, or wait for the next hello."""
    age = None if state.age is None else state.age()
    epoch = epoch_above(hello, age, state.started_ms())
    if epoch is None:
        text = _stale_epoch_text(state, hello)
        return refuse_hello(state, identity, hello, "stale-epoch", text, now)
    since = now - state.renewed_at
    if since < state.timing.lost_after:
        return []  # workers must not restart more often than this; the hello will be repeated
    if since < state.renewal_pause:
        text = _renewal_pause_text(state, hello, since)
        return refuse_hello(state, identity, hello, "stale-epoch", text, now)
    if state.recorded is not None and not state.recorded(epoch):  # P1
        return []  # the epoch is not recorded yet; the hello will be repeated
    return _renew(state, epoch, hello, now)


def _admit(
    state: PublisherState, identity: bytes, hello: Hello, now: float, key: str
) -> list[Effect]:
    # Admit a worker to the roster, or refuse it.
    admission, peer = state.roster.admit(identity, hello, now, key)
    match admission:
        case "contested" if peer is not None and peer.phase == "away":
            lost = lose(state, peer, now, "contested", "its connection is closed")
            return lost + _admit(state, identity, hello, now, key)
        case "contested" if peer is not None:
            return [Send(Ping(token=0), to=peer.identity)]
        case "taken" if peer is not None:
            return refuse_hello(state, identity, hello, "name-taken", _name_taken(peer), now)
        case "full":
            text = "the roster is full: stop some workers, or start another publisher"
            return refuse_hello(state, identity, hello, "limit", text, now)
        case _:
            assert peer is not None  # noqa: S101 - the other admissions have one
            return _welcome(state, peer, admission, now)


def refuse_hello(
    state: PublisherState, identity: bytes, hello: Hello, code: str, text: str, now: float
) -> list[Effect]:
    """Refuse a worker's hello, and log the refusal once although the hello is repeated.

    A full roster may refuse any number of workers, so the log has a summary of these refusals
    (the notice `full`).
    """
    effects: list[Effect] = [Send(Refuse(code=code, text=text), to=identity)]
    refusal = f"worker {hello.name} is refused ({code}): {text}"
    news = state.note_absence(hello.name, hello.models, code, refusal, now)
    full = code == "limit"
    if full:
        effects.append(Notice("full", refusal, hello.name, warning=True))
    if news:
        effects.append(Notice("refused", refusal, hello.name, warning=not full))
    return effects


def _welcome(state: PublisherState, peer: Peer, admission: str, now: float) -> list[Effect]:
    # Return the effects that begin a session: welcome, announcements, renames.
    effects: list[Effect] = []
    state.welcomed(peer.name)
    if admission != "known":
        effects.append(Notice("joined", f"worker {peer.name} joined", peer.name))
    peer.begin_session(
        {
            model: running
            for model, running in peer.hello.models.items()
            if running is not None and plausible(state, model, running)
        }
        | peer.newer_than_hello()
    )
    effects += resume(state, peer, now)
    for model, running in peer.running.items():
        if running.epoch == state.epoch:
            state.store[model].end_receiving(peer.name, older_than=running.version + 1)
            runs = running.epoch, running.version
            effects += calls.record_running(state, peer, model, runs, now)
    welcome = Welcome(
        epoch=state.epoch,
        data=state.data_endpoint,
        ping_ms=max(1, round(state.timing.ping * 1000)),
        lost_ms=max(2, round(state.timing.lost_after * 1000)),
        models=keep_newest(state, peer),
        shared=state.shared,
        age_ms=0 if state.age is None else math.floor(state.age() * 1000),
        features=_features(state, peer, now),
        keys=[] if state.keys is None else state.keys(peer),
    )
    prepared = state.prepared.values()
    announced = [e for each in prepared for e in _prepare_message(peer, each)]
    follow = Follow(peer.hello.pid)
    # `Follow` comes first, since the process may end soon after the welcome.
    return [follow, Send(welcome, to=peer.identity), *_rename(state, peer), *announced, *effects]


def _features(state: PublisherState, peer: Peer, now: float) -> list[str]:
    """Return the features of a welcome, which may contain a ticket or a token.

    With keys, the worker gets a ticket for its data connection, but no token: that connection is
    not encrypted, so a token could be read and reused. Without keys, a worker with the feature
    `upstream` gets a token, with which it sends `applied` on its data connection. (K9, P22)
    """
    features = [RELAY] if peer.relay else []
    if PARTS in peer.hello.features:
        features.append(PARTS)
    if state.grants is not None and state.secret is not None:
        state.roster.assign_ticket(peer, state.secret(), now)
        return [*features, f"{TICKET}.{peer.ticket}"]
    secret = None if state.keys is not None else state.secret
    if secret is None or UPSTREAM not in peer.hello.features:
        return features
    if not peer.token:
        state.roster.assign_token(peer, secret())
    return [*features, f"{UPSTREAM}.{peer.token}"]


def _rename(state: PublisherState, peer: Peer) -> list[Effect]:
    """Return a `rename` for each model whose latest version has the bytes that the worker runs."""
    effects: list[Effect] = []
    for model, running in peer.running.items() if RENAMING in peer.hello.features else ():
        versions = state.store.get(model)
        version = versions.latest_for(peer.name) if versions else None
        if version is None or version.key <= peer.runs(model):
            continue
        unproven = not running.digest and calls.must_hash(state, model, version.version)
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


# The memory of a model's first version.


def prepare(state: PublisherState, model: str, shared: Shared, nbytes: int) -> list[Effect]:
    """Announce to workers of this host the segment of a model's first version, before it exists."""
    prepared = state.prepare(model, nbytes, shared)
    here = [peer for peer in state.roster.sessions() if peer.shared]
    return [effect for peer in here for effect in _prepare_message(peer, prepared)]


def _prepare_message(peer: Peer, prepared: Prepare) -> list[Effect]:
    """Return the `prepare` for a worker; nothing if it is lost or does not want or know it."""
    wanted = prepared.model in peer.hello.models and MAPPING in peer.hello.features
    return [Send(prepared, to=peer.identity)] if wanted and not peer.lost else []


# Epochs, by which publishers are ordered.


def _never_published(state: PublisherState, hello: Hello) -> str:
    """Return an error text if a hello names a version of this epoch that was never published."""
    for model, running in hello.models.items():
        if running is None or running.epoch != state.epoch or not state.origin:
            continue
        versions = state.store.get(model)
        if versions is None or not versions.had(running.version):
            return (
                f"{hello.name} says that it runs version {running.version} of {model}, of epoch "
                f"{state.epoch}, which is this publisher's own, and this publisher has published "
                "no such version: if another publisher has the same epoch, restart this one"
            )
    return ""


def _stale_epoch_text(state: PublisherState, hello: Hello) -> str:
    # Return the error text for a worker that runs weights of a later epoch.
    text = (
        f"this publisher is of epoch {state.epoch}, but {hello.name} runs weights of epoch "
        f"{hello.epoch}, from another publisher, and "
    )
    if state.age is not None and hello.epoch >= state.started_ms() + EPOCH_LEAP_MAX_MS:
        return text + (
            f"that is more than {EPOCH_LEAP_MAX_MS // 86_400_000} days after this publisher's "
            "start by the clock of its host: set that clock if it is wrong; if not, start the "
            "workers anew"
        )
    if not state.origin:
        return (
            f"this relay has versions of epoch {state.epoch}, and {hello.name} runs weights of the "
            f"later epoch {hello.epoch}: it is admitted once the relay has a version of that epoch"
        )
    chosen = (
        "its epoch was chosen, and stays" if state.age is None else "it did not start after that"
    )
    return text + (
        f"{chosen}: if the other one is the newer, stop this one; if not, stop the other and "
        "restart this one, which then takes over"
    )


def _renewal_pause_text(state: PublisherState, hello: Hello, since: float) -> str:
    return (
        f"{hello.name} runs weights of epoch {hello.epoch}, and this publisher has taken epoch "
        f"{state.epoch} {span(since)} ago, on another worker's word: it takes a later one in "
        f"{span(state.renewal_pause - since)} at the soonest"
    )


def _renew(state: PublisherState, epoch: int, hello: Hello, now: float) -> list[Effect]:
    """Move to a later epoch, which workers see as a restart of the publisher."""
    text = (
        f"epoch {state.epoch} becomes {epoch}: {hello.name} runs weights of epoch "
        f"{hello.epoch}, whose publisher started before this one; one of two clocks is wrong"
    )
    effects: list[Effect] = [Notice("renewed", text, warning=True)]
    for versions in state.store.values():
        gone = calls.give_up(state, versions.pending, "its publisher takes a new epoch", now)
        effects += [*gone, Withdraw(versions.model), *versions.renew(epoch)]
        effects += [Settled(versions.latest)] if versions.latest else []
        state.end_pushes(versions.model)
    state.renew(epoch, now)
    calls.renewed(state, epoch)
    return effects + _require_hellos(state)


def follow_epoch(state: PublisherState, epoch: int) -> list[Effect]:
    """Move to the epoch of a version that is about to be offered; drop all older versions. (R2)"""
    effects: list[Effect] = []
    for versions in state.store.values():
        versions.end_epoch()
        effects.append(Withdraw(versions.model))
        state.end_pushes(versions.model)
    state.take_epoch(epoch)
    return effects + _require_hellos(state)


def _require_hellos(state: PublisherState) -> list[Effect]:
    """Return pongs with the new epoch, which make every worker send a hello."""
    for peer in state.roster:
        peer.forget()
        peer.forget_failures()
    live = (peer for peer in state.roster.sessions() if not peer.lost)
    return [Send(Pong(epoch=state.epoch), to=peer.identity) for peer in live]


def _name_taken(peer: Peer) -> str:
    at = f" behind relay {peer.through[-1]}" if peer.through else ""
    return (
        f"the name {peer.name!r} belongs to a living worker{at} (host "
        f"{peer.hello.host or 'unknown'}, process {peer.hello.pid}): give this one another name, "
        "or stop that one"
    )
