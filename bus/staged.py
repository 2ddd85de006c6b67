"""Versions at a worker: in shared memory, being copied or decoded, or staged to be applied."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codecs.layout import Layout
from .chunks import ChunkPlan, Chunks
from .messages import PatchId, Running


class StaleError(Exception):
    """The segment holds another version, or is being filled."""


class OverwrittenError(StaleError):
    """The segment changed during the copy, which breaks the protocol: the copy is torn."""


class SharedMemory(Protocol):
    """A segment of the publisher on this host (`segment.MappedSegment`)."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The data section, read-only."""
        ...

    @property
    def note(self) -> bytes:
        """The location of a second copy in a device's memory; zeros: there is none."""
        ...

    def reading(
        self, model: str, epoch: int, version: int, *, second: bool = False
    ) -> AbstractContextManager[None]:
        """Lock the segment while the block copies from it, or from the second copy.

        Raises:
            StaleError: It holds another version.
            OverwrittenError: It was overwritten during the block.
        """
        ...


class StagedVersion(msgspec.Struct, frozen=True, eq=False):
    """A version, complete and verified, in a staging buffer or in shared memory.

    Attributes:
        model, key: The model's name, and (epoch, version), by which versions are ordered.
        layout: Name, dtype, shape and position of each tensor.
        data: The data section, `layout.nbytes` bytes; valid until it is applied or dropped.
        digest: The digest; empty on the shared-memory transport, where the bytes are not hashed.
        say_staged: Whether the publisher requires a report that it is staged.
        shared: The segment, if `data` is in one.
        hash_chunks: On the shared-memory transport: hash in chunks of this many bytes; 0: do not.
        patch: The patch that it was received as; None: it was received whole.
        decode_us: Microseconds that decoding this patch took.
        metadata: The publisher's metadata, as text by name.
    """

    model: str
    key: tuple[int, int]
    layout: Layout
    data: NDArray[np.uint8]
    digest: str
    say_staged: bool = False
    shared: SharedMemory | None = None
    hash_chunks: int = 0
    patch: PatchId | None = None
    decode_us: int = 0
    metadata: Mapping[str, str] = {}

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return self.key[0]

    @property
    def version(self) -> int:
        """Its number in the epoch."""
        return self.key[1]

    @property
    def note(self) -> bytes:
        """The location of a second copy on a device; zeros or empty: there is none."""
        return b"" if self.shared is None else self.shared.note

    def reading(self, *, second: bool = False) -> AbstractContextManager[None]:
        """Lock the bytes while the block copies from them, or from their second copy.

        Raises:
            StaleError: They belong to another version.
            OverwrittenError: They were overwritten during the block.
        """
        if self.shared is None:
            return nullcontext()
        return self.shared.reading(self.model, *self.key, second=second)

    @property
    def own(self) -> NDArray[np.uint8] | None:
        """The bytes, if they are in a staging buffer; None: they are in shared memory."""
        return self.data if self.shared is None else None


@dataclass(slots=True, eq=False)
class Base:
    """The bytes of the running version, on which patches build.

    Attributes:
        running: The running version.
        layout: Name, dtype, shape and position of each tensor.
        data: The bytes. Their owner may change them, so they are verified against the digest first.
        chunks: The staging buffer with the bytes, which is kept for patches; None: there is none.
        users: Number of patches for them that are arriving or being decoded.
    """

    running: Running
    layout: Layout
    data: NDArray[np.uint8]
    chunks: Chunks[NDArray[np.uint8]] | None
    users: int = 0


@dataclass(slots=True, eq=False)
class Patching:
    """The decoding of a patch into a staging buffer.

    Attributes:
        model, key: The model's name, and the version's (epoch, version).
        base: The base of the patch. Its bytes are not changed until this has ended.
        patch: The bytes of the patch.
        buffer: The destination. It is not used otherwise until this has ended.
        digest: The version's digest.
        live: False once the version is no longer wanted: end soon.
    """

    model: str
    key: tuple[int, int]
    base: Base
    patch: NDArray[np.uint8]
    buffer: NDArray[np.uint8]
    digest: str
    live: bool = True


@dataclass(slots=True, eq=False)
class Copying:
    """The copy of a version from shared memory into a staging buffer.

    Attributes:
        model, key: The model's name, and the version's (epoch, version).
        memory: The segment.
        buffer: The destination. It is not used otherwise until the copy has ended.
        plan: The version's chunks.
        live: False once the version is no longer wanted: end soon.
        count: Chunks that are copied.
    """

    model: str
    key: tuple[int, int]
    memory: SharedMemory
    buffer: NDArray[np.uint8]
    plan: ChunkPlan
    live: bool = True
    count: int = 0
