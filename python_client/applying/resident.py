"""Resident models: a model is moved into one memory mapping of the bus, in layout order.

A version in staging memory is applied by exchanging pages with the model, in a time that hardly
depends on the size. Parameters stay the same objects, and `data_ptr` changes only in the move.
After an apply, the staging memory has the bytes of the previous version, so the apply can be
undone.
"""

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ...bus.memory.pages import Pages, address_of, exchange, memory_of, pages_of, within
from ...bus.staged import StagedVersion
from ...bus.worker.layouts import Expected
from ...codecs.apply import calls_users
from ...codecs.errors import StateError
from ...codecs.layout import Layout, TensorSpec
from ...codecs.leaves import Leaf, of_torch
from ...codecs.state import (
    Outline,
    identity,
    is_module,
    is_tensor,
    named_leaves,
    outline_at_once,
    outline_of,
    signature,
    state_of,
)
from .target import Names, Sums, Target

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightbus.subscriber")

M = TypeVar("M")

CONSOLIDATED = "_consolidated"  # attribute of a consolidated TensorDict: its single storage

# the mappings of resident models, by address of the first byte
_MAPPINGS: WeakValueDictionary[int, Pages] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _Tied:
    """A tensor of a layout, and the model's tensors that share its memory (tied tensors)."""

    spec: TensorSpec
    objects: "list[torch.Tensor]"


class ResidentMemory:
    """The memory of a resident model, and marks with which a change of the model is detected.

    Attributes:
        layout: The layout of the model's tensors in the memory.
        memory: The tensors' bytes.
    """

    def __init__(
        self, layout: Layout, memory: NDArray[np.uint8], outline: Outline, tied: "list[_Tied]"
    ) -> None:
        self.layout, self.memory = layout, memory
        self._outline = outline.marks
        self._tensors = [tensor for each in tied for tensor in each.objects]

    def has(self, model: object) -> bool:
        """Return whether the model's tensors are the same as before, and still in this memory."""
        try:
            return _outline(model).marks == self._outline
        except StateError:
            return False

    def exchange(self, data: NDArray[np.uint8]) -> None:
        """Exchange the model's pages with those of `data`; increment autograd's version counters.

        Raises:
            OSError, MemoryError: The kernel refuses the exchange; nothing has changed.
            ValueError: `data` does not start and end at page boundaries; nothing has changed.
        """
        exchange(self.memory, data)
        of_torch().changed(self._tensors)

    def copy(self, data: NDArray[np.uint8]) -> None:
        """Copy `data` into the model; increment autograd's version counters."""
        np.copyto(self.memory, data)
        of_torch().changed(self._tensors)


def resident(model: M) -> M:
    """Move the parameters and buffers of a model into one block of memory, in layout order.

    The tensors stay the same objects, each with its own storage, so saving one of them does not
    save the others. Tied tensors stay tied. Only tensors that a version contains are moved: a
    non-persistent buffer is not. A model that is resident already is not moved again. A
    consolidated `TensorDict` becomes an ordinary one, as after `unlock_()`, since its single
    storage is not in layout order.

    Call this before you make views of the weights (`weight.data`, a flat copy of parameters): views
    keep the old memory. Do not register this memory with a device or a network card
    (`cudaHostRegister`, `ibv_reg_mr`, buffers of `io_uring`): the device would go on using the old
    pages. Settings of `mlock`, `madvise` and `mbind` move with the pages.

    Args:
        model: An `nn.Module`, a `TensorDict` or a dictionary of torch tensors, all on the CPU.

    Returns:
        The model.

    Raises:
        StateError: A tensor cannot be moved; the text names it, and the model is unchanged.
        MemoryError: Too little memory is free for the second copy that the move needs.
    """
    residence_of(model, state_of(model).layout())
    return model


def residence_of(model: object, layout: Layout) -> ResidentMemory:
    """Make a model resident in the order of a layout, unless it is already; return its memory.

    Raises:
        StateError: A tensor cannot be moved; the text names it, and the model is unchanged.
        MemoryError: Too little memory is free for a second copy.
    """
    tied = _tied(model, layout)
    memory = _memory_of(tied, layout)
    if memory is None:
        memory = memory_of(layout.nbytes)
        _move_in(tied, memory)
        if _storage_of(model) is not None:
            delattr(model, CONSOLIDATED)
        pages = pages_of(memory)
        if pages is not None:
            _MAPPINGS[address_of(memory)] = pages
    return ResidentMemory(layout, memory, _outline(model), tied)


def _outline(model: object) -> Outline:
    """Return the marks of a model's tensors, as cheaply as possible; see `Outline`.

    Raises:
        StateError: The tensors cannot be listed, or may be different tensors each time.
    """
    outline = outline_at_once(model)
    if outline is None and not is_module(model):
        leaves = named_leaves(model, in_place=True)
        outline = outline_of(tuple(leaves), [*leaves.values()])
    if outline is None:
        raise StateError(
            f"a {type(model).__name__} cannot be resident: its state_dict() has hooks or is "
            "overridden, or it has tensors of special classes"
        )
    return outline


def _check_loading(model: object) -> None:
    """Raise StateError if loading weights into a model calls code of the user's."""
    if calls_users(model):
        raise StateError(
            f"a {type(model).__name__} runs code of its own when weights are loaded, which an "
            "exchange of pages does not"
        )


def _tied(model: object, layout: Layout) -> list[_Tied]:
    """Return each tensor of a layout, with the model's tensors that share its memory.

    Raises:
        StateError: The tensors do not fit, or an object cannot be moved to other memory.
    """
    leaves = named_leaves(model, in_place=True)
    by_name = _identity_by_name(layout, leaves)
    if by_name is None or not layout.aligned:
        raise StateError("only a model with exactly the published tensors can be resident")
    objects: dict[Hashable, list[torch.Tensor]] = {}
    for leaf in _outline(model).leaves:
        if not is_tensor(leaf):
            raise StateError("only torch tensors can be resident; numpy arrays are copied to")
        objects.setdefault(identity(leaf), []).append(leaf)
    tied = [
        _Tied(spec, objects.pop(by_name[spec.name], [])) for spec in layout.tensors if spec.nbytes
    ]
    others = (tensor for each in objects.values() for tensor in each)
    _check(tied, others, _storage_of(model))
    return tied


def _identity_by_name(layout: Layout, leaves: Mapping[str, Leaf]) -> dict[str, Hashable] | None:
    """Return a dict from the name of each tensor in the layout to its identity in the model.

    Return None if the tensors of layout and model do not correspond one to one.
    """
    found: dict[str, set[Hashable]] = {spec.name: set() for spec in layout.tensors if spec.nbytes}
    for name, spec in (
        (name, layout.by_name(name)) for name in leaves if name in layout.signatures
    ):
        if signature(name, leaves[name]) != (spec.dtype, spec.shape):
            return None
        if spec.nbytes:
            found[spec.name].add(identity(leaves[name]))
    if any(len(each) != 1 for each in found.values()):
        return None
    by_name = {name: next(iter(each)) for name, each in found.items()}
    held = {identity(leaf) for leaf in leaves.values()} - {None}
    return by_name if held == set(by_name.values()) and len(held) == len(by_name) else None


def _storage_of(model: object) -> int | None:
    """Return the address of a consolidated TensorDict's storage; None for any other model."""
    held = None if is_module(model) else getattr(model, CONSOLIDATED, None)
    address: int | None = None if held is None else held["storage"].untyped_storage().data_ptr()
    return address


def _check(tied: list[_Tied], others: "Iterable[torch.Tensor]", whole: int | None) -> None:
    """Check that each tensor can be moved, and shares its storage with no tensor that stays.

    The storage at address `whole` (None: no such storage) is moved with all its tensors.

    Raises:
        StateError: A tensor cannot be moved.
    """
    storages: dict[int, str] = {}
    for each in tied:
        fault = "made by state_dict() on the fly" if not each.objects else None
        for tensor in each.objects:
            storage = tensor.untyped_storage().data_ptr()
            fault = fault or of_torch().rehouse_fault(tensor, parts=storage == whole)
            other = storages.setdefault(storage, each.spec.name)
            if other != each.spec.name and storage != whole:
                fault = fault or f"part of the same storage as {other}"
        if fault:
            raise StateError(f"{each.spec.name} cannot be resident: it is {fault}")
    for tensor in others:
        name = storages.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if name is not None:
            raise StateError(
                f"{name} cannot be resident: a tensor that versions do not have shares its storage"
            )


def _memory_of(tied: list[_Tied], layout: Layout) -> NDArray[np.uint8] | None:
    """Return the mapping that has all tensors in layout order already; None if there is none."""
    first = next(iter(tied), None)
    if first is None:
        return None
    address = first.objects[0].data_ptr() - first.spec.begin
    pages = _MAPPINGS.get(address)
    if pages is None or any(
        tensor.data_ptr() != address + each.spec.begin for each in tied for tensor in each.objects
    ):
        return None
    memory = within(pages, address, layout.nbytes)
    return memory if memory.nbytes == layout.nbytes else None


def _move_in(tied: Iterable[_Tied], memory: NDArray[np.uint8]) -> None:
    """Move all tensors: copy all values, then make all objects use the new memory."""
    views = [of_torch().owner(each.spec, memory) for each in tied]
    of_torch().copy(views, [each.objects[0] for each in tied])
    for each, view in zip(tied, views, strict=True):
        for tensor in each.objects:
            tensor.data = view


class ResidentTarget(Target):
    """A target for a model that is resident if possible; otherwise versions are copied to it.

    Args:
        model: The model.
        copying: A target that copies to the same model.
    """

    def __init__(self, model: object, copying: Target) -> None:
        self._model, self._copying = model, copying
        self._residence: ResidentMemory | None = None
        self._failed_layout: Layout | None = None  # a layout in which the model cannot be resident
        self._before: NDArray[np.uint8] | None = None  # the old bytes, after an exchange of pages
        self._warned = False
        self.calls_user = copying.calls_user

    @property
    def devices(self) -> "frozenset[torch.device]":
        return self._copying.devices

    def from_second(self, staged: StagedVersion) -> bool:
        return self._copying.from_second(staged)

    def fault(self, layout: Layout) -> str:
        return self._copying.fault(layout)

    def expected(self) -> Expected:
        return self._copying.expected()

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        return self._copying.summing(layout, names, sums)

    def apply(self, staged: StagedVersion) -> None:
        """Exchange pages with the staging memory.

        Copy instead if that fails, or if the version is in a segment, which other workers read too.
        """
        self._before = None
        residence = self._resident(staged.layout)
        if residence is not None and staged.shared is None:
            try:
                residence.exchange(staged.data)
            except (OSError, ValueError, MemoryError) as error:
                self._warn(error)
            else:
                self._before, self.detail = staged.data, ""
                return
        self._copying.apply(staged)
        self.detail = self._copying.detail

    def applied_bytes(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """Return memory with the bytes of `staged`: the model's own after an exchange of pages."""
        if self._before is not None and self._residence is not None:
            return self._residence.memory
        return self._copying.applied_bytes(staged)

    def undo(self) -> bool:
        """Restore the previous bytes; return whether the model has these again."""
        before, self._before = self._before, None
        if before is None or self._residence is None:
            return self._copying.undo()
        try:
            self._residence.exchange(before)
        except (OSError, MemoryError):
            self._residence.copy(before)
        return True

    def settle(self) -> None:
        """Release the old bytes."""
        self._before = None
        self._copying.settle()

    def _resident(self, layout: Layout) -> ResidentMemory | None:
        """Return the model's memory, after moving the model if needed; None if the move fails."""
        residence = self._residence
        if residence is not None and residence.layout == layout and residence.has(self._model):
            return residence
        self._residence = None
        if layout == self._failed_layout:
            return None
        try:
            _check_loading(self._model)
            self._residence = residence_of(self._model, layout)
        except (StateError, MemoryError) as error:
            self._failed_layout = layout
            self._warn(error)
        return self._residence

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("weights are copied, not exchanged: %s", error)
