"""Faults of this publisher's own: what is given up where a step failed half-way.

An exception is a defect, and after one the record of whatever it was about may be half changed. So
that alone is given up, by name, in a way that workers and callers know already: a worker joins
again, a call of publish fails, a push ends early. Everybody else goes on.
"""

from collections.abc import Collection

from ..effects import Send
from ..messages import Refuse
from . import calls
from .effects import Effect
from .sessions import lose
from .state import PublisherState
from .version import Offer, Version


def drop(state: PublisherState, identity: bytes, why: str, now: float) -> list[Effect]:
    """End the session of a worker: what is known of it may be wrong. It says hello, and is back."""
    peer = state.roster.by_identity(identity)
    if peer is None:
        return []
    state.roster.disconnect(peer)
    refuse = Send(Refuse(code="unknown-worker", text=f"{why}: say hello again"), to=identity)
    return [refuse, *([] if peer.lost else lose(state, peer, now, "silent", why))]


def give_up(state: PublisherState, version: Version, why: str, now: float) -> list[Effect]:
    """Fail the calls that published a version: its bytes cannot be read, or not be sent."""
    version.ends.clear()
    version.claims.clear()
    state.store[version.model].hashed(version)  # or it would be kept for as long as that takes
    return calls.give_up(state, version, why, now)


def forget(state: PublisherState, number: int) -> None:
    """Forget a call of which it cannot be said what becomes of it; the caller is told."""
    call = state.calls.pop(number, None)
    versions = None if call is None else state.store.get(call.version.model)
    if call is not None and versions is not None and call.version is versions.pending:
        versions.drop(call.version)


def unpublish(state: PublisherState, number: int, offered: Offer) -> bool:
    """Forget a call that failed; return whether what it offered has become a version all the same.

    The memory of a version is the machine's, and is let go of as usual.
    """
    state.calls.pop(number, None)
    versions = state.store.get(offered.model)
    for version in [] if versions is None else [*versions]:
        if versions is not None and version.snapshot is offered.snapshot:
            if version.phase == "pending":
                versions.drop(version)
            return True
    return False


def stop_pushing(state: PublisherState, topics: Collection[bytes]) -> None:
    """Push no more on these topics: workers fetch what they miss."""
    for topic in topics:
        state.pushes.pop(topic, None)
