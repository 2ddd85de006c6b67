"""What a machine wants done. The shells do it; the simulation does it under a virtual clock.

What only a publisher wants is in `publisher/effects.py`.
"""

from collections.abc import Mapping

import msgspec

from .messages import Buffer, Message, Shared
from .observed import Check
from .staged import Copying, Patching, StagedVersion


class Send(msgspec.Struct, frozen=True):
    """Send a message: to one worker from a publisher, to the publisher from a worker.

    `upstream`: on the data connection if that may be; it is said again on the other anyway. (W34)
    """

    message: Message
    payload: Buffer | None = None
    to: bytes = b""
    upstream: bool = False


class Notice(msgspec.Struct, frozen=True):
    """Something that an operator may want to know; `warning`: that an operator should know."""

    kind: str
    text: str
    worker: str = ""
    warning: bool = False


class Connect(msgspec.Struct, frozen=True):
    """Take published messages from this endpoint, in place of any before.

    With a ticket, each connection there needs one, which is spent with it.
    """

    endpoint: str
    ticket: str = ""


class Redial(msgspec.Struct, frozen=True):
    """Make both connections anew: those that there are may lead nowhere."""


class Subscribe(msgspec.Struct, frozen=True):
    """Ask for a topic, or no longer."""

    topic: bytes
    on: bool


class Reserve(msgspec.Struct, frozen=True):
    """Take memory for a version; without a key, for one that will come. `Granted` answers it."""

    model: str
    key: tuple[int, int] | None
    nbytes: int


class Open(msgspec.Struct, frozen=True):
    """Open shared memory for a version; of no model: the publisher's probe. `Opened` answers it."""

    model: str
    key: tuple[int, int]
    shared: Shared
    nbytes: int


class Copy(msgspec.Struct, frozen=True):
    """Copy a version from shared memory, which may take long. `Copied` answers it."""

    copying: Copying


class Decode(msgspec.Struct, frozen=True):
    """Decode a patch, which may take long. `Decoded` answers it."""

    patching: Patching


class Warm(msgspec.Struct, frozen=True):
    """Map shared memory ahead of the first version in it. Nobody waits for it."""

    shared: Shared
    nbytes: int


class Ready(msgspec.Struct, frozen=True):
    """A version is staged, verified, and may be applied."""

    staged: StagedVersion


class Whole(msgspec.Struct, frozen=True):
    """A version is staged and verified, and may be applied once its publisher commits it."""

    staged: StagedVersion


class Renamed(msgspec.Struct, frozen=True):
    """The version that runs has another name from now on; its bytes are the same."""

    model: str
    epoch: int
    version: int
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])


class Rejected(msgspec.Struct, frozen=True):
    """A version cannot be taken; the old one still runs."""

    model: str
    epoch: int
    version: int
    code: str
    text: str


class Refused(msgspec.Struct, frozen=True):
    """The publisher refuses this worker; it keeps asking."""

    code: str
    text: str


class Joined(msgspec.Struct, frozen=True):
    """The publisher has let this worker in."""

    epoch: int


class Flushed(msgspec.Struct, frozen=True):
    """The publisher has heard what was said before this was asked for (`Flush`)."""

    mark: int


class Examine(msgspec.Struct, frozen=True):
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
    | Whole
    | Renamed
    | Rejected
    | Refused
    | Joined
    | Flushed
    | Examine
)
