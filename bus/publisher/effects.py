"""What a publisher's machine wants done, beside what both machines want (`bus/effects.py`).

Some say which bytes are to go where: `offers.py` makes messages of these, and hashes what it must.
Others speak of a version's memory, or of work that is too long for one step (`Hash`), which the
shell answers with `PublisherMachine.hashed`.
"""

from typing import TYPE_CHECKING, Protocol

import msgspec

from ..effects import Notice, Send
from ..messages import Announce, Buffer, Message
from ..receipt import Receipt, State
from ..units import span
from .version import Chunked, Version

if TYPE_CHECKING:
    from .verifying import Comparison


class Broadcast(msgspec.Struct, frozen=True):
    """Publish a message to whoever has subscribed to a topic."""

    topic: bytes
    message: Message
    payload: Buffer | None = None


class SendChunk(msgspec.Struct, frozen=True):
    """Send a chunk of a version, or of a patch, to one worker."""

    version: Chunked
    index: int
    to: bytes


class BroadcastChunk(msgspec.Struct, frozen=True):
    """Publish a chunk of a version, or of a patch, to whoever has subscribed to that."""

    version: Chunked
    index: int
    topic: bytes


class BroadcastWhole(msgspec.Struct, frozen=True):
    """Announce a version of one chunk to all, and send that along."""

    version: Version
    announce: Announce


class Withdraw(msgspec.Struct, frozen=True):
    """Forget what was published of a model and is not on its way yet: it is out of date."""

    model: str


class HangUp(msgspec.Struct, frozen=True):
    """Close the connection of the message that was received last: it floods this publisher."""


class Follow(msgspec.Struct, frozen=True):
    """Whoever sent the message that was received last is let in: say `unreachable` once it is gone.

    That is once its connection is closed. If its process, which it says is `pid`, is of this host,
    say as well once that has ended.
    """

    pid: int


class DropRevoked(msgspec.Struct, frozen=True):
    """Hang up on data connections whose keys may not have any, any more; seal otherwise."""


class Resolve(msgspec.Struct, frozen=True):
    """A call of publish is over.

    Attributes:
        publication: Which.
        receipt: What became of it.
        achieved: Whether that is what it required.
        done: The states of workers that it counts.
        missing: How many workers more were expected.
        required: How many had to get there; None: all.
        named: Which workers had to get there, if they were named.
        why: What else there is to say if that was not achieved.
    """

    publication: int
    receipt: Receipt
    achieved: bool
    done: frozenset[State]
    missing: int = 0
    required: int | None = None
    why: str = ""
    named: frozenset[str] | None = None

    @property
    def shortfall(self) -> str:
        """What was achieved, and the state of each worker that falls short."""
        receipt, there = self.receipt, self.receipt.in_state(*self.done)
        known = receipt.workers
        if self.named is None:
            left = receipt.in_state("left")
            others = [str(w) for name, w in known.items() if name not in (*there, *left)]
            total = len(known) - len(left) + self.missing
            required = "" if self.required is None else f" ({self.required} are required)"
            by = f"{len(there)} of {total} workers{required}"
        else:
            lacking = sorted(self.named.difference(there))
            others = [str(known[n]) if n in known else f"{n} is not there" for n in lacking]
            named = len(self.named)
            by = f"{named - len(lacking)} of the {named} workers that are required"
        done = "staged" if "staged" in self.done else "applied"
        what = (
            f"{receipt.model} version {receipt.version} is {done} by {by} "
            f"after {span(receipt.seconds)}"
        )
        return "; ".join([what, *others, *([self.why] if self.why else [])])


class Settled(msgspec.Struct, frozen=True):
    """A version is the latest for all workers now: what there is to keep of a model."""

    version: Version


class Stamp(msgspec.Struct, frozen=True):
    """Let workers of this host read a version by its number; if they cannot, say `unshared`."""

    version: Version


class Hash(msgspec.Struct, frozen=True):
    """Hash all of a version, a little at a time, and say `hashed`."""

    version: Version


class Compare(msgspec.Struct, frozen=True):
    """Compare a version with what a worker has, a little at a time, and say `compared`."""

    comparison: "Comparison"


class Lend(msgspec.Struct, frozen=True):
    """Let whoever publishes next write over a version."""

    version: Version


class Release(msgspec.Struct, frozen=True):
    """Nobody needs the memory of a version any more."""

    version: Version


LoopEffect = (
    Send
    | Notice
    | Broadcast
    | Withdraw
    | HangUp
    | Follow
    | DropRevoked
    | Resolve
    | Settled
    | Stamp
    | Hash
    | Compare
    | Lend
    | Release
)  # what a loop does
# And what it makes messages of first.
Effect = LoopEffect | SendChunk | BroadcastChunk | BroadcastWhole


class Keeper(Protocol):
    """What outlives a publisher, and so takes what is `Settled` (`python_client/keeper.py`)."""

    def offer(self, version: Version) -> None:
        """Keep a version, the latest for all of its model; must not wait."""
        ...

    def stop(self) -> None:
        """Nothing more will come; must not wait."""
        ...
