"""The effects that only a publisher's machine returns (`bus/effects.py` has the common ones).

Some name the bytes to send: `offers.py` encodes these as messages, and hashes chunks first where
that is needed. Others concern a version's memory, or start work that is too long for one step; the
shell reports its end (`Hash` ends with a call of `PublisherMachine.hashed`).
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
    """Publish a message to all subscribers of a topic."""

    topic: bytes
    message: Message
    payload: Buffer | None = None


class SendChunk(msgspec.Struct, frozen=True):
    """Send a chunk of a version, or of a patch, to one worker."""

    version: Chunked
    index: int
    to: bytes


class BroadcastChunk(msgspec.Struct, frozen=True):
    """Publish a chunk of a version, or of a patch, to all subscribers of a topic."""

    version: Chunked
    index: int
    topic: bytes


class BroadcastWhole(msgspec.Struct, frozen=True):
    """Announce a version of one chunk to all, with the chunk in the same message."""

    version: Version
    announce: Announce


class Withdraw(msgspec.Struct, frozen=True):
    """Drop queued messages of a model that are not being sent yet: they are outdated."""

    model: str


class HangUp(msgspec.Struct, frozen=True):
    """Close the connection of the last received message: it exceeds the rate limit."""


class Follow(msgspec.Struct, frozen=True):
    """Watch the connection of the last received message, whose worker was admitted.

    Call `unreachable` when it is closed. If the worker's process, which reports `pid`, runs on this
    host, also call it when that process has ended.
    """

    pid: int


class DropRevoked(msgspec.Struct, frozen=True):
    """Close the data connections of revoked keys, and change the group key."""


class Resolve(msgspec.Struct, frozen=True):
    """Resolve a call of publish.

    Attributes:
        publication: The number of the call.
        receipt: Its receipt.
        achieved: Whether it met its requirement.
        done: The states in which a worker counts as done.
        missing: How many expected workers never joined.
        required: How many workers had to be done; None: all.
        named: Which workers had to be done, if they were named.
        why: Further text for the error if the requirement was not met.
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
        """The text of what was achieved, and the state of each worker that is not done."""
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
    """Hand a version that became the latest for all workers to the keeper, if there is one."""

    version: Version


class Stamp(msgspec.Struct, frozen=True):
    """Let workers of this host read a version by its number; if that fails, call `unshared`."""

    version: Version


class Hash(msgspec.Struct, frozen=True):
    """Hash all of a version in small steps, then call `hashed`."""

    version: Version


class Compare(msgspec.Struct, frozen=True):
    """Compare a version with a worker's checksums in small steps, then call `compared`."""

    comparison: "Comparison"


class Lend(msgspec.Struct, frozen=True):
    """Make a version's memory reclaimable: the next publish may overwrite it."""

    version: Version


class Release(msgspec.Struct, frozen=True):
    """Free the memory of a version."""

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
)  # carried out by the publisher's loop as they are
# The others are encoded as messages first (`offers.worded`).
Effect = LoopEffect | SendChunk | BroadcastChunk | BroadcastWhole


class VersionKeeper(Protocol):
    """Keeps `Settled` versions beyond the publisher's end (`python_client/keeper.py`)."""

    def offer(self, version: Version) -> None:
        """Keep a version, which is the latest for all workers; must not block."""
        ...

    def stop(self) -> None:
        """End: no further version follows; must not block."""
        ...
