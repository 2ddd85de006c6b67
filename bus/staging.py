"""Where a version waits until it is whole: the buffers of one model, and what they then hold.

There are at most two. One holds a version that is complete and waits to be applied, the other the
version that is arriving. They are kept and used again, so that a steady stream of versions touches
no fresh memory.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..codecs.layout import Layout
from .limits import BUFFERS_MAX


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    """A version, whole and verified.

    Attributes:
        model, epoch, version: Its name and number.
        layout: Where each tensor lies.
        data: The data section, `layout.nbytes` bytes; valid until it is applied or dropped.
        digest: What the bytes hash to.
    """

    model: str
    epoch: int
    version: int
    layout: Layout
    data: NDArray[np.uint8]
    digest: str

    @property
    def key(self) -> tuple[int, int]:
        """The order of versions: epoch, then version."""
        return self.epoch, self.version


class Buffers:
    """The staging buffers of one model."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._taken = 0

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return a buffer of this size, one used before if possible; None if all are in use.

        Raises:
            MemoryError: There is no memory for it.
        """
        if self._taken >= BUFFERS_MAX:
            return None
        fits = next((i for i, b in enumerate(self._free) if b.nbytes == nbytes), None)
        if fits is not None:
            buffer = self._free.pop(fits)
        else:
            self._free.clear()  # the model has changed its size: the old memory will not fit again
            buffer = np.empty(nbytes, np.uint8)
        self._taken += 1
        return buffer

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Take a buffer back."""
        self._taken -= 1
        self._free.append(buffer)
