"""Copying many tensors, pair by pair, again and again.

One call of a library costs more than to copy a small tensor. So those that are plain memory on
both sides are copied as memory; the others by numpy, or by one call of torch for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import native, numpy_tensors
from .outline import Leaf, of_torch

STEP_BYTES = 2**26  # copied before somebody may look at the clock: some hundredths of a second


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
        plain: list[tuple[int, int, int]] = []  # where to, where from, how much
        self._changed: list[int] = []  # of these, the ones that torch must be told of
        arrays: list[int] = []
        tensors: list[int] = []
        for index, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
            memory = plain_memory(destination, source)
            if memory is not None:
                plain.append(memory)
                if not (private or isinstance(destination, np.ndarray)):
                    self._changed.append(index)
            elif isinstance(destination, np.ndarray):
                arrays.append(index)
            else:
                tensors.append(index)
        self._array_steps = _steps(arrays, destinations)
        self._tensor_steps = _steps(tensors, destinations)
        self._copy_plain = native.copies(*np.array(plain, np.uint64).reshape(-1, 3).T.copy())

    def run(
        self,
        destinations: Sequence[Leaf],
        sources: Sequence[Leaf],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy every tensor; `check` is called between steps, and may raise."""
        self._copy_plain()
        if self._changed:
            of_torch().changed(_some(destinations, self._changed))
        for step in self._array_steps:
            numpy_tensors.copy(_some(destinations, step), _some(sources, step))
            check()
        for step in self._tensor_steps:
            of_torch().copy(_some(destinations, step), _some(sources, step))
            check()


def _steps(indexes: Sequence[int], leaves: Sequence[Leaf]) -> list[list[int]]:
    """Cut tensors into steps, of one or of not many bytes."""
    steps, nbytes = list[list[int]](), STEP_BYTES
    for index in indexes:
        if nbytes >= STEP_BYTES:
            steps.append([])
            nbytes = 0
        steps[-1].append(index)
        nbytes += leaves[index].nbytes
    return steps


def _some(leaves: Sequence[Leaf], indexes: Sequence[int]) -> list[Any]:
    if len(indexes) == len(leaves):  # in order, each once
        return [*leaves]
    return [leaves[index] for index in indexes]


def plain_memory(destination: Leaf, source: Leaf) -> tuple[int, int, int] | None:
    """Return both addresses and the bytes of tensors to be copied as memory; None of others."""
    to, from_ = _memory(destination), _memory(source)
    if to and from_ and destination.dtype == source.dtype and to[1] == from_[1]:
        return to[0], *from_
    return None


def _memory(leaf: Leaf) -> tuple[int, int] | None:
    if isinstance(leaf, np.ndarray):
        if leaf.nbytes > native.COPIED_BYTES_MAX or not leaf.flags.c_contiguous:
            return None
        return leaf.__array_interface__["data"][0], leaf.nbytes
    nbytes = leaf.numel() * leaf.itemsize
    if nbytes > native.COPIED_BYTES_MAX or not of_torch().bare(leaf):
        return None
    return leaf.data_ptr(), nbytes
