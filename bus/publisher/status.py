"""The status of workers and versions, as a publisher's or relay's user reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..messages import Failed, Transport
from ..protocol_limits import ERROR_MAX
from ..units import span
from .roster import Delivery, Peer
from .state import PublisherState
from .version import Version


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status of one worker.

    Attributes:
        name: The worker's name.
        state: `live`, `stuck` (the worker answers, but makes no progress) or `lost`.
        road: The worker's transport: `pushed` (chunks that are sent to all workers at once),
            `pulled` (chunks that the worker fetches, until pushes reach it) or `shared` (shared
            memory).
        models: The models that the worker wants.
        running: By model, the (epoch, version) that the worker runs.
        phase: By model, a text on what the worker does with a newer version, such as "receiving
            version 5, 3 of 8 chunks here". Models without a newer version are missing.
        progress: By model, (chunks that have arrived, all chunks) of the version that is arriving.
        silent_s: Seconds since the worker's last message.
        client, host, pid: The worker's client, host and process id, as the worker reports them.
        relay: Whether it is a relay, which passes versions on to other workers.
        through: The names of the relays before the worker, the nearest to the publisher first.
    """

    __module__ = "weightbus.types"

    name: str
    state: Literal["live", "stuck", "lost"]
    road: Transport
    models: tuple[str, ...]
    running: dict[str, tuple[int, int]]
    phase: dict[str, str]
    progress: dict[str, tuple[int, int]]
    silent_s: float
    client: str
    host: str
    pid: int
    relay: bool = False
    through: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version that a relay has for its workers, or that is arriving there.

    Attributes:
        epoch, version: The version's name.
        nbytes: The size of its tensors.
        whole: Whether all of it is here and verified.
        progress: (chunks that have arrived, all chunks).
        digest: The version's digest; empty until the version is whole.
        metadata: The publisher's metadata.
    """

    __module__ = "weightbus.types"

    epoch: int
    version: int
    nbytes: int
    whole: bool
    progress: tuple[int, int]
    digest: str
    metadata: Mapping[str, str]


def transport_of(peer: Peer) -> Transport:
    """Return the transport over which a worker receives versions."""
    return "shared" if peer.shared else "pushed" if peer.subscribed else "pulled"


def is_stuck(state: PublisherState, peer: Peer, now: float) -> bool:
    """True if a delivery to the worker has made no progress for `stuck_after`."""
    return any(now - i.since >= state.timing.stuck_after for i in peer.incoming.values())


def status_of(state: PublisherState, peer: Peer, now: float) -> WorkerStatus:
    """Return the status of a worker."""
    return WorkerStatus(
        name=peer.name,
        state="lost" if peer.lost else "stuck" if is_stuck(state, peer, now) else "live",
        road=transport_of(peer),
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
        relay=peer.relay,
        through=peer.through,
    )


def held(state: PublisherState) -> dict[str, tuple[HeldVersion, ...]]:
    """Return, by model, the versions that a relay has, the oldest first."""
    return {
        model: tuple(_held(version) for version in versions)
        for model, versions in state.store.items()
    }


def _held(version: Version) -> HeldVersion:
    chunks, (epoch, number) = version.chunks, version.key
    return HeldVersion(
        epoch=epoch,
        version=number,
        nbytes=version.layout.nbytes,
        whole=chunks.whole,
        progress=(chunks.plan.count if chunks.whole else chunks.here, chunks.plan.count),
        digest=version.digest,
        metadata=dict(version.metadata),
    )


def phase_of(state: PublisherState, model: str, incoming: Delivery, now: float) -> str:
    """Return a text on what a worker does with a version, and for how long without progress."""
    text = f"{incoming.phase} version {incoming.version}"
    if incoming.phase == "receiving":
        text += f", {incoming.chunks} of {chunks_of(state, model, incoming)} chunks here"
    if incoming.waits:
        text += f", which waits for users of the old weights: {incoming.waits}"
    idle = now - incoming.since
    return text + (f", no progress for {span(idle)}" if idle >= state.timing.quiet else "")


def reason_of(failed: Failed) -> str:
    """Return a failure's code and text, cut to `ERROR_MAX` characters."""
    return f"{failed.code}: {failed.text}"[:ERROR_MAX]


def chunks_of(state: PublisherState, model: str, incoming: Delivery) -> int:
    """Return the number of chunks of a delivery; if the version is gone, of those that arrived."""
    versions = state.store.get(model)
    version = versions.find(incoming.version) if versions is not None else None
    coming = version.find(incoming.patch) if version is not None else None
    return coming.plan.count if coming is not None else incoming.chunks
