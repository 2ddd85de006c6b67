"""Names of a target that are one tensor, and tensors of a target that overlap in part.

A tied model may be published with each name of its tensor or with one of them (a checkpoint leaves
`lm_head.weight` out where it is `embed_tokens.weight`), and a target may have it under one name or
several. So names count for what they stand for: a published tensor has arrived if it is in the
target by any of its names, and memory of the target is filled if any of its names is published.
Memory that two tensors share in part cannot hold both, so it is refused.
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

# What numpy may try before it gives up telling whether two views have an element in common. What
# slices and transposes make of a tensor takes a few steps.
OVERLAP_STEPS_MAX: Final = 100_000


T = TypeVar("T")
Owner = tuple[str, str]  # a model, and the name of one of its tensors


class Place(NamedTuple):
    """Where a tensor lies. Two tensors are one if their places are equal.

    Attributes:
        memory: Whose addresses these are: a device's, or a storage's on the meta device.
        begin: The address of its first element.
        shape, strides: In elements, and in bytes; of sizes other than 1 alone.
        dtype: Its name.
        nbytes: Of an element.
    """

    memory: Hashable
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    nbytes: int


def place_of(name: str, leaf: Leaf) -> Place | None:
    """Return where a tensor lies; None of one without elements, or one that cannot travel."""
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
        dtype += " conj" * leaf.is_conj() + " neg" * leaf.is_neg()  # it is written otherwise
    sizes = [size for size in leaf.shape if size != 1]
    steps = [step for size, step in zip(leaf.shape, strides, strict=True) if size != 1]
    return Place(memory, begin, tuple(sizes), tuple(steps), dtype, leaf.itemsize)


class Ties:
    """How the names of a layout and of a target's tensors cover one another.

    Attributes:
        arrived: Published names that need not be in the target: another name of the same is.
        filled: Names of the target that need not be published: another name of the same memory is.
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
        """Say in lines which tensors of the target, both of them published, overlap in part."""
        names = {place: name for name, place in reversed(self._places.items()) if place is not None}
        found = (sorted(pair) for pair in _overlaps(names))
        pairs = ((printable(a, NAME_SHOWN), printable(b, NAME_SHOWN)) for a, b in found)
        return [
            f"{one} and {other}: share a part of their memory in the target, which cannot hold "
            "both; give one of them memory of its own (torch: .clone(), numpy: .copy())"
            for one, other in sorted(pairs)
        ]


def shared_memory(models: Mapping[str, Mapping[str, Leaf]]) -> list[tuple[Owner, Owner]]:
    """Return which tensors of different models are one, or overlap: each by its model and name."""
    owners: dict[Place, Owner] = {}
    found: list[tuple[Owner, Owner]] = []
    for model, leaves in models.items():
        for name, leaf in leaves.items():
            place = place_of(name, leaf)
            if place is not None and owners.setdefault(place, (model, name))[0] != model:
                found.append((owners[place], (model, name)))
    return found + [(a, b) for a, b in _overlaps(owners) if a[0] != b[0]]


def _overlaps(names: Mapping[Place, T]) -> Iterator[tuple[T, T]]:
    """Yield what pairs of tensors are called that overlap in part."""
    by_memory: dict[Hashable, list[tuple[int, int, Place]]] = {}
    for place in names:
        begin, end = _bounds(place)
        by_memory.setdefault(place.memory, []).append((begin, end, place))
    for spans in by_memory.values():
        before: list[tuple[int, int, Place]] = []  # those that end behind what begins next
        for span in sorted(spans):
            before = [each for each in before if each[1] > span[0]]
            for each in before:
                if _share(each[2], span[2]):
                    yield names[each[2]], names[span[2]]
            before.append(span)


def _bounds(place: Place) -> tuple[int, int]:
    """Return between which addresses a tensor lies, the last excluded."""
    reach = [(size - 1) * step for size, step in zip(place.shape, place.strides, strict=True)]
    last = place.begin + sum(each for each in reach if each > 0) + place.nbytes
    return place.begin + sum(each for each in reach if each < 0), last


def _share(one: Place, other: Place) -> bool:
    """Tell whether two tensors have a byte in common. (Two columns of a matrix have none.)"""
    share: Any = np.shares_memory  # declared for the steps -1 and 0 alone
    try:
        return bool(share(_view(one), _view(other), max_work=OVERLAP_STEPS_MAX))
    except np.exceptions.TooHardError:
        return True


class _View:
    """Addresses as numpy takes them, which are not looked at, wherever they are."""

    def __init__(self, place: Place) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (place.begin or 1, False),
            "shape": place.shape,
            "strides": place.strides,
            "typestr": f"|V{place.nbytes}",
        }


def _view(place: Place) -> numpy_tensors.Array:
    return np.asarray(_View(place))
