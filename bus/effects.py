"""Defines the effects that a state machine returns, and a shell (or the simulation) carries out.

A machine has no sockets and no threads; the shell is the loop around it (`bus/net/`). The effects
that only publishers have are in `publisher/effects.py`.
"""

from collections.abc import Mapping

import msgspec

from .headers import Buffer
from .messages import Check, Shared
from .staged import Copying, Patching, SourceFetch, StagedVersion
from .structs import Message


class Send(msgspec.Struct, frozen=True):
    """Send a message: from a publisher to one worker, or from a worker to its publisher.

    `to`: a publisher's routing id of the worker. `upstream`: send a worker's report on the data
    connection if possible; the worker repeats the report on the control channel. (W34)
    """

    message: Message
    payload: Buffer | None = None
    to: bytes = b""
    upstream: bool = False


class Notice(msgspec.Struct, frozen=True):
    """Log an event for operators; `warning` is true if an operator should act on the event."""

    kind: str
    text: str
    worker: str = ""
    warning: bool = False


class Connect(msgspec.Struct, frozen=True):
    """Replace the data connection with one to this endpoint.

    A ticket is valid for one connection, so each further connection needs a new ticket. Empty: no
    ticket is needed.
    """

    endpoint: str
    ticket: str = ""


class Redial(msgspec.Struct, frozen=True):
    """Reconnect both sockets, since the present connections may be dead.

    `at`: the index of the control address. `pause`: seconds to wait before. If not `same`, the
    publisher may be a different one, so the data connection is closed and not opened again.
    """

    at: int = 0
    pause: float = 0.0
    same: bool = True


class Probe(msgspec.Struct, frozen=True):
    """Find out whether a publisher answers at a control address (index); answered by `Probed`."""

    at: int


class Subscribe(msgspec.Struct, frozen=True):
    """Subscribe to a topic if `on` is True; unsubscribe if it is False."""

    topic: bytes
    on: bool


class Reserve(msgspec.Struct, frozen=True):
    """Allocate memory for a version (if `key` is None, for a later one); answered by `Granted`."""

    model: str
    key: tuple[int, int] | None
    nbytes: int


class Open(msgspec.Struct, frozen=True):
    """Open a version's segment (empty model: the publisher's probe); answered by `Opened`."""

    model: str
    key: tuple[int, int]
    shared: Shared
    nbytes: int


class Copy(msgspec.Struct, frozen=True):
    """Copy a version from shared memory in the background; answered by `Copied`."""

    copying: Copying


class Decode(msgspec.Struct, frozen=True):
    """Decode a patch in the background; answered by `Decoded`."""

    patching: Patching


class FetchFromSources(msgspec.Struct, frozen=True):
    """Fetch chunks from sources in the background; answered by `SourceFetched`, until `over`."""

    job: SourceFetch


class Prefault(msgspec.Struct, frozen=True):
    """Map a segment before the first version is written into it; this effect has no answer."""

    shared: Shared
    nbytes: int


class Ready(msgspec.Struct, frozen=True):
    """Hand over a staged version that may be applied, at once with its companions (`others`)."""

    staged: StagedVersion
    others: tuple[StagedVersion, ...] = ()


class WholeStaged(msgspec.Struct, frozen=True):
    """Hand over a staged version that may be applied after its publisher has committed it."""

    staged: StagedVersion


class Renamed(msgspec.Struct, frozen=True):
    """Report that the running version now has another epoch and number, but the same bytes."""

    model: str
    epoch: int
    version: int
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])


class Rejected(msgspec.Struct, frozen=True):
    """Report that a version was rejected; the previous version still runs."""

    model: str
    epoch: int
    version: int
    code: str
    text: str


class Refused(msgspec.Struct, frozen=True):
    """Report that the publisher refuses this worker; the worker keeps trying to join."""

    code: str
    text: str


class Joined(msgspec.Struct, frozen=True):
    """Report that the publisher has admitted this worker."""

    epoch: int


class Flushed(msgspec.Struct, frozen=True):
    """Report that the publisher has received all messages sent before `Flush(mark)`."""

    mark: int


class Examine(msgspec.Struct, frozen=True):
    """Compute checksums of a model's weights in the background; answered by `Examined`."""

    check: Check


Effect = (
    Send
    | Notice
    | Connect
    | Redial
    | Probe
    | Subscribe
    | Reserve
    | Open
    | Copy
    | Decode
    | FetchFromSources
    | Prefault
    | Ready
    | WholeStaged
    | Renamed
    | Rejected
    | Refused
    | Joined
    | Flushed
    | Examine
)
