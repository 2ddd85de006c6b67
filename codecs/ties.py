"""Matches tied tensors of a version and a target, and finds tensors that overlap in part.

A tied tensor may be published under all of its names or under one (a checkpoint omits
`lm_head.weight` if that is the same tensor as `embed_tokens.weight`), and a target may have it
under one or several names. So names are compared by their tensors. A published tensor has *arrived*
if the target has the tensor under any of its published names. A tensor of the target is *filled* if
any of its names in the target is published. Two tensors of a target that overlap in part cannot
both have their published values, so they are refused.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from . import numpy_tensors
from .errors import StateError
from .layout import NAME_SHOWN, Layout
from .leaves import Leaf, of_torch
from .state import signature
from .words import printable

# Steps that numpy may take to decide whether two views share an element. Views that were made by
# slicing and transposing need few.
OVERLAP_STEPS_MAX: Final = 100_000


T = TypeVar("T")
Owner = tuple[str, str]  # (model id, name of one of its tensors)


class TensorPlace(NamedTuple):
    """Where and how a tensor is in memory. Tensors with equal places are the same tensor.

    Attributes:
        memory: The address space: a device, or a storage on the meta device.
        begin: The address of the first element.
        shape, strides: Sizes in elements and strides in bytes, without dimensions of size 1.
        dtype: The dtype's name.
        nbytes: Bytes per element.
    """

    memory: Hashable
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    nbytes: int


def place_of(name: str, leaf: Leaf) -> TensorPlace | None:
    """Return a tensor's place; None if it is empty or cannot be published."""
    try:
        dtype, _ = signature(name, leaf)
    except StateError:
        return None
    if 0 in leaf.shape:
        return None
    if isinstance(leaf, np.ndarray):
        memory, begin, strides = numpy_tensors.place(leaf)
    else:
        memory, begin, strides = of_torch().place(leaf)
        dtype += " conj" * leaf.is_conj() + " neg" * leaf.is_neg()  # its bytes mean other values
    sizes = [size for size in leaf.shape if size != 1]
    steps = [step for size, step in zip(leaf.shape, strides, strict=True) if size != 1]
    return TensorPlace(memory, begin, tuple(sizes), tuple(steps), dtype, leaf.itemsize)


class Ties:
    """Names of a layout and of a target that match only because tensors are tied.

    Attributes:
        arrived: Published names whose tensor the target has under another name.
        filled: Names of the target whose memory is published under another name.
    """

    def __init__(self, layout: Layout, leaves: Mapping[str, Leaf]) -> None:
        written = layout.signatures.keys() & leaves.keys()
        tensors = {layout.by_name(name).name for name in written}
        self.arrived = {n for n in layout.names() if layout.by_name(n).name in tensors} - written
        self._places = {name: place_of(name, leaves[name]) for name in written}
        held = {*self._places.values()} - {None}
        others = leaves.keys() - written if held else ()
        self.filled = {name for name in others if place_of(name, leaves[name]) in held}

    def faults(self) -> list[str]:
        """Return error lines for pairs of published tensors that overlap in part in the target."""
        names = {place: name for name, place in reversed(self._places.items()) if place is not None}
        found = (sorted(pair) for pair in _overlaps(names))
        pairs = ((printable(a, NAME_SHOWN), printable(b, NAME_SHOWN)) for a, b in found)
        return [
            f"{one} and {other}: share a part of their memory in the target, which cannot hold "
            "both; give one of them memory of its own (torch: .clone(), numpy: .copy())"
            for one, other in sorted(pairs)
        ]


def shared_memory(models: Mapping[str, Mapping[str, Leaf]]) -> list[tuple[Owner, Owner]]:
    """Return the pairs of tensors of different models that are tied or overlap."""
    owners: dict[TensorPlace, Owner] = {}
    found: list[tuple[Owner, Owner]] = []
    for model, leaves in models.items():
        for name, leaf in leaves.items():
            place = place_of(name, leaf)
            if place is not None and owners.setdefault(place, (model, name))[0] != model:
                found.append((owners[place], (model, name)))
    return found + [(a, b) for a, b in _overlaps(owners) if a[0] != b[0]]


def _overlaps(names: Mapping[TensorPlace, T]) -> Iterator[tuple[T, T]]:
    """Yield the names of each pair of tensors that overlap in part."""
    by_memory: dict[Hashable, list[tuple[int, int, TensorPlace]]] = {}
    for place in names:
        begin, end = _bounds(place)
        by_memory.setdefault(place.memory, []).append((begin, end, place))
    for spans in by_memory.values():
        # earlier tensors that may overlap the next tensor
        before: list[tuple[int, int, TensorPlace]] = []
        for span in sorted(spans):
            before = [each for each in before if each[1] > span[0]]
            for each in before:
                if _share(each[2], span[2]):
                    yield names[each[2]], names[span[2]]
            before.append(span)


def _bounds(place: TensorPlace) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address after its last byte."""
    reach = [(size - 1) * step for size, step in zip(place.shape, place.strides, strict=True)]
    last = place.begin + sum(each for each in reach if each > 0) + place.nbytes
    return place.begin + sum(each for each in reach if each < 0), last


def _share(one: TensorPlace, other: TensorPlace) -> bool:
    """Return whether two tensors share a byte. (Two columns of a matrix do not.)"""
    share: Any = np.shares_memory  # its stub allows only -1 and 0 for `max_work`
    try:
        return bool(share(_view(one), _view(other), max_work=OVERLAP_STEPS_MAX))
    except np.exceptions.TooHardError:
        return True


class _View:
    """A place in a form that numpy accepts; numpy never reads the memory."""

    def __init__(self, place: TensorPlace) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (place.begin or 1, False),
            "shape": place.shape,
            "strides": place.strides,
            "typestr": f"|V{place.nbytes}",
        }


def _view(place: TensorPlace) -> numpy_tensors.Array:
    return np.asarray(_View(place))
