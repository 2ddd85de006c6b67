"""Versions that are here: in shared memory, on their way from there, or whole and to be applied."""

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
    """Shared memory holds another version by now, or is being filled."""


class OverwrittenError(StaleError):
    """It became stale while it was copied: somebody has broken a rule, and the copy is torn."""


class SharedMemory(Protocol):
    """A segment of the publisher's, on this host (`segment.MappedSegment`)."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The data section, read-only."""
        ...

    @property
    def note(self) -> bytes:
        """Where a second copy of it lies, in the memory of a device; zeros: nowhere."""
        ...

    def reading(
        self, model: str, epoch: int, version: int, *, second: bool = False
    ) -> AbstractContextManager[None]:
        """Hold it while copying from it, or from the second copy.

        Raises:
            StaleError: It holds another version.
            OverwrittenError: It does so only now, after the copy.
        """
        ...


class StagedVersion(msgspec.Struct, frozen=True, eq=False):
    """A version, whole and verified, in a buffer of ours or in shared memory.

    Attributes:
        model, key: Its name, and its epoch and number, which is the order of versions.
        layout: Where each tensor lies.
        data: The data section, `layout.nbytes` bytes; valid until it is applied or dropped.
        digest: What the bytes hash to; empty on the shared road, where nothing hashes them.
        say_staged: The publisher wants to know that it is staged, before it is applied.
        shared: The segment, if `data` lies in one.
        hash_chunks: On the shared road: hash the bytes, in chunks of this size; 0: do not.
        patch: By which patch it came; None: as it is.
        decode_us: Microseconds that this patch took to be decoded.
        metadata: What its publisher says of it, as text by name.
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
        """Its number in that."""
        return self.key[1]

    @property
    def note(self) -> bytes:
        """Where there is a second copy of the bytes, on a device; zeros or nothing: nowhere."""
        return b"" if self.shared is None else self.shared.note

    def reading(self, *, second: bool = False) -> AbstractContextManager[None]:
        """Hold the bytes while copying from them, or from their second copy.

        Raises:
            StaleError: They are another version's by now.
            OverwrittenError: They became another version's while they were copied.
        """
        if self.shared is None:
            return nullcontext()
        return self.shared.reading(self.model, *self.key, second=second)

    @property
    def own(self) -> NDArray[np.uint8] | None:
        """The bytes, if they lie in memory of ours."""
        return self.data if self.shared is None else None


@dataclass(slots=True, eq=False)
class Base:
    """The bytes of what runs here, which patches build on.

    Attributes:
        running: What runs.
        layout: Where each tensor lies.
        data: They; who they are of may change them, so they are held against the digest first.
        chunks: The staging buffer that they lie in, which is kept for this; None: in none.
        users: How many patches are arriving for them, or being decoded.
    """

    running: Running
    layout: Layout
    data: NDArray[np.uint8]
    chunks: Chunks[NDArray[np.uint8]] | None
    users: int = 0


@dataclass(slots=True, eq=False)
class Patching:
    """A version on its way from a patch that is here into a buffer of ours.

    Attributes:
        model, key: Its name, and its epoch and number.
        base: What the patch builds on. Nobody writes there before this has ended.
        patch: The patch.
        buffer: Where to. It serves nothing else until this has ended, one way or another.
        digest: What the version hashes to.
        live: Until nobody wants it any more: then end it soon.
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
    """A version on its way from shared memory into a buffer of ours.

    Attributes:
        model, key: Its name, and its epoch and number.
        memory: Where it lies.
        buffer: Where to. It serves nothing else until the copy has ended, one way or another.
        plan: Its chunks.
        live: Until nobody wants it any more: then end it soon.
        count: Chunks that are here.
    """

    model: str
    key: tuple[int, int]
    memory: SharedMemory
    buffer: NDArray[np.uint8]
    plan: ChunkPlan
    live: bool = True
    count: int = 0
