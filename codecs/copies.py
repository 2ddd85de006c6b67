"""Copies many tensors, pair by pair, and prepares this once for repeated copies.

A call of numpy or torch takes longer than the copy of a small tensor. So pairs of tensors that are
both plain memory are copied as memory. Other pairs are copied by numpy, or by torch in few calls.

Tensors on a CUDA device are copied asynchronously, at the speed of the link (`device_copies`).

If few elements differ, `Differences` finds these first, and then writes only them.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from . import native, numpy_tensors
from .leaves import Leaf, of_torch

if TYPE_CHECKING:
    import torch

    from .device_copies import Arriving, DeviceCopies, Second

STEP_BYTES = 2**26  # bytes copied between two calls of `check`: some hundredths of a second
SCAN_WORDS: Final = 2**17  # words compared at once, which fit into the caches
SMALL_BYTES: Final = 2**14  # a smaller tensor is copied as fast as it is compared
SPARSE: Final = 10  # at most one word in 10 may differ: otherwise copying everything is as fast

Words = NDArray[np.unsignedinteger]


class Copies:
    """Copies between fixed pairs of tensors; valid until a tensor moves or changes its shape.

    Args:
        destinations: The tensors to write. Each is a numpy array if and only if its source is one.
        sources: The tensors to read. Neither list is stored: callers pass both to each method, and
            the tensors must still have the same memory (`state.Outline` detects changes).
        private: Whether only the caller uses the destinations, so autograd need not be notified.
        second: The second copy on a device, to which sources on that device are first copied.

    Attributes:
        devices: Makes the copies to or from devices; None if there are none.
        plain: A function that copies every tensor as memory; None if that is impossible for some.
    """

    def __init__(
        self,
        destinations: Sequence[Leaf],
        sources: Sequence[Leaf],
        *,
        private: bool = False,
        second: "Second | None" = None,
    ) -> None:
        plain: list[tuple[int, int, int]] = []  # destination, source, bytes
        # indexes of tensors whose version counter must be incremented
        self._changed: list[int] = []
        arrays: list[int] = []
        tensors: list[int] = []
        on_devices: list[int] = []
        for index, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
            memory = plain_memory(destination, source)
            if memory is not None:
                plain.append(memory)
                if not (private or isinstance(destination, np.ndarray)):
                    self._changed.append(index)
            elif isinstance(destination, np.ndarray):
                arrays.append(index)
            elif on_device(destination) or on_device(source):
                on_devices.append(index)
            else:
                tensors.append(index)
        self.devices: DeviceCopies | None = None
        if on_devices:
            from . import device_copies as on

            self.devices = on.DeviceCopies(destinations, sources, on_devices, second)
        self._array_steps = _steps(arrays, destinations)
        self._tensor_steps = _steps(tensors, destinations)
        self._copy_plain = native.copies(*np.array(plain, np.uint64).reshape(-1, 3).T.copy())
        more = on_devices or arrays or tensors or self._changed
        self.plain = None if more else self._copy_plain

    def ready(self, destinations: Sequence[Leaf], sources: Sequence[Leaf]) -> None:
        """Allocate all memory that the copies need.

        Raises:
            MemoryError: A device is out of memory.
        """
        if self.devices is not None:
            self.devices.ready(destinations, sources)

    def run(
        self,
        destinations: Sequence[Leaf],
        sources: Sequence[Leaf],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy every tensor. `check` is called between steps; it may raise to stop the copying."""
        arriving = self.begin(destinations, sources, check)
        if arriving is not None:
            try:
                arriving.wait(check)
            except BaseException:
                arriving.wait()  # the memory must not be reused before the copies have ended
                raise

    def begin(
        self,
        destinations: Sequence[Leaf],
        sources: Sequence[Leaf],
        check: Callable[[], None] = lambda: None,
    ) -> "Arriving | None":
        """Copy the tensors in this process's memory, and start the copies to or from devices.

        Returns:
            The copies in progress; None if all are complete.

        Raises:
            MemoryError: A device is out of memory; nothing was copied.
        """
        if self.devices is not None:
            self.devices.ready(destinations, sources)
        self._copy_plain()
        if self._changed:
            of_torch().changed(_some(destinations, self._changed))
        for step in self._array_steps:
            numpy_tensors.copy(_some(destinations, step), _some(sources, step))
            check()
        for step in self._tensor_steps:
            of_torch().copy(_some(destinations, step), _some(sources, step))
            check()
        return None if self.devices is None else self.devices.begin(destinations, sources)


def on_device(leaf: Leaf) -> bool:
    """Return whether a tensor is on a CUDA device."""
    return not isinstance(leaf, np.ndarray) and leaf.is_cuda


def devices_of(leaves: Iterable[Leaf]) -> "frozenset[torch.device]":
    """Return the CUDA devices of some tensors."""
    return frozenset(cast("torch.Tensor", leaf).device for leaf in leaves if on_device(leaf))


def _steps(indexes: Sequence[int], leaves: Sequence[Leaf]) -> list[list[int]]:
    """Divide the indexes into groups with about `STEP_BYTES` of tensors, or one larger tensor."""
    steps, nbytes = list[list[int]](), STEP_BYTES
    for index in indexes:
        if nbytes >= STEP_BYTES:
            steps.append([])
            nbytes = 0
        steps[-1].append(index)
        nbytes += leaves[index].nbytes
    return steps


def _some(leaves: Sequence[Leaf], indexes: Sequence[int]) -> list[Any]:
    if len(indexes) == len(leaves):  # all of them, in order
        return [*leaves]
    return [leaves[index] for index in indexes]


def plain_memory(destination: Leaf, source: Leaf) -> tuple[int, int, int] | None:
    """Return (destination, source, bytes) of a pair that can be copied as memory, else None."""
    to, from_ = _memory(destination), _memory(source)
    if to and from_ and destination.dtype == source.dtype and to[1] == from_[1]:
        return to[0], *from_
    return None


def _memory(leaf: Leaf, most: int = native.COPIED_BYTES_MAX) -> tuple[int, int] | None:
    if isinstance(leaf, np.ndarray):
        if leaf.nbytes > most or not leaf.flags.c_contiguous:
            return None
        return leaf.__array_interface__["data"][0], leaf.nbytes
    nbytes = leaf.numel() * leaf.itemsize
    if nbytes > most or not of_torch().bare(leaf):
        return None
    return leaf.data_ptr(), nbytes


class Differences:
    """Finds the words in which destinations differ from sources, and writes only these.

    Args:
        destinations, sources: As in `Copies`.

    Raises:
        ValueError: Too many words differ, or a tensor is not plain memory or has another dtype.
    """

    def __init__(self, destinations: Sequence[Leaf], sources: Sequence[Leaf]) -> None:
        self._pairs = destinations, sources
        self._held: list[Leaf] = []  # keeps the memory alive if a user replaces a tensor's data
        self._large: list[int] = []
        self._found: list[tuple[Words, NDArray[np.intp], Words]] = []
        small: list[int] = []
        for index, leaf in enumerate(destinations):
            (small if leaf.nbytes <= SMALL_BYTES else self._large).append(index)
        self._small = small
        self._copies = Copies(_some(destinations, small), _some(sources, small))
        self._room = sum(destinations[index].nbytes for index in self._large) // SPARSE
        for index in self._large:
            self._compare(destinations[index], sources[index])

    def _compare(self, destination: Leaf, source: Leaf) -> None:
        held = destination if isinstance(destination, np.ndarray) else destination.detach()
        self._held.append(held)
        to, from_ = _memory(held, sys.maxsize), _memory(source, sys.maxsize)
        if not (to and from_) or destination.dtype != source.dtype:
            raise ValueError("a tensor is not plain memory, or is converted")
        width = math.gcd(*to, from_[0], 8)  # bytes of a word: the wider, the faster
        target, new = (native.bytes_at(*each).view(f"u{width}") for each in (to, from_))
        at = self._where(target, new)
        if at.size:
            self._found.append((target, at, new[at]))

    def _where(self, target: Words, new: Words) -> NDArray[np.intp]:
        found: list[NDArray[np.intp]] = []
        for begin in range(0, target.size, SCAN_WORDS):
            end = begin + SCAN_WORDS
            at = np.flatnonzero(target[begin:end] != new[begin:end])
            self._room -= at.size * target.itemsize
            if self._room < 0:
                raise ValueError(f"more than one word in {SPARSE} differs")
            found.append(at + begin)
        return np.concatenate(found)

    def write(self) -> None:
        """Write the differing elements, and copy the small tensors."""
        destinations, sources = self._pairs
        for target, at, values in self._found:
            target[at] = values
        large = _some(destinations, self._large)
        tensors = [leaf for leaf in large if not isinstance(leaf, np.ndarray)]
        if tensors:
            of_torch().changed(tensors)
        self._copies.run(_some(destinations, self._small), _some(sources, self._small))
