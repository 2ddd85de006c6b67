"""One published version as the machine sees it: its name, its layout, and what its chunks hash to.

The bytes are a snapshot's, which the machine never reads: effects say which chunk goes where, and
the shell takes it from there. So a version here is held by its machine or by nobody. The latest may
also be *lent*: whoever publishes next may write over it without asking. What is lent must be taken
back before anything of it is given out, which fails if somebody was faster; then it is gone.
"""

from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ...codecs.checksum import digest
from ...codecs.layout import Layout
from ..chunks import ChunkPlan
from ..messages import Applied, Buffer, Running, Shared, Staged
from ..sealer import SealedVersion

Role = Literal["latest", "targeted", "pending", "old"]


class Snapshot(Protocol):
    """The bytes of a version (`memory/snapshots.py`).

    The machine asks `there` and `take_back` alone, which are answered at once; its shell does the
    rest, as effects tell it.
    """

    @property
    def there(self) -> bool:
        """Whether nobody has taken the memory since it was lent."""
        ...

    def take_back(self) -> bool:
        """Have what was lent again; False if somebody has taken it."""
        ...

    def lend(self) -> None:
        """Let whoever publishes next take the memory."""
        ...

    def release(self) -> None:
        """Nobody needs the bytes any more."""
        ...

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        """Let workers of this host read it by this name; False if one holds on to another."""
        ...

    def chunk(self, begin: int, end: int) -> Buffer:
        """Return some of the bytes, to be sent."""
        ...

    def bytes(self, begin: int, end: int) -> Buffer:
        """Return some of the bytes, to be looked at here and now."""
        ...

    def keep(self) -> NDArray[np.uint8] | None:
        """Return the bytes, for whoever reads them until `let_go`; None if it is too late."""
        ...

    def let_go(self) -> None:
        """Whoever kept them has read them."""
        ...


class Version:
    """A version of a model.

    Args:
        model: Its name.
        layout: Where each tensor lies.
        chunk_bytes: Bytes of a chunk (the last may be shorter).
        snapshot: Its bytes.
        shared: Where workers on this host find them, if they can.

    Attributes:
        epoch, version: Its number, which the machine gives when it is published.
        names: The (epoch, version) under which the same bytes were published before.
        receivers: Names of the workers that are still at it.
        role: Why it is kept: it is the latest for all, or for some, or not yet committed.
        lent: Whether the next publish may take its memory.
        gone: Whether its memory is no longer the machine's.
        hashing: Whether all its chunks are being hashed, since somebody needs the digest.
        ends: Names of the workers that are owed an `end` when they are.
        sealed, was_sealed: What was sealed of it, and whether anything ever was.
        claims: What workers report of it that is to be checked then, the last of each kind.
    """

    def __init__(
        self,
        model: str,
        layout: Layout,
        chunk_bytes: int,
        snapshot: Snapshot,
        shared: Shared | None = None,
    ) -> None:
        self.model, self.epoch, self.version = model, 0, 0
        self.layout, self.snapshot, self.shared = layout, snapshot, shared
        self.plan = ChunkPlan(layout.nbytes, chunk_bytes)
        self.names: frozenset[tuple[int, int]] = frozenset()
        self.receivers: set[str] = set()
        self.role: Role = "pending"
        self.lent = self.gone = self.hashing = False
        self.ends: set[str] = set()
        self.sealed: SealedVersion | None = None
        self.was_sealed = False
        self.claims: dict[tuple[str, type], Staged | Applied] = {}
        self._crcs: list[int | None] = [None] * self.plan.count
        self._unhashed = self.plan.count
        self._digest = ""

    def __repr__(self) -> str:
        return f"<Version {self.key} of {self.model}, {self.role}>"

    @property
    def key(self) -> tuple[int, int]:
        """The order of versions: epoch, then version."""
        return self.epoch, self.version

    def crc(self, index: int) -> int | None:
        """Return a chunk's CRC-32C, if it was hashed."""
        return self._crcs[index]

    def hashed(self, index: int, crc: int) -> None:
        """A chunk has this CRC-32C."""
        self._unhashed -= self._crcs[index] is None
        self._crcs[index] = crc

    def hashed_all(self, crcs: NDArray[np.uint32]) -> None:
        """All chunks have these CRC-32Cs; with none, nobody has hashed them yet."""
        for index, crc in enumerate(crcs.tolist()):
            self.hashed(index, crc)

    def unhashed(self) -> Iterator[int]:
        """Yield the chunks that nobody has hashed yet."""
        return (index for index, crc in enumerate(self._crcs) if crc is None)

    @property
    def digest(self) -> str:
        """What the whole hashes to; empty: not all of it was hashed."""
        if not self._digest and not self._unhashed:
            crcs = [crc for crc in self._crcs if crc is not None]
            self._digest = digest(self.layout.id, self.plan.chunk_bytes, crcs)
        return self._digest

    def restored(self, digest: str, names: frozenset[tuple[int, int]]) -> None:
        """The bytes were published before, under these names, and hash to this."""
        self._digest, self.names = digest, names

    def is_known_as(self, running: Running) -> bool:
        """Return whether a worker runs these very bytes, which were published before."""
        if running.digest and self.names:
            return running.digest == self._digest
        return (running.epoch, running.version) in self.names
