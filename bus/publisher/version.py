"""The publisher machine's record of a version: name, layout, chunks, phase, and its receivers.

The publishing thread makes a `VersionOffer`, and does not change the offer after handing it over.
The machine makes a `Version` from the offer. The `Version` belongs to the machine's thread. The
bytes are in a snapshot that the machine never reads: effects name the chunks to send, and the shell
reads the bytes.

The latest version can be *reclaimable*: the next publish may overwrite it at any time. Before the
machine sends chunks of such a version, it must take the memory back. If a publish has taken the
memory by then, the version is gone.

A version can also be sent as patches, each on a different base that workers run. A patch is cut
into chunks, hashed, encrypted and fetched like a version.

A relay offers a version from a worker's staging buffer while the version arrives: see
`VersionOffer.received`. Each chunk can be sent once it has arrived, and the digest once it is
verified. If the version arrives by a patch, the relay offers the patch in the same way. Workers
verify the digest of the version that the patch leads to, so the relay sends this digest even before
it has decoded the patch itself.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...codecs.checksum import digest
from ...codecs.layout import Layout
from ...codecs.overflow import LostValues
from ...codecs.parts import Range
from ..chunks import ChunkPlan, Chunks, Memory, plan_of
from ..headers import Buffer
from ..limits import EPOCHS_KEPT
from ..messages import Applied, Patch, PatchId, Running, Shared, Source, Staged
from ..protocol_limits import FETCH_CHUNKS_MAX
from ..sealer import ByteSource, SealedVersion
from .tables import VERSIONS, VersionEvent, VersionPhase


class ChunkSource(ByteSource, Protocol):
    """Bytes that can be read, and that can be sent without a copy."""

    def chunk(self, begin: int, end: int) -> Buffer:
        """Return the bytes [begin, end), to be sent."""
        ...


class Snapshot(ChunkSource, Protocol):
    """The bytes of a version (`memory/snapshots.py`).

    The machine calls only `exists` and `take_back`, which wait for no device, disk or socket. The
    shell calls the other methods to carry out effects.
    """

    @property
    def exists(self) -> bool:
        """True if the bytes exist: no later publish took the memory after `make_reclaimable`."""
        ...

    def take_back(self) -> bool:
        """Undo `make_reclaimable`; return False if a later publish took the memory."""
        ...

    def make_reclaimable(self) -> None:
        """Make the memory reclaimable: the next publish may take it."""
        ...

    def release(self) -> None:
        """Free the memory; the bytes are no longer needed."""
        ...

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        """Let workers of this host read the bytes as this version; False if one still copies."""
        ...

    def keep(self) -> NDArray[np.uint8] | None:
        """Return the bytes, valid until `let_go`; None if a later publish took the memory."""
        ...

    def let_go(self) -> None:
        """End the use that `keep` began."""
        ...


class Segment(Protocol):
    """Memory that other processes read, with a stamp of its version (`memory/segment.py`)."""

    @property
    def shared(self) -> Shared:
        """The path and token by which workers find the segment."""
        ...

    def claim(self) -> bool:
        """Lock the segment and clear its stamp; return False if a worker is copying from it."""
        ...

    def release(self, model: str, epoch: int, version: int) -> None:
        """Stamp the segment with the version that it contains, and unlock it."""
        ...


class BytesInPlace:
    """Bytes that are sent from their memory, without a copy.

    Args:
        data: The bytes.
    """

    def __init__(self, data: memoryview) -> None:
        self._data: memoryview | None = data  # None after `release`
        self._views: dict[int, memoryview] = {}  # by begin; send queues refer to these weakly

    def bytes(self, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end)."""
        if self._data is None:
            raise AssertionError("the bytes were released: they must not be used")
        return self._data[begin:end]

    def chunk(self, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end), to be sent."""
        return self._views.setdefault(begin, self.bytes(begin, end))


class Received(BytesInPlace):
    """The bytes of a version in a worker's staging buffer, which no publish overwrites.

    Args:
        chunks: The chunks, of which some may not have arrived yet.
        segment: The segment that the buffer is in; None: it is in private memory.
    """

    def __init__(self, chunks: Chunks[Memory], segment: Segment | None = None) -> None:
        self._chunks, self._segment = chunks, segment
        self._view: Memory | None = chunks.lend()
        super().__init__(self._view.data)

    @property
    def exists(self) -> bool:
        """True if the bytes are not released."""
        return self._view is not None

    def take_back(self) -> bool:
        """Return True if the bytes are not released: no other version takes received memory."""
        return self.exists

    def make_reclaimable(self) -> None:
        """Do nothing, since the next publish uses other memory."""

    def release(self) -> None:
        """Drop the references to the bytes; the memory is free once queued chunks are sent."""
        self._view = self._data = None
        self._views.clear()

    def stamp(self, model: str, epoch: int, version: int) -> bool:
        """Let workers of this host read the bytes as this version, once they are complete.

        Return False if the bytes are not complete or not in a segment, or if a worker copies them.
        """
        segment = self._segment
        if segment is None or not (self.exists and self._chunks.whole and segment.claim()):
            return False
        segment.release(model, epoch, version)
        return True

    def keep(self) -> Memory | None:
        """Return the bytes, or None if they are released or incomplete.

        The bytes stay valid as long as the caller holds a reference to the result.
        """
        return self._view if self._chunks.whole else None

    def let_go(self) -> None:
        """Do nothing, since the bytes stay valid while they are referenced."""


CommitMode = Literal["auto", "together"]


class OfferedPatch(NamedTuple):
    """A patch to an offered version.

    Attributes:
        encoding: How the patch is encoded.
        base: The version that the patch builds on, as workers report it.
        data: The bytes of the patch.
        classes: Whether the patch's steps may be coded by class, which takes longer to decode.
        work: How many bytes of an unchanged version take as long to decode as this patch; 0:
            unknown.
        chunks: The chunks of a patch that a relay receives, of which some may not have arrived yet.
            None: all are here.
    """

    encoding: str
    base: Running
    data: Buffer
    classes: bool = True
    work: float = 0.0
    chunks: Chunks[Memory] | None = None

    @classmethod
    def received(cls, patch: Patch, chunks: Chunks[Memory]) -> "OfferedPatch":
        """Return an offer of a patch in a worker's memory, which may still be incomplete."""
        base = Running(patch.epoch, patch.version, patch.digest)
        return cls(patch.encoding, base, chunks.memory.data, chunks=chunks)


class AnnouncedTerms(NamedTuple):
    """The terms of a version's announcement: what it requires of workers until the commit.

    Attributes:
        commit: Whether workers apply as soon as they are ready (`auto`), or after a `commit`.
        acknowledge: The report that the publish waits for.
        hash: Whether workers that read shared memory must hash what they read.
    """

    commit: CommitMode = "auto"
    acknowledge: Literal["applied", "staged"] = "applied"
    hash: bool = False


NO_TERMS = AnnouncedTerms()


class VersionOffer(msgspec.Struct, eq=False):
    """A version to publish.

    Attributes:
        model: The model's name.
        layout: Name, dtype, shape and position of each tensor.
        chunks: The chunks of the bytes, and which of them have arrived and are hashed.
        snapshot: The memory from which the bytes are sent.
        shared: The segment from which workers on this host read the bytes, if any.
        names: Each (epoch, version) under which the same bytes were published before.
        metadata: The publisher's metadata, as text by name.
        keep: Whether workers keep the version's bytes, since patches on it may follow.
        patches: Patches to this version. The first patch is pushed, the others are fetched.
        count_lost: Counts the values that did not fit the dtype. Call it once all bytes are here.
        detail: A text for the receipt.
        key: The epoch and number that the publisher of these bytes gave the version, if a relay
            passes the version on. None: this publisher gives them.
        terms: The terms of the announcement that a relay passes on.
        only: The names of the workers that the version is for; None: for all.
        sources: Where the chunks are that this publisher lacks. (N1)
        obtain: Starts to get these chunks from the sources; `PublisherMachine.obtained` is called
            as they arrive.
        companions: By model, the numbers of the other models' versions published as one with it.
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
    count_lost: Callable[[], LostValues] | None = None
    detail: str = ""
    key: tuple[int, int] | None = None
    terms: AnnouncedTerms = NO_TERMS
    only: frozenset[str] | None = None
    sources: tuple[Source, ...] = ()
    obtain: "Callable[[Version], None] | None" = None
    companions: Mapping[str, int] = {}

    @classmethod
    def of(
        cls,
        model: str,
        layout: Layout,
        chunk_bytes: int,
        snapshot: Snapshot,
        shared: Shared | None = None,
        crcs: Sequence[int] = (),
        count_lost: Callable[[], LostValues] | None = None,
    ) -> "VersionOffer":
        """Return an offer of bytes that are complete and do not change.

        Args:
            model, layout, snapshot, shared, count_lost: As the attributes of these names.
            chunk_bytes: Bytes of a chunk (the last may be shorter).
            crcs: The CRC-32C of each chunk; empty: the bytes are not hashed yet.
        """
        plan = plan_of(layout.nbytes, chunk_bytes)
        known: list[int | None] = [*crcs] if crcs else [None] * plan.count
        hashed = len(crcs) == plan.count
        whole = digest(layout.id, chunk_bytes, crcs) if hashed else ""
        chunks = Chunks[object](
            plan, snapshot, known, layout.id, here=len(crcs), whole=True, digest=whole
        )
        return cls(model, layout, chunks, snapshot, shared, count_lost=count_lost)

    @classmethod
    def received(
        cls,
        model: str,
        layout: Layout,
        chunks: Chunks[Memory],
        key: tuple[int, int] | None = None,
        terms: AnnouncedTerms = NO_TERMS,
        segment: Segment | None = None,
    ) -> "VersionOffer":
        """Return an offer of a version in a staging buffer, which may still be incomplete.

        `segment`: the segment that the buffer is in, if workers of this host may read it.
        """
        shared = None if segment is None else segment.shared
        snapshot = Received(chunks, segment)
        return cls(model, layout, chunks, snapshot, shared, key=key, terms=terms)

    def restrict(self, workers: Collection[str]) -> None:
        """Offer the version to these workers only."""
        self.only = frozenset(workers)

    def join(self, companions: Mapping[str, int]) -> None:
        """Offer the version as one with these versions of other models."""
        self.companions = companions


ChunkWait = tuple[float, Sequence[Range]]  # until when, and the ranges of bytes (empty: all)


class Chunked:
    """Data that is sent in chunks: a version, or a patch to it.

    Attributes:
        plan, chunks: The chunks, which may still be arriving from another publisher.
        snapshot: The bytes.
        patch: The id of the patch; None: a whole version.
        sealed, was_sealed: The encrypted chunks, and whether a chunk was ever encrypted.
        end_awaiters: Names of the workers to which `end` is sent once the digest is known.
        waits: By worker and chunk index, until when the worker waits for which bytes of the chunk.
    """

    plan: ChunkPlan
    chunks: Chunks[object]
    snapshot: ChunkSource
    end_awaiters: set[str]
    waits: dict[str, dict[int, ChunkWait]]
    patch: PatchId | None = None
    sealed: SealedVersion | None = None
    was_sealed = False

    @property
    def target(self) -> "Version":
        """The version itself, or the version that the patch leads to."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """The digest of the version that the chunks lead to; empty until it is known."""
        raise NotImplementedError

    def await_chunks(
        self, worker: str, indexes: Collection[int], until: float, ranges: Sequence[Range] = ()
    ) -> None:
        """Record that a worker waits for chunks that have not arrived yet, until the time `until`.

        `ranges`: the ranges of bytes that the worker needs of these chunks; empty: all bytes.
        """
        waits = self.waits.setdefault(worker, {})
        waits.update(dict.fromkeys(indexes, (until, ranges)))
        while len(waits) > FETCH_CHUNKS_MAX:  # more than one fetch: the oldest fetches are outdated
            del waits[next(iter(waits))]

    def end_waits(self) -> list[tuple[str, int, float, Sequence[Range]]]:
        """End the waits for chunks that have arrived; return worker, chunk, `until`, `ranges`."""
        return [
            (worker, index, *waits.pop(index))
            for worker, waits in self.waits.items()
            for index in filter(self.chunks.has, [*waits])
        ]

    def await_end(self, worker: str) -> None:
        """Record that a worker waits for the `end`, which is sent once the digest is known."""
        self.end_awaiters.add(worker)

    def forget_worker(self, worker: str) -> None:
        """Drop a lost worker's waits for chunks and the `end`."""
        self.end_awaiters.discard(worker)
        self.waits.pop(worker, None)

    def unseal(self) -> None:
        """Drop the encrypted chunks, whose memory the next version uses."""
        self.sealed = None


class Version(Chunked):
    """A version of a model.

    Args:
        offer: The offer, whose attributes become the version's.
        epoch, version: The version's epoch and number. `Versions.renew` may set a later epoch.

    Attributes:
        receivers: Names of the workers that are receiving the version.
        terms: The terms of the announcement, until the version is committed.
        only: The names of the workers that the version is for; None: for all.
        companions: By model, the numbers of the other models' versions published as one with it.
        shared: The segment from which workers on this host may read the version now, if any.
        unstamped: The segment in which a version is still arriving, if it is in one.
        phase: The version's phase (`phases.py`).
        hashing: Whether all chunks are being hashed, because the digest is needed.
        checksum_awaiters: Names of the workers to which all checksums are sent once known.
        comparisons: Number of running comparisons, during which the version is not reclaimable.
        sums: CRC-32C of each tensor that was compared, by the position of the tensor's first byte.
        unchecked_reports: By worker and type, the last report, to be checked once the digest is
            known.
        unpatched: Names of the workers whose reason to use no patch was logged.
        sources: Where the chunks are that this publisher lacks, for announcements.
        obtain: Starts to get these chunks; None: none are lacking, or `obtain` was called.
    """

    def __init__(self, offer: VersionOffer, epoch: int, version: int) -> None:
        self.end_awaiters, self.waits = (
            set[str](),
            dict[str, dict[int, ChunkWait]](),
        )
        self.checksum_awaiters: set[str] = set()
        self.model, self.epoch, self.version = offer.model, epoch, version
        self.layout, self.chunks, self.plan = offer.layout, offer.chunks, offer.chunks.plan
        # The type is narrower than in `Chunked`. That is safe, since the attribute is never
        # reassigned.
        self.snapshot: Snapshot = offer.snapshot  # pyright: ignore[reportIncompatibleVariableOverride]
        whole = offer.chunks.whole
        self.shared = offer.shared if whole else None
        self.unstamped = None if whole else offer.shared
        self.names, self.metadata, self.keep = offer.names, offer.metadata, offer.keep
        self.detail, self.terms, self.only = offer.detail, offer.terms, offer.only
        self.sources, self.obtain = offer.sources, offer.obtain
        self.companions = offer.companions
        self.patches: tuple[VersionPatch, ...] = ()
        if offer.patches:
            self.patches = tuple([VersionPatch(self, patch) for patch in offer.patches])
        self.receivers: set[str] = set()
        self.phase: VersionPhase = "pending"
        self.hashing = False
        self.comparisons = 0
        self.sums: dict[int, int] = {}
        self.unchecked_reports: dict[tuple[str, type], Staged | Applied] = {}
        self.unpatched: set[str] = set()

    def __repr__(self) -> str:
        return f"<Version {self.key} of {self.model}, {self.phase}>"

    @property
    def reclaimable(self) -> bool:
        """True if the version is reclaimable: the next publish may take its memory."""
        return self.phase == "reclaimable"

    @property
    def gone(self) -> bool:
        """True if the machine no longer owns the version's memory."""
        return self.phase == "gone"

    @property
    def key(self) -> tuple[int, int]:
        """The pair (epoch, version), by which versions are ordered."""
        return self.epoch, self.version

    @property
    def target(self) -> "Version":
        """This version."""
        return self

    @property
    def digest(self) -> str:
        """The digest of all chunks; empty until it is computed or verified."""
        return self.chunks.digest

    def move(self, event: VersionEvent) -> bool:
        """Change the phase as the table says; return True if this event made the version `gone`."""
        before = self.phase
        self.phase = VERSIONS[before].get(event, before)
        if self.phase != "gone" or before == "gone":
            return False
        self.patches = ()
        return True

    def commit(self) -> None:
        """Record that workers may apply the version: from now on it is announced without terms."""
        self.terms = NO_TERMS

    def share(self) -> bool:
        """Record that the version is complete; return False if it is in no segment."""
        self.shared, self.unstamped = self.unstamped or self.shared, None
        return self.shared is not None

    def unshare(self) -> None:
        """Record that workers cannot read the version in shared memory."""
        self.shared = None

    # Workers.

    def add_receiver(self, worker: str) -> None:
        """Record that a worker is receiving the version."""
        self.receivers.add(worker)

    def remove_receivers(self, *workers: str) -> bool:
        """Record that `workers` no longer receive the version; return True if no worker does."""
        self.receivers.difference_update(workers)
        return not self.receivers

    def begin_obtaining(self) -> "Callable[[Version], None] | None":
        """Return the function that starts to get the missing chunks; None if it was called."""
        obtain, self.obtain = self.obtain, None
        return obtain

    def note_unpatched(self, worker: str) -> bool:
        """Record that a worker fetches all of the version; return True for its first fetch."""
        known = worker in self.unpatched
        self.unpatched.add(worker)
        return not known

    def await_checksums(self, worker: str) -> None:
        """Record that a worker waits for the checksums of all chunks."""
        self.checksum_awaiters.add(worker)

    def end_awaited_checksums(self) -> list[str]:
        """End the waits for all checksums if these are known; return the workers that waited."""
        if not self.checksum_awaiters or self.chunks.checksums is None:
            return []
        awaiters, self.checksum_awaiters = self.checksum_awaiters, set()
        return sorted(awaiters)

    def forget_worker(self, worker: str) -> None:
        """Drop a lost worker's waits for messages, and its unchecked reports."""
        super().forget_worker(worker)
        self.checksum_awaiters.discard(worker)
        for patch in self.patches:
            patch.forget_worker(worker)
        kept = self.unchecked_reports.items()
        self.unchecked_reports = {key: report for key, report in kept if key[0] != worker}

    # The digest.

    def check_later(self, worker: str, report: Staged | Applied) -> None:
        """Keep a worker's report until the digest is known."""
        self.unchecked_reports[worker, type(report)] = report

    def begin_hashing(self) -> bool:
        """Record that all chunks are being hashed; return False if they were already."""
        begun, self.hashing = not self.hashing, True
        return begun

    def end_hashing(self) -> tuple[set[str], list[tuple[str, Staged | Applied]]]:
        """End the hashing; return (workers that wait for the `end`, unchecked reports).

        Each report is a pair (worker, message).
        """
        awaiters, reports = self.end_awaiters, self.unchecked_reports
        self.hashing, self.end_awaiters, self.unchecked_reports = False, set(), {}
        return awaiters, [(worker, report) for (worker, _), report in reports.items()]

    def begin_comparison(self) -> None:
        """Record that a comparison reads the version."""
        self.comparisons += 1

    def end_comparison(self) -> None:
        """Record that a comparison no longer reads the version."""
        self.comparisons -= 1

    def add_sum(self, begin: int, crc: int) -> None:
        """Keep the CRC-32C of the tensor that begins at this byte."""
        self.sums[begin] = crc

    # A later epoch.

    def withdraw(self) -> None:
        """Reset the version as if no worker had received it; drop patches on older versions."""
        self.receivers.clear()
        self.end_awaiters.clear()
        self.checksum_awaiters.clear()
        self.unchecked_reports.clear()
        self.patches = ()  # the bases of patches are of the old epoch

    def renew(self, epoch: int) -> None:
        """Move the version to a later epoch; remember its last names (epoch, version)."""
        self.names = frozenset(sorted({*self.names, self.key})[-EPOCHS_KEPT:])
        self.epoch, self.sources = epoch, ()  # the sources know the version by its first name

    # Patches.

    def find(self, patch: PatchId | None) -> Chunked | None:
        """Return the patch with this id, or None; without an id, return the version itself."""
        if patch is None:
            return self
        return next((each for each in self.patches if each.patch == patch), None)

    def unpatch(self) -> tuple["VersionPatch", ...]:
        """Offer the version only whole from now on; return its former patches."""
        patches, self.patches = self.patches, ()
        return patches

    def patch_on(self, running: Running | None) -> "VersionPatch | None":
        """Return the patch for a worker that runs `running`; None if there is none."""
        return next((each for each in self.patches if each.base == running), None)

    def is_known_as(self, running: Running) -> bool:
        """True if `running` has the same bytes as this version, under another epoch and number."""
        if running.digest and self.names:
            return running.digest == self.digest
        return (running.epoch, running.version) in self.names


class VersionPatch(Chunked):
    """A patch to a version.

    Args:
        version: The version that the patch leads to, whose digest is known.
        offered: The offered patch.
    """

    def __init__(self, version: Version, offered: OfferedPatch) -> None:
        self.end_awaiters, self.waits = (
            set[str](),
            dict[str, dict[int, ChunkWait]](),
        )
        encoding, self.base, data, self.classes, self.work, arriving = offered
        self.patch = self.id = PatchId(encoding, self.base.epoch, self.base.version)
        self.plan = plan = plan_of(len(data), version.plan.chunk_bytes)
        self._version, self.snapshot = version, BytesInPlace(memoryview(data))
        here = Chunks[object](plan, self.snapshot, [None] * plan.count, whole=True)
        self.chunks: Chunks[object] = here if arriving is None else arriving

    @property
    def offered(self) -> Patch:
        """The patch's entry in announcements of its version."""
        name, digest = self.id, self.base.digest
        return Patch(name.encoding, name.epoch, name.version, digest, self.plan.nbytes)

    @property
    def target(self) -> Version:
        """The version that the patch leads to."""
        return self._version

    @property
    def digest(self) -> str:
        """The version's digest; empty until it is verified or the patch's `end` arrives."""
        return self._version.digest or self.chunks.digest

    @property
    def awaiting(self) -> set[str]:
        """The workers that wait for chunks or the `end`."""
        return self.end_awaiters.union(worker for worker, each in self.waits.items() if each)

    def end_awaited(self) -> list[str]:
        """End the waits for the `end` if it can be sent now; return the workers that waited."""
        if not (self.end_awaiters and self.digest):
            return []
        awaiters, self.end_awaiters = self.end_awaiters, set()
        return sorted(awaiters)
