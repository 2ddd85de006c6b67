"""The effects that a state machine returns; shells, or the simulation, carry them out.

The effects of publishers alone are in `publisher/effects.py`.
"""

from collections.abc import Mapping

import msgspec

from .messages import Buffer, Message, Shared
from .observed import Check
from .staged import Copying, Patching, StagedVersion


class Send(msgspec.Struct, frozen=True):
    """Send a message: from a publisher to one worker, or from a worker to its publisher.

    `upstream`: on the data connection if possible; it is repeated on the control channel. (W34)
    """

    message: Message
    payload: Buffer | None = None
    to: bytes = b""
    upstream: bool = False


class Notice(msgspec.Struct, frozen=True):
    """Log an event for operators; `warning`: an operator should act on it."""

    kind: str
    text: str
    worker: str = ""
    warning: bool = False


class Connect(msgspec.Struct, frozen=True):
    """Connect to this data endpoint, in place of the previous one.

    If there is a ticket, it is good for one connection; each further one needs a new ticket.
    """

    endpoint: str
    ticket: str = ""


class Redial(msgspec.Struct, frozen=True):
    """Reconnect both sockets: the present connections may be dead."""


class Subscribe(msgspec.Struct, frozen=True):
    """Subscribe to a topic, or unsubscribe."""

    topic: bytes
    on: bool


class Reserve(msgspec.Struct, frozen=True):
    """Allocate memory for a version; without a key, ahead of one. `Granted` answers it."""

    model: str
    key: tuple[int, int] | None
    nbytes: int


class Open(msgspec.Struct, frozen=True):
    """Open the shared memory of a version; no model: the publisher's probe. `Opened` answers it."""

    model: str
    key: tuple[int, int]
    shared: Shared
    nbytes: int


class Copy(msgspec.Struct, frozen=True):
    """Copy a version from shared memory in the background. `Copied` answers it."""

    copying: Copying


class Decode(msgspec.Struct, frozen=True):
    """Decode a patch in the background. `Decoded` answers it."""

    patching: Patching


class Prefault(msgspec.Struct, frozen=True):
    """Map shared memory ahead of the first version in it. Nothing waits for it."""

    shared: Shared
    nbytes: int


class Ready(msgspec.Struct, frozen=True):
    """A version is staged and may be applied."""

    staged: StagedVersion


class WholeStaged(msgspec.Struct, frozen=True):
    """A version is staged, and may be applied once its publisher commits it."""

    staged: StagedVersion


class Renamed(msgspec.Struct, frozen=True):
    """The running version has another epoch and number from now on; its bytes are the same."""

    model: str
    epoch: int
    version: int
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])


class Rejected(msgspec.Struct, frozen=True):
    """A version was rejected; the old one still runs."""

    model: str
    epoch: int
    version: int
    code: str
    text: str


class Refused(msgspec.Struct, frozen=True):
    """The publisher refuses this worker, which keeps trying."""

    code: str
    text: str


class Joined(msgspec.Struct, frozen=True):
    """The publisher has admitted this worker."""

    epoch: int


class Flushed(msgspec.Struct, frozen=True):
    """The publisher has received all that was sent before `Flush`."""

    mark: int


class Examine(msgspec.Struct, frozen=True):
    """Compute the checksums of the model's weights in the background. `Examined` answers it."""

    check: Check


Effect = (
    Send
    | Notice
    | Connect
    | Redial
    | Subscribe
    | Reserve
    | Open
    | Copy
    | Decode
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
