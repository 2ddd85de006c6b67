# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# ruff: noqa: SLF001 - torch has no public names for these
"""Defines stand-ins: tensors that have only a box of their elements, or none, for model loaders.

A stand-in is a view on the meta device, and the `Region` of the tensor that the view shows; so it
follows slices, transpositions, reshapes and copies. Its reader handles other operations:
`ReceivedBox` computes with the elements, the readers in `recorder` record which are needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from ...codecs.errors import WeightBusError
from .regions import Box, Region

aten = torch.ops.aten
COPIES = (aten.clone.default, aten._to_copy.default)


class PartError(WeightBusError):
    """A loader reads elements that it did not read when recorded, or a recording does not fit."""


class ElementReader(Protocol):
    """Handles the operations that read a stand-in's elements."""

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        ...

    def made(self, part: "StandIn") -> None:
        """Handle the creation of a stand-in for the tensor, or for a view of the tensor."""
        ...

    def run(self, func: Any, args: Any, named: Any, parts: "list[StandIn]") -> object:
        """Return the result of an operation that is more than a view of a stand-in.

        Args:
            func, args, named: The operation and its arguments.
            parts: The stand-ins among the arguments; the first one has this reader.
        """
        ...


class StandIn(torch.Tensor):
    """A stand-in for a tensor, or for a view of a tensor.

    Args:
        reader: Handles the operations that read elements.
        shown: A tensor on the meta device with the stand-in's dtype, shape, strides and offset.
        memory: The positions, in the tensor, of the elements of the memory that `shown` views.
            None: the positions of single elements are not known.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    reader: ElementReader
    shown: torch.Tensor
    memory: Region | None

    @staticmethod
    def __new__(
        cls: "type[StandIn]", reader: ElementReader, shown: torch.Tensor, memory: Region | None
    ) -> "StandIn":
        make: Callable[..., StandIn] = torch.Tensor._make_wrapper_subclass
        made = make(
            cls,
            shown.shape,
            strides=shown.stride(),
            storage_offset=shown.storage_offset(),
            dtype=shown.dtype,
            device=reader.device,
        )
        made.reader, made.shown, made.memory = reader, shown, memory
        reader.made(made)
        return made

    @classmethod
    def of(
        cls,
        reader: ElementReader,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        followed: bool = True,
    ) -> "StandIn":
        """Return the stand-in for a tensor.

        Args:
            reader: Handles the operations that read elements.
            shape, dtype: The tensor's.
            followed: Whether to follow the positions of single elements through views.
        """
        shown = torch.empty(tuple(shape), dtype=dtype, device="meta")
        loops = tuple(zip(shown.shape, shown.stride(), strict=True))
        return cls(reader, shown, Region(0, loops) if followed else None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        named = kwargs or {}
        if func is aten.copy_.default and isinstance(args[1], StandIn):
            return args[1].reader.run(func, args, named, [args[1]])
        if func.is_view or func is aten._unsafe_view.default:
            viewed = args[0]._viewed(func, args, named)
            if viewed is not None:
                return viewed
        parts = [each for each in flat((args, named)) if isinstance(each, StandIn)]
        return parts[0].reader.run(func, args, named, parts)

    def region(self, order: Sequence[int] | None = None) -> Region | None:
        """Return the elements' positions in the tensor, with the dimensions in this order."""
        if self.memory is None:
            return None
        dims = range(self.dim()) if order is None else order
        loops = tuple((self.shown.shape[dim], self.shown.stride(dim)) for dim in dims)
        return Region(int(self.shown.storage_offset()), loops).within(self.memory)

    def copied(self, func: Any, args: Any, named: Any) -> "StandIn | None":
        """Return a stand-in for the result of one of COPIES; None if values or order change."""
        if named.get("dtype") not in (None, self.dtype):
            return None
        out = func(self.shown, *args[1:], **on_meta(named))
        dims = sorted(range(out.dim()), key=lambda dim: -out.stride(dim))
        memory = self.region(dims) if out.permute(dims).is_contiguous() else None
        return None if memory is None else StandIn(self.reader, out, memory)

    def _viewed(self, func: Any, args: Any, named: Any) -> "StandIn | list[StandIn] | None":
        # Return a view of this stand-in; None if its elements are others, such as halves of these.
        if self.memory is None:
            return None
        out = func(self.shown, *args[1:], **named)
        views = [out] if isinstance(out, torch.Tensor) else [*out]
        size = self.shown.element_size()
        if any(each.element_size() != size or each.is_neg() or each.is_conj() for each in views):
            return None
        made = [StandIn(self.reader, each, self.memory) for each in views]
        return made[0] if isinstance(out, torch.Tensor) else made


@dataclass(frozen=True)
class ReceivedBox:
    """The reader of a tensor of which a box was received.

    Args:
        name, shape: The tensor's.
        box: The box.
        local: The elements of the box, contiguous.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device of the box."""
        return self.local.device

    def made(self, part: StandIn) -> None:
        """Do nothing."""

    def run(self, func: Any, args: Any, named: Any, parts: list[StandIn]) -> object:
        """Return the result of the operation on the received elements.

        Raises:
            PartError: The box lacks some of the elements, or the operation writes into them.
        """
        if func is aten.copy_.default and not isinstance(args[0], StandIn):
            return args[0].copy_(self.elements(args[1]))
        if any(isinstance(each, StandIn) for each in written(func, args, named)):
            raise PartError(f"a loader writes into {self.name!r} ({func})")
        if func in COPIES and self._region_in_box(parts[0]) is None:
            copied = parts[0].copied(func, args, named)
            if copied is not None:
                return copied
        given, given_named = tree_map_only(StandIn, _elements_of, (args, named))
        return func(*given, **given_named)

    def elements(self, part: StandIn) -> torch.Tensor:
        """Return the elements of a stand-in for this tensor, or for a view of it."""
        place = self._region_in_box(part)
        if not part.numel():
            return torch.empty(part.shape, dtype=part.dtype, device=self.device)
        if place is None:
            raise PartError(
                f"a loader reads elements of {self.name!r} that it did not read when it was "
                f"recorded: only {bounds(self.box)} of {list(self.shape)} was received. A loader "
                "that does not always read the same elements needs whole tensors"
            )
        return elements(self.local, place, part.shape, part.dtype)

    def _region_in_box(self, part: StandIn) -> Region | None:
        region = part.region()
        return None if region is None else region.in_box(self.shape, self.box)


def _elements_of(part: StandIn) -> torch.Tensor:
    reader = part.reader
    if not isinstance(reader, ReceivedBox):
        raise PartError("a loader has kept a tensor of the recording: load whole tensors")
    return reader.elements(part)


def elements(
    local: torch.Tensor, place: Region, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the elements of a region of a contiguous tensor, as a view of it if possible."""
    typed = local if local.dtype == dtype else local.view(dtype)
    counts, strides = [n for n, _ in place.loops], [stride for _, stride in place.loops]
    offset = typed.storage_offset() + place.offset
    return typed.as_strided(counts, strides, offset).reshape(tuple(shape))


def bounds(box: Box) -> str:
    """Return a box as text."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"


def flat(given: Any) -> Iterator[object]:
    """Yield the values in nested tuples, lists and dicts."""
    if isinstance(given, tuple | list):
        for each in given:
            yield from flat(each)
    elif isinstance(given, dict):
        for each in given.values():
            yield from flat(each)
    else:
        yield given


def on_meta(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the meta device in place of the given device, if any."""
    return {**named, "device": "meta"} if named.get("device") is not None else {**named}


def written(func: Any, args: Any, named: Any) -> list[torch.Tensor]:
    """Return the tensors into which an operation writes."""
    if not func._schema.is_mutable:
        return []
    given = [
        args[n] if n < len(args) else named.get(declared.name)
        for n, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]
    return [each for each in flat(given) if isinstance(each, torch.Tensor)]
