"""One published version as the machine sees it: its name, its layout, and its chunks.

Whoever publishes makes an `Offer`: plain values, to which it writes no more once they are handed
over. Of that the machine makes a `Version`, which no other thread has. The bytes are a snapshot's,
which the machine never reads: effects say which chunk goes where, and the shell takes it from
there. So a version here is held by its machine or by nobody. The latest may also be *lent*: whoever
publishes next may write over it without asking. What is lent must be taken back before anything of
it is given out, which fails if somebody was faster; then it is gone. What it goes through is a
table (`phases.py`), and its `Versions` move it.

A version may be given out as patches, too, each on another that workers run: they are cut into
chunks, hashed, sealed and fetched as it is.

What a worker receives can be given out, too, from where it lies: `Offer.received`. Then a chunk can
be given out once it is here, and the digest once it was proved.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...codecs.checksum import digest
from ...codecs.layout import Layout
from ...codecs.overflow import Found
from ..chunks import ChunkPlan, Chunks, Memory, plan_of
from ..messages import Applied, Buffer, Patch, PatchId, Running, Shared, Staged
from ..sealer import ByteSource, SealedVersion
from .phases import VersionPhase


class ChunkSource(ByteSource, Protocol):
    """Bytes that are given out, and may be looked at here and now."""

    def chunk(self, begin: int, end: int) -> Buffer:
        """Return some of them, to be sent."""
        ...


class Snapshot(ChunkSource, Protocol):
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

    def keep(self) -> NDArray[np.uint8] | None:
        """Return the bytes, for whoever reads them until `let_go`; None if it is too late."""
        ...

    def let_go(self) -> None:
        """Whoever kept them has read them."""
        ...


class BytesInPlace:
    """Bytes that are given out from where they lie.

    Args:
        data: They.
    """

    def __init__(self, data: memoryview) -> None:
        self._data: memoryview | None = data  # until they are released
        self._given: dict[int, memoryview] = {}  # by where it begins: whoever sends refers weakly

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return some of the bytes."""
        if self._data is None:
            raise AssertionError("bytes that were released are not ours")
        return self._data[begin:end]

    def chunk(self, begin: int, end: int) -> memoryview:
        """Return some of the bytes, to be sent."""
        return self._given.setdefault(begin, self.bytes(begin, end))


class Received(BytesInPlace):
    """The bytes of a version that a worker receives, or has; nobody publishes into that memory.

    Args:
        chunks: They.
    """

    def __init__(self, chunks: Chunks[Memory]) -> None:
        self._chunks = chunks
        self._view: Memory | None = chunks.lend()
        super().__init__(self._view.data)

    @property
    def there(self) -> bool:
        """Whether they are not released."""
        return self._view is not None

    def take_back(self) -> bool:
        """Return whether they are there, as nobody takes what is lent."""
        return self.there

    def lend(self) -> None:
        """Whoever publishes next has other memory."""

    def release(self) -> None:
        """Nobody needs the bytes any more, once those that were given out are sent."""
        self._view = self._data = None
        self._given.clear()

    def stamp(self, model: str, epoch: int, version: int) -> bool:  # noqa: ARG002
        """Return False: no other process can read them."""
        return False

    def keep(self) -> Memory | None:
        """Return the bytes, for as long as anybody has them; None if not all of them are here."""
        return self._view if self._chunks.whole else None

    def let_go(self) -> None:
        """Whoever kept them has read them."""


class OfferedPatch(NamedTuple):
    """A patch that leads to what is offered.

    Attributes:
        encoding: How the patch is encoded.
        base: What it builds on, as workers say that they run it.
        data: Its bytes.
        classes: Whether its steps may be coded by class, which takes longer to decode.
        work: What it takes to decode it, in bytes of a version that stays as it is; 0: who knows.
    """

    encoding: str
    base: Running
    data: bytes
    classes: bool = True
    work: float = 0.0


class Offer(msgspec.Struct, eq=False):
    """What is to be published.

    Attributes:
        model: Its name.
        layout: Where each tensor lies.
        chunks: The bytes, cut into chunks.
        snapshot: What gives them out.
        shared: Where workers on this host find them, if they can.
        names: The (epoch, version) under which the same bytes were published before.
        metadata: What its publisher says of it, as text by name.
        keep: Whether patches on it may come: workers that take those keep its bytes.
        patches: That lead to it. The first is pushed, the others are fetched.
        lost: Counts the values that its dtype cannot hold, once it is all there.
        detail: What is to be said of it in its receipt.
    """

    model: str
    layout: Layout
    chunks: Chunks[object]
    snapshot: Snapshot
    shared: Shared | None = None
    names: frozenset[tuple[int, int]] = frozenset()
    metadata: Mapping[str, str] = {}
    keep: bool = False
    patches: tuple[OfferedPatch, ...] = ()
    lost: Callable[[], Found] | None = None
    detail: str = ""

    @classmethod
    def of(
        cls,
        model: str,
        layout: Layout,
        chunk_bytes: int,
        snapshot: Snapshot,
        shared: Shared | None = None,
        crcs: Sequence[int] = (),
        lost: Callable[[], Found] | None = None,
    ) -> "Offer":
        """Return an offer of bytes that stay as they are.

        Args:
            model, layout, snapshot, shared, lost: See above.
            chunk_bytes: Bytes of a chunk (the last may be shorter).
            crcs: The CRC-32C of each chunk; empty: nobody has hashed them yet.
        """
        plan = plan_of(layout.nbytes, chunk_bytes)
        known: list[int | None] = [*crcs] if crcs else [None] * plan.count
        hashed = len(crcs) == plan.count
        whole = digest(layout.id, chunk_bytes, crcs) if hashed else ""
        chunks = Chunks[object](
            plan, snapshot, known, layout.id, here=len(crcs), whole=True, digest=whole
        )
        return cls(model, layout, chunks, snapshot, shared, lost=lost)

    @classmethod
    def received(cls, model: str, layout: Layout, chunks: Chunks[Memory]) -> "Offer":
        """Return an offer of what a worker receives, or has, from where it lies."""
        return cls(model, layout, chunks, Received(chunks))


class Chunked:
    """What is given out in chunks: a version, or a patch that leads to it.

    Attributes:
        plan, chunks: They, which may be on their way from another publisher.
        snapshot: Its bytes.
        patch: Which patch it is; None: all of a version.
        sealed, was_sealed: What was sealed of it, and whether anything ever was.
    """

    plan: ChunkPlan
    chunks: Chunks[object]
    snapshot: ChunkSource
    patch: PatchId | None = None
    sealed: SealedVersion | None = None
    was_sealed = False

    @property
    def target(self) -> "Version":
        """The version that it is, or leads to."""
        raise NotImplementedError


class Version(Chunked):
    """A version of a model.

    Args:
        offer: What it is, whose attributes it has.
        epoch, version: Its number; a later epoch may come (`Versions.renew`).

    Attributes:
        receivers: Names of the workers that are still at it.
        phase: What it has come to.
        hashing: Whether all its chunks are being hashed, since somebody needs the digest.
        ends: Names of the workers that are owed an `end` when they are.
        readers: Comparisons with it that are under way; it is not lent meanwhile.
        sums: CRC-32C of each tensor of which that was asked, by where it begins.
        waits: By worker, when each chunk is of no use to it any more that is not here yet.
        claims: What workers report of it that is to be checked then, the last of each kind.
        unpatched: Names of the workers of which it was told why they take no patch.
    """

    def __init__(self, offer: Offer, epoch: int, version: int) -> None:
        self.model, self.epoch, self.version = offer.model, epoch, version
        self.layout, self.chunks, self.plan = offer.layout, offer.chunks, offer.chunks.plan
        # Narrower than what any `Chunked` has: nobody puts another there.
        self.snapshot: Snapshot = offer.snapshot  # pyright: ignore[reportIncompatibleVariableOverride]
        self.shared = offer.shared
        self.names, self.metadata, self.keep = offer.names, offer.metadata, offer.keep
        self.detail = offer.detail
        self.patches: tuple[VersionPatch, ...] = ()
        if offer.patches:
            self.patches = tuple([VersionPatch(self, patch) for patch in offer.patches])
        self.receivers: set[str] = set()
        self.phase: VersionPhase = "pending"
        self.hashing = False
        self.ends: set[str] = set()
        self.readers = 0
        self.sums: dict[int, int] = {}
        self.waits: dict[str, dict[int, float]] = {}
        self.claims: dict[tuple[str, type], Staged | Applied] = {}
        self.unpatched: set[str] = set()

    def __repr__(self) -> str:
        return f"<Version {self.key} of {self.model}, {self.phase}>"

    @property
    def lent(self) -> bool:
        """Whether the next publish may take its memory."""
        return self.phase == "lent"

    @property
    def gone(self) -> bool:
        """Whether its memory is no longer the machine's."""
        return self.phase == "gone"

    @property
    def key(self) -> tuple[int, int]:
        """The order of versions: epoch, then version."""
        return self.epoch, self.version

    @property
    def target(self) -> "Version":
        """Itself."""
        return self

    @property
    def digest(self) -> str:
        """What the whole hashes to; empty: not all of it was hashed, or proved."""
        return self.chunks.digest

    def read_by(self, worker: str) -> None:
        """A worker is at it."""
        self.receivers.add(worker)

    def left_by(self, *workers: str) -> bool:
        """Workers are not at it any more; return whether nobody is."""
        self.receivers.difference_update(workers)
        return not self.receivers

    def find(self, patch: PatchId | None) -> Chunked | None:
        """Return one of its patches, if there is that; with None, itself."""
        if patch is None:
            return self
        return next((each for each in self.patches if each.patch == patch), None)

    def patch_on(self, running: Running | None) -> "VersionPatch | None":
        """Return the patch for whoever runs a version, if there is one."""
        return next((each for each in self.patches if each.base == running), None)

    def is_known_as(self, running: Running) -> bool:
        """Return whether a worker runs these very bytes, which were published before."""
        if running.digest and self.names:
            return running.digest == self.digest
        return (running.epoch, running.version) in self.names


class VersionPatch(Chunked):
    """A patch that leads to a version.

    Args:
        version: Which one; its digest is known.
        offered: The patch.
    """

    def __init__(self, version: Version, offered: OfferedPatch) -> None:
        encoding, self.base, data, self.classes, self.work = offered
        self.patch = self.id = PatchId(encoding, self.base.epoch, self.base.version)
        self.plan = plan = plan_of(len(data), version.plan.chunk_bytes)
        self._version, self.snapshot = version, BytesInPlace(memoryview(data))
        self.chunks = Chunks[object](plan, self.snapshot, [None] * plan.count, whole=True)

    @property
    def offered(self) -> Patch:
        """What announcements say of it."""
        name, digest = self.id, self.base.digest
        return Patch(name.encoding, name.epoch, name.version, digest, self.plan.nbytes)

    @property
    def target(self) -> Version:
        """The version that it leads to."""
        return self._version
