"""Handles the reports of relays (`below`) on the workers behind them. (R5 to R7)

A report has a row for each worker. A row contains the worker's whole state, so it may be repeated.
A changed row advances the calls of publish as the worker's own report would. Digests are not
compared here, since the relay has compared them.
"""

from msgspec.structs import replace

from ..effects import Notice
from ..messages import RELAY, Below, Doing, Failed, Hello, Running, WorkerRow
from ..protocol_limits import RELAYS_MAX
from . import calls, joining, sessions
from .effects import Effect
from .roster import Peer
from .state import PublisherState


def below(state: PublisherState, relay: Peer, message: Below, now: float) -> list[Effect]:
    """Handle a relay's report of the workers behind it."""
    if not relay.relay or message.epoch != state.epoch:
        return []
    effects: list[Effect] = []
    state.end_contest(relay.name, None if message.first else message.left)
    for name in message.left:
        peer = state.roster.by_name(name)
        if peer is not None and peer.through[:1] == (relay.name,):
            effects += sessions.leave(state, peer, f"as relay {peer.through[-1]} reports", now)
    if message.first:
        relay.expect_rows(peer.name for peer in state.roster.workers_behind(relay.name))
    for row in message.rows:
        relay.note_row(row.name)
        if state.above is not None and row.instance == state.above.instance:
            if loop := _loop_text(state.above.name, relay, row):
                return effects + _break_loop(state, relay, loop, now)
        else:
            effects += _handle_row(state, relay, row, now)
    for name in () if message.more else relay.end_first_report():
        peer = state.roster.by_name(name)
        if peer is not None and peer.through[:1] == (relay.name,) and not peer.lost:
            effects += sessions.lose(state, peer, now, "silent", f"relay {relay.name} lacks it")
    return effects


def tick(state: PublisherState, now: float) -> list[Effect]:
    """Handle each row that was set aside, once its worker's session elsewhere is lost. (R6)

    The relay does not repeat the row, since a relay reports only changes.
    """
    effects: list[Effect] = []
    for name, (by, row, at) in [*state.contested.items()]:
        known, relay = state.roster.by_name(name), state.roster.by_name(by)
        if relay is None or relay.lost:
            state.end_contest(by, [name])
        elif known is None or known.lost:
            aged = replace(row, heard_ms=row.heard_ms + round(1000 * (now - at)))
            effects += _handle_row(state, relay, aged, now)
    return effects


def _loop_text(own: str, relay: Peer, row: WorkerRow) -> str:
    """Return an error text if this relay must break the loop that `row` shows; else "".

    Each relay of a loop finds itself (`row`) in the report of a worker. The relay with the least
    name breaks the loop: it ends the session with that worker.
    """
    names = (own, relay.name, *row.through)
    if own != min(names):
        return ""
    return (
        f"these relays are in a loop, each below the one before it: {' > '.join((*names, own))}; "
        f"give {relay.name} another upstream address"
    )


def _break_loop(state: PublisherState, relay: Peer, loop: str, now: float) -> list[Effect]:
    """End the session of a relay from which this relay itself receives its versions."""
    state.note_loop(relay.instance, loop, now)
    effects = sessions.leave(state, relay, "it is in a loop", now)
    identity, hello = relay.identity, relay.hello
    return effects + joining.refuse_hello(state, identity, hello, "name-taken", loop, now)


def _handle_row(state: PublisherState, relay: Peer, row: WorkerRow, now: float) -> list[Effect]:
    """Handle the row of one worker behind a relay."""
    through, heard_at = (relay.name, *row.through), now - row.heard_ms / 1000
    known = state.roster.by_name(row.name)
    state.end_contest(relay.name, [row.name])
    if len(through) > RELAYS_MAX or row.name in through:
        text = f"relay {relay.name} is in a loop: {' > '.join((*through, row.name))}"
        return [Notice("loop", text, relay.name, warning=True)]
    if known is not None and known.through[:1] != through[:1] and not known.lost:
        same = known.instance == row.instance
        if row.state == "lost":
            return []  # the worker has moved, so this relay has lost it
        if not same or heard_at <= known.heard_at:
            state.contest(relay.name, row, now)
            if same:
                return []
            text = (
                f"worker {row.name} is {_place(known.through)} and {_place(through)}, in two "
                "processes: give one another name"
            )
            return [Notice("name-taken", text, row.name, warning=True)]
    effects, hello = list[Effect](), _hello_of(row)
    if known is None or known.through != through or known.hello != hello:
        if known is not None:
            sessions.drop_worker_state(state, known)
            if known.relay and not known.through:  # its workers are behind `relay` now, too
                effects += sessions.lose_behind(state, known, now)
        peer = state.roster.add_behind_relay(hello, through, now)
        if peer is None:
            text = f"the roster is full: worker {row.name} behind relay {relay.name} is left out"
            return [Notice("full", text, relay.name, warning=True)]
        state.welcomed(row.name)
        effects.append(Notice("joined", f"worker {row.name} is {_place(through)}", row.name))
        calls.returned(state, peer, now)
    else:
        peer = known
        if peer.lost and row.state != "lost":
            peer.move("spoke")
            effects.append(Notice("back", f"worker {peer.name} answers again", peer.name))
            calls.returned(state, peer, now)
    peer.heard_through_relay(heard_at)
    peer.update_transports(subscribed=row.road == "pushed", shared=row.road == "shared")
    for model, doing in row.models.items():
        effects += _handle_model(state, peer, model, doing, now)
    if row.state == "lost" and not peer.lost:
        effects += sessions.lose(state, peer, now, "silent", f"as relay {through[-1]} reports")
    state.roster.touch(peer)
    return effects


def _handle_model(
    state: PublisherState, peer: Peer, model: str, doing: Doing, now: float
) -> list[Effect]:
    """Handle the state of one model at a worker behind a relay."""
    versions, effects = state.store.get(model), list[Effect]()
    current = versions is not None and doing.epoch == state.epoch
    runs, before = (doing.epoch, doing.version), peer.runs(model)
    if not doing.version:
        peer.runs_nothing(model)
    elif runs > before:
        known = versions if current and doing.took_us else None
        took = 0.0 if known is None else now - known.times.get(doing.version, now)
        peer.applied(model, Running(*runs, ""), took, doing.patch, current=current)
        if known is not None:
            version = known.find(doing.version)
            calls.record_transport_behind(state, peer, version, doing.patch)
        effects += calls.record_running(state, peer, model, runs, now)
    peer.receives(model, doing, now)
    version = versions.find(doing.incoming) if versions is not None else None
    if doing.phase == "staged" and version is not None:
        calls.record_transport_behind(state, peer, version, doing.incoming_patch)
        terms = calls.announced_terms(state, version)
        if terms.commit == "together" or terms.acknowledge == "staged":  # else no call awaits it
            effects += calls.move(state, peer, "staged", now, version)
    reason = doing.failed, doing.error
    if doing.failed and peer.seen.failed.get(model) != reason:
        code, _, text = doing.error.partition(": ")
        failed = Failed(
            model=model,
            epoch=state.epoch,
            version=doing.failed,
            code=code or "failed",
            text=text,
            intact=bool(doing.version) or before == (0, 0),
        )
        effects += calls.failed(state, peer, failed, now)
        peer.keep_failure(model, *reason)
    return effects


def _hello_of(row: WorkerRow) -> Hello:
    """Return a hello for a worker behind a relay, with the fields that its row contains."""
    return Hello(
        name=row.name,
        instance=row.instance,
        models=dict.fromkeys(row.models),
        features=[RELAY] if row.relay else [],
        client=row.client,
        host=row.host,
        pid=row.pid,
    )


def _place(through: tuple[str, ...]) -> str:
    return f"behind relay {' > '.join(through)}" if through else "connected to this publisher"
