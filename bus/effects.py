"""What a machine wants done. The shells do it; the simulation does it under a virtual clock.

What only a publisher wants is in `publisher/effects.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .messages import Buffer, Message, Shared
from .observed import Check
from .staged import Copying, Patching, StagedVersion


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message: to one worker from a publisher, to the publisher from a worker.

    `upstream`: on the data connection if that may be; it is said again on the other anyway. (W34)
    """

    message: Message
    payload: Buffer | None = None
    to: bytes = b""
    upstream: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that an operator may want to know; `warning`: that an operator should know."""

    kind: str
    text: str
    worker: str = ""
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """Take published messages from this endpoint, in place of any before.

    With a ticket, each connection there needs one, which is spent with it.
    """

    endpoint: str
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class Redial:
    """Make both connections anew: those that there are may lead nowhere."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Ask for a topic, or no longer."""

    topic: bytes
    on: bool


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take memory for a version; without a key, for one that will come. `Granted` answers it."""

    model: str
    key: tuple[int, int] | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Open:
    """Open shared memory for a version; of no model: the publisher's probe. `Opened` answers it."""

    model: str
    key: tuple[int, int]
    shared: Shared
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a version from shared memory, which may take long. `Copied` answers it."""

    copying: Copying


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode a patch, which may take long. `Decoded` answers it."""

    patching: Patching


@dataclass(frozen=True, slots=True)
class Warm:
    """Map shared memory ahead of the first version in it. Nobody waits for it."""

    shared: Shared
    nbytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A version is staged, verified, and may be applied."""

    staged: StagedVersion


@dataclass(frozen=True, slots=True)
class Renamed:
    """The version that runs has another name from now on; its bytes are the same."""

    model: str
    epoch: int
    version: int
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Rejected:
    """A version cannot be taken; the old one still runs."""

    model: str
    epoch: int
    version: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The publisher refuses this worker; it keeps asking."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The publisher has let this worker in."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Examine:
    """Look at what the weights are by now, which may take long. `Examined` answers it."""

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
    | Warm
    | Ready
    | Renamed
    | Rejected
    | Refused
    | Joined
    | Examine
)
