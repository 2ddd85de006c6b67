"""Memory for sealed bytes: used again from version to version, once nobody sends from it."""

import weakref

import numpy as np
from numpy.typing import NDArray

from ..limits import SNAPSHOTS_MAX
from .staging import memory_of

Block = tuple[NDArray[np.uint8], "weakref.ref[NDArray[np.uint8]]"]


class SealedMemory:
    """The memory for sealed bytes of one publisher, by model."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[Block]] = {}

    def take(self, model: str, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of this size, which is free again once nobody refers to it.

        As much is kept for the next versions as can be held at a time, and is not given back.
        """
        blocks = self._blocks.setdefault(model, [])
        blocks[:] = [b for b in blocks if b[1]() is not None or b[0].nbytes == nbytes]
        free = [block for block in blocks if block[1]() is None]
        memory = free[0][0] if free else memory_of(nbytes)
        view = memory.view()
        blocks[:] = [b for b in blocks if b[0] is not memory][-SNAPSHOTS_MAX + 1 :]
        blocks.append((memory, weakref.ref(view)))
        return view
