"""Copying many tensors, pair by pair, again and again.

One call of a library costs more than to copy a small tensor. So small ones that are plain memory
on both sides are copied as memory; the others by numpy, or by one call of torch for all of them.
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np

from . import numpy_tensors
from .outline import Leaf, of_torch

# Below this, copying as memory is faster. It keeps Python's lock, so it must not take long.
SMALL_BYTES = 2**15
_ALL = slice(None)


class Copies:
    """Copies from some tensors into others, as long as none of them moves or changes its shape.

    Args:
        destinations: Where to, either all numpy arrays or all torch tensors where the source is.
        sources: Where from. Neither is kept: whoever copies passes them again, with the same
            memory (`outline.Outline` tells).
        private: Whether nobody but the caller knows the destinations: nobody is told of a change.
    """

    def __init__(
        self, destinations: Sequence[Leaf], sources: Sequence[Leaf], *, private: bool = False
    ) -> None:
        self._to: list[memoryview] = []
        self._from: list[memoryview] = []
        self._changed: list[int] = []  # of these, the ones that torch must be told of
        self._arrays: list[int] = []
        self._tensors: list[int] = []
        for index, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
            to, from_ = _memory(destination), _memory(source)
            if to and from_ and destination.dtype == source.dtype and to[1] == from_[1]:
                self._to.append(_view(*to))
                self._from.append(_view(*from_))
                if not (private or isinstance(destination, np.ndarray)):
                    self._changed.append(index)
            elif isinstance(destination, np.ndarray):
                self._arrays.append(index)
            else:
                self._tensors.append(index)

    def run(self, destinations: Sequence[Leaf], sources: Sequence[Leaf]) -> None:
        """Copy every tensor."""
        deque(map(memoryview.__setitem__, self._to, repeat(_ALL), self._from), maxlen=0)
        if self._changed:
            of_torch().changed(_some(destinations, self._changed))
        if self._arrays:
            numpy_tensors.copy(_some(destinations, self._arrays), _some(sources, self._arrays))
        if self._tensors:
            of_torch().copy(_some(destinations, self._tensors), _some(sources, self._tensors))


def _some(leaves: Sequence[Leaf], indexes: Sequence[int]) -> list[Any]:
    return [leaves[index] for index in indexes]


def _memory(leaf: Leaf) -> tuple[int, int] | None:
    """Return address and size of a small tensor that is plain memory; None of any other."""
    if isinstance(leaf, np.ndarray):
        if leaf.nbytes > SMALL_BYTES or not leaf.flags.c_contiguous:
            return None
        return leaf.__array_interface__["data"][0], leaf.nbytes
    if leaf.numel() * leaf.itemsize > SMALL_BYTES or not of_torch().bare(leaf):
        return None
    return leaf.data_ptr(), leaf.numel() * leaf.itemsize


def _view(address: int, nbytes: int) -> memoryview:
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.ctypeslib.as_array(memory).data  # numpy's bytes can be assigned to
