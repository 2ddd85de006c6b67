"""What a machine wants done. The shells do it; the simulation does it under a virtual clock."""

from dataclasses import dataclass

from .memory.version import Version
from .messages import Buffer, Message
from .receipt import Receipt, State
from .staged import StagedVersion


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message: to one worker from a publisher, to the publisher from a worker."""

    message: Message
    payload: Buffer | None = None
    to: bytes = b""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Publish a message to whoever has subscribed to a topic."""

    topic: bytes
    message: Message
    payload: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget what was published of a model and is not on its way yet: it is out of date."""

    model: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection of the message that was received last: it floods this publisher."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """A call of publish is over; `done` are the states of workers that it counts."""

    publication: int
    receipt: Receipt
    achieved: bool
    done: frozenset[State]
    missing: str = ""  # who was expected, and never came


@dataclass(frozen=True, slots=True)
class Settled:
    """A version is the latest for all workers now: what there is to keep of a model."""

    version: Version


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that an operator may want to know; `warning`: that an operator should know."""

    kind: str
    text: str
    worker: str = ""
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """Take published messages from this endpoint, in place of any before."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Redial:
    """Make both connections anew: those that there are may lead nowhere."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Ask for a topic, or no longer."""

    topic: bytes
    on: bool


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


Effect = (
    Send
    | Broadcast
    | Withdraw
    | HangUp
    | Resolve
    | Settled
    | Notice
    | Connect
    | Redial
    | Subscribe
    | Ready
    | Renamed
    | Rejected
    | Refused
    | Joined
)
