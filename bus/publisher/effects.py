"""What a publisher's machine wants done, beside what both machines want (`bus/effects.py`)."""

from dataclasses import dataclass

from ..effects import Notice, Send
from ..memory.version import Version
from ..messages import Buffer, Message
from ..receipt import Receipt, State


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


Effect = Send | Notice | Broadcast | Withdraw | HangUp | Resolve | Settled
