"""The effects that only a publisher's machine returns (`bus/effects.py` has the common ones).

Some effects name bytes to send: `offers.py` encodes them as messages, and first hashes unhashed
chunks. Others concern a version's memory, or start work that is too long for one step. The shell
(`bus/net/publisher_loop.py`) reports the end of such work: after `Hash` it calls
`PublisherMachine.hashed`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from ...codecs.parts import Range
from ..effects import Notice, Send
from ..headers import Buffer
from ..messages import Announce
from ..receipt import Receipt, State
from ..structs import Message
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
    ranges: Sequence[Range] = ()  # the bytes that the worker needs; empty: all


class BroadcastChunk(msgspec.Struct, frozen=True):
    """Publish a chunk of a version, or of a patch, to all subscribers of a topic."""

    version: Chunked
    index: int
    topic: bytes


class BroadcastWhole(msgspec.Struct, frozen=True):
    """Announce a version of one chunk to all subscribers, with the chunk in the same message."""

    version: Version
    announce: Announce


class Withdraw(msgspec.Struct, frozen=True):
    """Drop a model's queued messages, which are outdated, except those that are being sent."""

    model: str


class HangUp(msgspec.Struct, frozen=True):
    """Close the connection that sent the last received message."""


class Follow(msgspec.Struct, frozen=True):
    """Watch the connection of the last received message, whose worker has been admitted.

    The shell calls `unreachable` when the connection is closed. If the worker's process (with the
    id `pid`) runs on this host, the shell also calls `unreachable` when that process has ended.
    """

    pid: int


class DropRevoked(msgspec.Struct, frozen=True):
    """Close the data connections of revoked keys, and change the group key."""


class Resolve(msgspec.Struct, frozen=True):
    """Resolve a call of publish.

    Attributes:
        publication: The number of the call.
        receipt: The call's receipt.
        achieved: Whether the call met its requirement.
        done: The states in which a worker counts as done.
        missing: The number of expected workers that never joined.
        required: The number of workers that had to be done; None: all.
        named: The names of the workers that had to be done; None: the call named none.
        why: More text for the error if the requirement was not met.
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
        """An error text: how many workers are done, and the state of each worker that is not."""
        receipt, finished = self.receipt, self.receipt.in_state(*self.done)
        known = receipt.workers
        if self.named is None:
            left = receipt.in_state("left")
            others = [str(w) for name, w in known.items() if name not in (*finished, *left)]
            total = len(known) - len(left) + self.missing
            required = "" if self.required is None else f" ({self.required} are required)"
            by = f"{len(finished)} of {total} workers{required}"
        else:
            lacking = sorted(self.named.difference(finished))
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
    """Pass a version that became the latest for all workers to the `VersionKeeper`, if any."""

    version: Version


class Stamp(msgspec.Struct, frozen=True):
    """Write a version's stamp into its shared segment; if that fails, call `unshared`."""

    version: Version


class Hash(msgspec.Struct, frozen=True):
    """Hash all of a version in small steps, then call `hashed`."""

    version: Version


class Compare(msgspec.Struct, frozen=True):
    """Compare a version with a worker's checksums in small steps, then call `compared`."""

    comparison: "Comparison"


class Obtain(msgspec.Struct, frozen=True):
    """Call `version.obtain`, which starts to get the version's missing chunks from sources. (N4)"""

    version: Version


class MakeReclaimable(msgspec.Struct, frozen=True):
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
    | Obtain
    | MakeReclaimable
    | Release
)  # effects that the publisher's loop carries out as they are
# `offers.encode_effect` first encodes the other effects as messages.
Effect = LoopEffect | SendChunk | BroadcastChunk | BroadcastWhole


class VersionKeeper(Protocol):
    """Stores `Settled` versions, so that these outlive the publisher.

    `python_client/publishing/state_writer.py` implements it.
    """

    def offer(self, version: Version) -> None:
        """Store a version that is the latest for all workers; must not block."""
        ...

    def stop(self) -> None:
        """Stop, since no more versions follow; must not block."""
        ...
