"""Who runs what, and what everybody is doing: the roster as the user of a publisher sees it."""

from dataclasses import dataclass
from typing import Literal

from ..limits import ERROR_MAX
from ..messages import Failed
from ..observed import Road
from ..units import span
from .roster import Delivery, Peer
from .state import PublisherState


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as an operator sees it.

    Attributes:
        name: Its name.
        state: `live`, `stuck` (it answers, but makes no progress) or `lost`.
        road: How versions come to it: `pushed` to all at once, `pulled` chunk by chunk (until
            pushes reach it), or `shared`, in memory.
        models: The models that it wants.
        running: By model, the (epoch, version) that it runs.
        phase: By model, what it does with a newer version, such as "receiving 3 of 8 chunks of
            version 5"; empty when idle.
        progress: By model that is arriving: how many chunks have arrived, and how many there are.
        silent_s: Seconds since its last message.
        client, host, pid: Its client, host and process id, as it reports them.
    """

    __module__ = "weightbus.types"

    name: str
    state: Literal["live", "stuck", "lost"]
    road: Road
    models: tuple[str, ...]
    running: dict[str, tuple[int, int]]
    phase: dict[str, str]
    progress: dict[str, tuple[int, int]]
    silent_s: float
    client: str
    host: str
    pid: int


def road_of(peer: Peer) -> Road:
    """Return how versions come to a worker."""
    return "shared" if peer.shared else "pushed" if peer.subscribed else "pulled"


def is_stuck(state: PublisherState, peer: Peer, now: float) -> bool:
    """Return whether a worker has something on its way that has not moved for long."""
    return any(now - i.since >= state.timing.stuck_after for i in peer.incoming.values())


def status_of(state: PublisherState, peer: Peer, now: float) -> WorkerStatus:
    """Return how things stand with a worker."""
    return WorkerStatus(
        name=peer.name,
        state="lost" if peer.lost else "stuck" if is_stuck(state, peer, now) else "live",
        road=road_of(peer),
        models=tuple(peer.hello.models),
        running={m: (r.epoch, r.version) for m, r in peer.running.items()},
        phase={m: phase_of(state, m, i, now) for m, i in peer.incoming.items()},
        progress={
            m: (i.chunks, chunks_of(state, m, i))
            for m, i in peer.incoming.items()
            if i.phase == "receiving"
        },
        silent_s=now - peer.heard_at,
        client=peer.hello.client,
        host=peer.hello.host,
        pid=peer.hello.pid,
    )


def phase_of(state: PublisherState, model: str, incoming: Delivery, now: float) -> str:
    """Say what a worker is doing with a version, and since when it has not moved."""
    text = f"{incoming.phase} version {incoming.version}"
    if incoming.phase == "receiving":
        text += f", {incoming.chunks} of {chunks_of(state, model, incoming)} chunks here"
    if incoming.waits:
        text += f", which waits for who uses the old weights: {incoming.waits}"
    idle = now - incoming.since
    return text + (f", no progress for {span(idle)}" if idle >= state.timing.quiet else "")


def reason_of(failed: Failed) -> str:
    """Say why a worker does not run a version, in so many characters as people are told."""
    return f"{failed.code}: {failed.text}"[:ERROR_MAX]


def chunks_of(state: PublisherState, model: str, incoming: Delivery) -> int:
    """Return how many chunks the version has; what is here, if it is gone by now."""
    versions = state.store.get(model)
    version = versions.find(incoming.version) if versions is not None else None
    coming = version.find(incoming.patch) if version is not None else None
    return coming.plan.count if coming is not None else incoming.chunks
