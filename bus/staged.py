"""A version that is whole and may be applied, wherever its bytes lie."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..codecs.layout import Layout


class StaleError(Exception):
    """Shared memory holds another version by now, or is being filled."""


class OverwrittenError(StaleError):
    """It became stale while it was copied: somebody has broken a rule, and the copy is torn."""


class SharedMemory(Protocol):
    """A segment of the publisher's, on this host (`segment.View`)."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The data section, read-only."""
        ...

    def reading(self, model: str, epoch: int, version: int) -> AbstractContextManager[None]:
        """Hold it while copying.

        Raises:
            StaleError: It holds another version.
            OverwrittenError: It does so only now, after the copy.
        """
        ...

    def warm(self) -> None:
        """Map it ahead of the first copy, without keeping the caller."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    """A version, whole and verified, in a buffer of ours or in shared memory.

    Attributes:
        model, epoch, version: Its name and number.
        layout: Where each tensor lies.
        data: The data section, `layout.nbytes` bytes; valid until it is applied or dropped.
        digest: What the bytes hash to; empty on the shared road, where nothing hashes them.
        say_staged: The publisher wants to know that it is staged, before it is applied.
        shared: The segment, if `data` lies in one.
        hash_chunks: On the shared road: hash the bytes, in chunks of this size; 0: do not.
    """

    model: str
    epoch: int
    version: int
    layout: Layout
    data: NDArray[np.uint8]
    digest: str
    say_staged: bool = False
    shared: SharedMemory | None = None
    hash_chunks: int = 0

    def reading(self) -> AbstractContextManager[None]:
        """Hold the bytes while copying from them.

        Raises:
            StaleError: They are another version's by now.
            OverwrittenError: They became another version's while they were copied.
        """
        if self.shared is None:
            return nullcontext()
        return self.shared.reading(self.model, self.epoch, self.version)

    @property
    def key(self) -> tuple[int, int]:
        """The order of versions: epoch, then version."""
        return self.epoch, self.version
