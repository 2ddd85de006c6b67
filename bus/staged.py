"""Records of a worker's versions: those staged, and those being copied, decoded or fetched."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codecs.layout import Layout
from .chunks import ChunkPlan, Chunks
from .cut import Cut
from .messages import Announce, PatchId, Running, Source


class StaleError(Exception):
    """The segment has another version than expected, or a version is being written to it."""


class OverwrittenError(StaleError):
    """The segment changed during a copy, so the copy is unusable. This is a publisher's defect."""


class SharedMemory(Protocol):
    """A segment of a publisher on this host (class `segment.MappedSegment`)."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the segment's version, read-only."""
        ...

    @property
    def note(self) -> bytes:
        """The location of a second copy of the bytes on a device; only zeros: there is none."""
        ...

    def reading(
        self, model: str, epoch: int, version: int, *, second: bool = False
    ) -> AbstractContextManager[None]:
        """Lock the segment during a `with` block that copies from the segment or the second copy.

        Raises:
            StaleError: The segment has another version.
            OverwrittenError: The segment was overwritten during the block.
        """
        ...


class StagedVersion(msgspec.Struct, frozen=True, eq=False):
    """A complete and verified version in a staging buffer or in shared memory.

    Attributes:
        model, key: The model's name, and (epoch, version), by which versions are ordered.
        layout: Name, dtype, shape and position of each tensor, or of each slice of a part.
        data: The data section, `layout.nbytes` bytes; valid until the version is applied or
            dropped.
        digest: The digest; empty on the shared-memory transport, where the bytes are not hashed.
        report_staged: Whether to report to the publisher that the version is staged.
        shared: The segment that `data` is in; None: `data` is in a staging buffer.
        hash_chunks: On the shared-memory transport, the bytes of each chunk to hash; 0: do not
            hash.
        patch: The patch that was received; None: the whole version was received.
        decode_us: Microseconds that it took to decode the patch.
        metadata: The publisher's metadata, as text by name.
        companions: By model, the numbers of the other models' versions published as one with it.
        others: Versions that must be applied at once with this one.
    """

    model: str
    key: tuple[int, int]
    layout: Layout
    data: NDArray[np.uint8]
    digest: str
    report_staged: bool = False
    shared: SharedMemory | None = None
    hash_chunks: int = 0
    patch: PatchId | None = None
    decode_us: int = 0
    metadata: Mapping[str, str] = {}
    companions: Mapping[str, int] = {}
    others: "tuple[StagedVersion, ...]" = ()

    @property
    def epoch(self) -> int:
        """The version's epoch."""
        return self.key[0]

    @property
    def version(self) -> int:
        """The version's number in the epoch."""
        return self.key[1]

    @property
    def note(self) -> bytes:
        """The location of a second copy of the bytes on a device; empty or zeros: there is none."""
        return b"" if self.shared is None else self.shared.note

    def reading(self, *, second: bool = False) -> AbstractContextManager[None]:
        """Lock the bytes during a `with` block that copies from them or from their second copy.

        Raises:
            StaleError: The bytes belong to another version.
            OverwrittenError: The bytes were overwritten during the block.
        """
        if self.shared is None:
            return nullcontext()
        return self.shared.reading(self.model, *self.key, second=second)

    @property
    def private_bytes(self) -> NDArray[np.uint8] | None:
        """The bytes if they are in a staging buffer; None if they are in shared memory."""
        return self.data if self.shared is None else None


@dataclass(slots=True, eq=False)
class Base:
    """The bytes of the running version, as a base for patches to newer versions.

    Attributes:
        running: The running version.
        layout: Name, dtype, shape and position of each tensor.
        data: The bytes. The owner may change them, so they are verified before a patch is applied.
        chunks: The staging buffer with the bytes; None: the bytes are not in a staging buffer.
        users: Number of patches on this base that are arriving or being decoded.
    """

    running: Running
    layout: Layout
    data: NDArray[np.uint8]
    chunks: Chunks[NDArray[np.uint8]] | None
    users: int = 0

    def hold(self) -> None:
        """Record one more patch on this base, whose bytes stay until `release`."""
        self.users += 1

    def release(self) -> None:
        """Record that one patch on this base no longer needs the bytes."""
        self.users -= 1

    def rename(self, running: Running) -> None:
        """Record the running version's new name."""
        self.running = running


@dataclass(slots=True, eq=False)
class Patching:
    """The decoding of one patch into a staging buffer.

    Attributes:
        model, key: The model's name, and the version's (epoch, version).
        base: The running version that the patch builds on; its bytes stay until the decoding ends.
        patch: The bytes of the patch.
        buffer: The memory for the decoded version, which nothing else uses during the decoding.
        digest: The version's digest.
        live: False once the version is no longer wanted: stop soon.
    """

    model: str
    key: tuple[int, int]
    base: Base
    patch: NDArray[np.uint8]
    buffer: NDArray[np.uint8]
    digest: str
    live: bool = True

    def cancel(self) -> None:
        """Record that the version is no longer wanted."""
        self.live = False


@dataclass(slots=True, eq=False)
class Copying:
    """The copying of one version from shared memory into a staging buffer.

    Attributes:
        model, key: The model's name, and the version's (epoch, version).
        memory: The segment to copy from.
        buffer: The memory for the copy, which nothing else uses during the copying.
        plan: The version's chunks.
        cut: How the chunks are cut, if the worker receives a part; None: it receives all.
        live: False once the version is no longer wanted: stop soon.
        count: The number of chunks that are copied already.
    """

    model: str
    key: tuple[int, int]
    memory: SharedMemory
    buffer: NDArray[np.uint8]
    plan: ChunkPlan
    cut: Cut | None = None
    live: bool = True
    count: int = 0

    def cancel(self) -> None:
        """Record that the version is no longer wanted."""
        self.live = False


@dataclass(slots=True, eq=False)
class SourceFetch:
    """The fetching of some chunks of one version from its sources, into its memory. (N1)

    Attributes:
        announce: The announcement of the version.
        sources: (address, chunk indexes) of each source. Each chunk is fetched from one source.
        buffer: The memory for the version. Nothing else writes these chunks there.
        plan: The version's chunks.
        cut: How the chunks are cut, if the worker receives a part; None: it receives all.
        live: False once the version is no longer wanted: stop soon.
        complete: Whether all of these chunks have arrived.
    """

    announce: Announce
    sources: Sequence[tuple[str, Sequence[int]]]
    buffer: NDArray[np.uint8]
    plan: ChunkPlan
    cut: Cut | None = None
    live: bool = True
    complete: bool = False

    def cancel(self) -> None:
        """Record that the version is no longer wanted."""
        self.live = False

    def end(self) -> None:
        """Record that all of these chunks have arrived."""
        self.complete = True


def indexes_of(source: Source, plan: ChunkPlan) -> list[int]:
    """Return the valid indexes of a version's chunks that a source has, each once."""
    has = np.zeros(plan.count, np.bool_)  # ranges may overlap
    for first, count in zip(source.chunks[::2], source.chunks[1::2], strict=False):
        has[first : first + count] = True
    return np.flatnonzero(has).tolist()
