"""The sessions of workers: pings, losses, returns and departures."""

from itertools import islice

from ..effects import Notice, Send
from ..messages import Ping, Pong, Refuse, Rekey
from ..protocol_limits import TICKET_SECONDS
from ..units import span
from . import calls
from .effects import DropRevoked, Effect
from .phases import GRACED
from .roster import Peer
from .serving import announce_owed, announce_undecided, missed
from .state import PublisherState
from .status import is_stuck, phase_of
from .tables import WorkerEvent

FAILURES_SHOWN = 3  # failed models in the log line of a worker that leaves
REVOKED = "this publisher does not allow the key any more: ask the owner of its folder of keys"


def receive_ping(state: PublisherState, peer: Peer, ping: Ping, now: float) -> list[Effect]:
    """Answer a ping with a pong that has the number of each model's newest version."""  # P17
    if peer.update_transports(subscribed=ping.subscribed, shared=ping.shared):
        state.invalidate_view()
    at = state.cut_off_at
    pong = Pong(
        token=ping.token,
        epoch=state.epoch,
        models=latest(state, peer),
        cut_off_ms=0 if at is None else max(1, round(1000 * (now - at))),
    )
    effects: list[Effect] = [Send(pong, to=peer.identity)]
    for model in peer.hello.models:
        if (version := missed(state, peer, model, now)) is not None:
            effects += announce_undecided(state, peer, version, now)
        if peer.relay:
            effects += announce_owed(state, peer, model, now)
    return effects


def returned(state: PublisherState, peer: Peer, now: float) -> list[Effect]:
    """Handle a message of a worker that was lost or unresponsive; a lost worker is live again."""
    keep_newest(state, peer)
    return resume(state, peer, now) if peer.lost else []


def latest(state: PublisherState, peer: Peer) -> dict[str, int]:
    """Return the number of the newest version for a worker, by model."""
    latest: dict[str, int] = {}
    for model in peer.hello.models:
        versions = state.store.get(model)
        version = versions.latest_for(peer.name) if versions else None
        if version is not None:
            latest[model] = version.version
    return latest


def keep_newest(state: PublisherState, peer: Peer) -> dict[str, int]:
    """Return `latest` for a worker that joins (again), and keep the versions that it will fetch.

    Otherwise the next publish might overwrite such a version before the fetch arrives.
    """  # P9
    for model in peer.hello.models:
        versions = state.store.get(model)
        version = versions.latest_for(peer.name) if versions else None
        if versions is None or version is None or peer.runs(model) >= version.key:
            continue
        if versions.serves(peer):
            continue
        version = versions.get_latest_for(peer.name)
        if version is not None and peer.runs(model) < version.key:
            version.add_receiver(peer.name)
    return latest(state, peer)


def resume(state: PublisherState, peer: Peer, now: float) -> list[Effect]:
    """Handle the return of a worker: announce the undecided versions that it has to stage."""
    effects: list[Effect] = []
    if peer.lost:
        peer.move("spoke")
        effects.append(Notice("back", f"worker {peer.name} answers again", peer.name))
    undecided = calls.returned(state, peer, now)
    if not state.origin:  # a relay's versions have no calls
        pending = (v.pending for m, v in state.store.items() if m in peer.hello.models)
        undecided = [v for v in pending if v is not None and state.roster.is_for(peer, v.only)]
    for version in undecided:
        effects += announce_undecided(state, peer, version, now)
    return effects


def unreachable(
    state: PublisherState, identity: bytes, now: float, ended: str = ""
) -> list[Effect]:
    """Handle a closed connection. `ended`: how the process ended; empty if it may run.

    A worker whose process may still run becomes `away`, since it may reconnect. It becomes `lost`
    if another instance has requested its name.
    """  # P18
    peer = state.roster.by_identity(identity)
    if peer is None:
        return []
    if peer.lost:  # calls stop waiting for a silent worker if its process has ended
        return calls.lost(state, peer, now, gone=True) if ended else []
    if ended:
        return lose(state, peer, now, "ended", ended)
    peer.disconnected(now)
    if peer.contested_at is not None:
        return lose(state, peer, now, "contested", "its connection is closed")
    return []


def tick(state: PublisherState, now: float) -> list[Effect]:
    """Handle workers that are silent or away for too long, stuck or unresponsive."""  # P18
    effects: list[Effect] = []
    for peer in state.roster.silent(now):
        effects += lose(state, peer, now, "silent", f"silent for {span(now - peer.heard_at)}")
    for peer in state.roster.long_away(now, state.timing.gone_after):
        why = f"its connection is closed, and it opened no other in {state.timing.gone_after:g} s"
        effects += lose(state, peer, now, "overdue", why)
    live = [peer for peer in state.roster if not peer.lost]
    effects += [_toggle_stuck(state, p, now) for p in live if p.stuck != is_stuck(state, p, now)]
    for peer in live:
        if now >= peer.unresponsive_after:  # P9: keep only the version that it reports it receives
            for versions in state.store.values():
                incoming = peer.incoming.get(versions.model)
                versions.receives_only(peer.name, incoming.version if incoming else 0)
    return effects


def lose(
    state: PublisherState, peer: Peer, now: float, event: WorkerEvent, why: str
) -> list[Effect]:
    """Mark a worker as lost. The event decides how long calls wait for its return (`GRACED`).

    The workers behind a lost relay are lost, too, but may soon return through another relay. (R5)
    """
    phases = _activity(state, peer, now)
    peer.lose(event, why + (f" while {phases}" if phases else ""))
    drop_worker_state(state, peer)
    notice = Notice("lost", f"worker {peer.name} is lost: {peer.why}", peer.name, warning=True)
    effects = [notice, *calls.lost(state, peer, now, gone=event not in GRACED)]
    return effects + (lose_behind(state, peer, now) if peer.relay else [])


def lose_behind(state: PublisherState, relay: Peer, now: float) -> list[Effect]:
    """Mark the workers behind a relay as lost."""
    effects: list[Effect] = []
    for peer in state.roster.workers_behind(relay.name):
        if not peer.lost:
            effects += lose(state, peer, now, "silent", f"its relay {relay.name} is gone")
            state.roster.touch(peer)
    return effects


def _toggle_stuck(state: PublisherState, peer: Peer, now: float) -> Notice:
    """Change whether a worker counts as stuck, and return a notice of the change."""
    if not peer.toggle_stuck():
        return Notice("back", f"worker {peer.name} moves again", peer.name)
    return Notice("stuck", f"worker {peer.name} is stuck: {_activity(state, peer, now)}", peer.name)


def _activity(state: PublisherState, peer: Peer, now: float) -> str:
    return "; ".join(phase_of(state, m, i, now) for m, i in peer.incoming.items())


def drop_worker_state(state: PublisherState, peer: Peer) -> None:
    """Drop a worker's deliveries, and the versions that are kept for it."""
    state.invalidate_view()
    peer.forget()
    for versions in state.store.values():
        versions.forget_worker(peer.name)


def leave(state: PublisherState, peer: Peer, why: str, now: float) -> list[Effect]:
    """Remove a worker that leaves, so that no call waits for it any more."""
    drop_worker_state(state, peer)
    state.roster.forget(peer)
    text = f"worker {peer.name} has left: {why}"
    failed = ((m, v, r) for m, (v, r) in peer.seen.failed.items() if v > peer.runs(m)[1])
    for model, version, reason in islice(failed, FAILURES_SHOWN):
        text += f"; it had failed version {version} of {model}: {reason}"
    state.note_absence(peer.name, peer.hello.models, "left", text, now)
    effects = [Notice("left", text, peer.name), *calls.move(state, peer, "left", now)]
    return effects + (lose_behind(state, peer, now) if peer.relay else [])


# Keys.


def redeem(state: PublisherState, ticket: str, now: float) -> tuple[str, str] | None:
    """Use up a ticket; return (name, key) of its worker, or None if it is invalid."""  # K6
    peer = state.roster.redeem(ticket)
    return (peer.name, peer.key) if peer and now - peer.ticket_at < TICKET_SECONDS else None


def revoke(state: PublisherState, now: float) -> list[Effect]:
    """End the sessions of workers whose keys are not allowed any more."""  # K8
    effects: list[Effect] = []
    for peer in state.roster.sessions():
        grant = state.grants.of(peer.key) if state.grants is not None else None
        if grant is None or not grant.admits(peer.name, relay=peer.relay):
            effects.append(Send(Refuse(code="revoked", text=REVOKED), to=peer.identity))
            effects += leave(state, peer, "its key was revoked", now)
    return [*effects, DropRevoked()]


def rekeyed(state: PublisherState) -> list[Effect]:
    """Ping every live worker; each gets the new group keys in answer to its pong.

    Keys are sent only in answer to a message, since a routing id may belong to another connection
    by now.
    """  # E6
    peers = state.roster.sessions()
    for peer in peers:
        peer.outdate_keys()
    return [Send(Ping(token=0), to=peer.identity) for peer in peers if not peer.lost]


def send_keys(state: PublisherState, peer: Peer) -> list[Effect]:
    """Answer a worker's message with a `rekey`, if the worker lacks the current group keys."""
    if not peer.lacks_keys:
        return []
    keys = state.keys(peer) if state.keys is not None else []
    peer.note_keys_sent()
    return [Send(Rekey(epoch=state.epoch, keys=keys), to=peer.identity)] if keys else []
