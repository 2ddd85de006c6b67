"""Copying many tensors, pair by pair, again and again.

One call of a library costs more than to copy a small tensor. So those that are plain memory on
both sides are copied as memory; the others by numpy, or by one call of torch for all of them.

What lies on a CUDA device is copied there, or from there, at the speed of the link
(`device_copies`), while this process goes on.

Where few elements differ, `Differences` finds them beforehand, and writes these alone.
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

STEP_BYTES = 2**26  # copied before somebody may look at the clock: some hundredths of a second
SCAN_WORDS: Final = 2**17  # compared at once: what caches hold
SMALL_BYTES: Final = 2**14  # to copy a tensor of this takes no longer than to look at it
SPARSE: Final = 10  # one in so many words may differ: else it is about as fast to copy all

Words = NDArray[np.unsignedinteger]


class Copies:
    """Copies from some tensors into others, as long as none of them moves or changes its shape.

    Args:
        destinations: Where to, either all numpy arrays or all torch tensors where the source is.
        sources: Where from. Neither is kept: whoever copies passes them again, with the same
            memory (`state.Outline` tells).
        private: Whether nobody but the caller knows the destinations: nobody is told of a change.
        second: By way of which second copy on a device to copy from there.

    Attributes:
        devices: What is copied to or from devices; None if nothing is.
        plain: Copies every tensor, as memory; None if there is more to it.
    """

    def __init__(
        self,
        destinations: Sequence[Leaf],
        sources: Sequence[Leaf],
        *,
        private: bool = False,
        second: "Second | None" = None,
    ) -> None:
        plain: list[tuple[int, int, int]] = []  # where to, where from, how much
        self._changed: list[int] = []  # of these, the ones that torch must be told of
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
        """Have all memory there that copies take.

        Raises:
            MemoryError: A device has none.
        """
        if self.devices is not None:
            self.devices.ready(destinations, sources)

    def run(
        self,
        destinations: Sequence[Leaf],
        sources: Sequence[Leaf],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy every tensor; `check` is called between steps, and may raise."""
        arriving = self.begin(destinations, sources, check)
        if arriving is not None:
            try:
                arriving.wait(check)
            except BaseException:
                arriving.wait()  # nobody else may have the memory before
                raise

    def begin(
        self,
        destinations: Sequence[Leaf],
        sources: Sequence[Leaf],
        check: Callable[[], None] = lambda: None,
    ) -> "Arriving | None":
        """Copy every tensor that lies in this process's memory, and have devices begin.

        Returns:
            What is waited for; None: it is all there.

        Raises:
            MemoryError: A device has no memory for it; nothing was copied.
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
    """Tell whether a tensor lies on a CUDA device."""
    return not isinstance(leaf, np.ndarray) and leaf.is_cuda


def devices_of(leaves: Iterable[Leaf]) -> "frozenset[torch.device]":
    """Return the CUDA devices that tensors lie on."""
    return frozenset(cast("torch.Tensor", leaf).device for leaf in leaves if on_device(leaf))


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
    """Where tensors differ from others, to be written there alone.

    Args:
        destinations, sources: As those of `Copies`.

    Raises:
        ValueError: More differs than it pays to write alone, or a tensor is not plain memory.
    """

    def __init__(self, destinations: Sequence[Leaf], sources: Sequence[Leaf]) -> None:
        self._pairs = destinations, sources
        self._held: list[Leaf] = []  # what is looked at, whatever a reader does to its tensor
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
        width = math.gcd(*to, from_[0], 8)  # not of an element: the widest are compared soonest
        there, new = (native.bytes_at(*each).view(f"u{width}") for each in (to, from_))
        at = self._where(there, new)
        if at.size:
            self._found.append((there, at, new[at]))

    def _where(self, there: Words, new: Words) -> NDArray[np.intp]:
        found: list[NDArray[np.intp]] = []
        for begin in range(0, there.size, SCAN_WORDS):
            end = begin + SCAN_WORDS
            at = np.flatnonzero(there[begin:end] != new[begin:end])
            self._room -= at.size * there.itemsize
            if self._room < 0:
                raise ValueError(f"more than one word in {SPARSE} differs")
            found.append(at + begin)
        return np.concatenate(found)

    def write(self) -> None:
        """Have all of the one be what the others are."""
        destinations, sources = self._pairs
        for there, at, values in self._found:
            there[at] = values
        large = _some(destinations, self._large)
        tensors = [leaf for leaf in large if not isinstance(leaf, np.ndarray)]
        if tensors:
            of_torch().changed(tensors)
        self._copies.run(_some(destinations, self._small), _some(sources, self._small))
