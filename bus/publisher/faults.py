"""Recovers from exceptions in the publisher: drops the record that a failed step worked on.

An exception is a defect, and the record that the step worked on may be inconsistent. So that record
is dropped, in a way that workers and callers already handle: a worker joins again, a call of
publish fails, or a push ends early. All other workers, calls and pushes continue.
"""

from ..effects import Send
from ..messages import Refuse
from . import calls
from .effects import Effect
from .sessions import lose
from .state import PublisherState
from .version import Version, VersionOffer


def drop(state: PublisherState, identity: bytes, why: str, now: float) -> list[Effect]:
    """End the session of a worker whose record may be wrong. The worker then joins again."""
    peer = state.roster.by_identity(identity)
    if peer is None:
        return []
    state.roster.disconnect(peer)
    refuse = Send(Refuse(code="unknown-worker", text=f"{why}: say hello again"), to=identity)
    return [refuse, *([] if peer.lost else lose(state, peer, now, "silent", why))]


def give_up(state: PublisherState, version: Version, why: str, now: float) -> list[Effect]:
    """Fail the calls that published a version whose bytes cannot be read or sent."""
    state.store[version.model].hashed(version)  # else the version would be kept until it is hashed
    return calls.give_up(state, version, why, now)


def forget(state: PublisherState, number: int) -> None:
    """Drop a call whose result cannot be determined, before the shell fails it."""
    call = state.close(number)
    if call is not None and call.group is not None:
        call.group.end("the publisher has failed at a version that is published as one with it")
    versions = None if call is None else state.store.get(call.version.model)
    if call is not None and versions is not None and call.version is versions.pending:
        versions.drop(call.version)


def unpublish(state: PublisherState, number: int, offered: VersionOffer) -> bool:
    """Drop a call that failed; return True if its offer has become a version before the failure.

    The machine owns the memory of that version, and frees it as usual.
    """
    state.close(number)
    versions = state.store.get(offered.model)
    for version in [] if versions is None else [*versions]:
        if versions is not None and version.snapshot is offered.snapshot:
            if version.phase == "pending":
                versions.drop(version)
            return True
    return False
