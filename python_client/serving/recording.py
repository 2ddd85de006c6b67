"""Records which part of each tensor a model's own loaders read, and loads from these parts alone.

A tensor-parallel rank reads a slice of most tensors, and only the model's loaders know which slice.
So `record` runs the loaders with stand-ins, which have names, dtypes and shapes but no values. A
stand-in follows slices, transpositions and reshapes. When a view of a stand-in is copied into the
model, or a loader computes with the view, the box (`regions`) of the view's elements is needed.

To load a version, the same loaders run with stand-ins that have the elements of these boxes
(`Recording.pairs`). The loaders copy and compute the same as with whole tensors; a read outside of
a box is an error. So a model whose weights are post-processed is loaded as usual, only from fewer
bytes. For a model that computes with its parameters as they are loaded, the recorded copies may be
repeated without the loaders (`Recording.apply`).

If loaders do what cannot be followed (they decide by values, replace parameters, or keep tensors),
every tensor is needed whole, and `Recording.why_whole` has the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ...codecs.dtypes import dtype_named, torch_dtype
from ...codecs.layout import Signature
from . import regions
from .recorder import Tensors, Write, run, torch_shape
from .regions import Box
from .stand_ins import PartError, ReceivedBox, StandIn, bounds, elements


def record(
    model: torch.nn.Module,
    load_weights: Callable[[Tensors], object],
    tensors: Mapping[str, Signature],
) -> "Recording":
    """Return which part of each tensor a model's loaders read, and where they copy it.

    The loaders run twice, the second time with only the tensors that they read the first time, and
    must do the same.

    Args:
        model: The model, which is not changed.
        load_weights: Loads (name, tensor) pairs into the model, and must not keep the tensors.
        tensors: Dtype and shape, by name, of each tensor that will be loaded, in order.
    """
    first = run(model, load_weights, tensors)
    why = first.why
    if not why:
        needed = {name: each for name, each in tensors.items() if name in first.boxes}
        again = run(model, load_weights, needed)
        if again.why or (first.boxes, first.writes, first.ordinary) != (
            *(again.boxes, again.writes, again.ordinary),
        ):
            why = again.why or "its loaders do not do the same when they run again"
            why = f"{why} (with only the {len(needed)} of {len(tensors)} tensors that they read)"
    if why:
        every = {name: regions.whole(shape) for name, (_, shape) in tensors.items()}
        return Recording(model, tensors, every, {}, frozenset(every), why)
    writes = {
        name: [
            _in_box(each, tensors[name][1], first.boxes[name])
            for each in first.writes.get(name, [])
        ]
        for name in first.boxes
        if name not in first.ordinary
    }
    part = {name: first.boxes[name] for name in tensors if name in first.boxes}
    return Recording(model, tensors, part, writes, frozenset(first.ordinary), "")


def _in_box(write: Write, shape: tuple[int, ...], box: Box) -> Write:
    return write if write.region is None else replace(write, region=write.region.in_box(shape, box))


@dataclass(frozen=True)
class Recording:
    """Which part of each tensor a model's loaders read, and the copies that they make.

    Attributes:
        part: By name, the box that is needed of each tensor: (begin, end) for each dimension. A
            tensor that is absent is not needed.
        ordinary: The names of tensors that `apply` cannot load: loaders do more than copy them.
        why_whole: Why all tensors are needed whole; empty: `part` has what is needed.
    """

    _model: torch.nn.Module = field(repr=False)
    _tensors: Mapping[str, Signature] = field(repr=False)
    part: dict[str, Box]
    _writes: dict[str, list[Write]] = field(repr=False)
    ordinary: frozenset[str]
    why_whole: str

    @property
    def bits(self) -> tuple[int, int]:
        """(needed, total): the number of bits of the tensors that are needed, and of all bits."""
        sizes = {name: dtype_named(dtype).bits for name, (dtype, _) in self._tensors.items()}
        every = sum(sizes[name] * math.prod(shape) for name, (_, shape) in self._tensors.items())
        return sum(sizes[name] * math.prod(_sizes(box)) for name, box in self.part.items()), every

    def pairs(self, parts: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the (name, tensor) pairs with which to call the model's own `load_weights`.

        The parts must stay unchanged until the model has processed the loaded tensors.

        Args:
            parts: Name and needed part of each tensor, contiguous.

        Raises:
            PartError: A part has not the shape or dtype that `part` requires. The loader, too, gets
                this error if it reads elements that the part lacks.
        """
        for name, local in parts:
            if name not in self.part and name in self._tensors:
                continue
            box = self._checked(name, local)
            shape = self._tensors[name][1]
            if box == regions.whole(shape):
                yield name, local
            else:
                reader = ReceivedBox(name, tuple(shape), box, local)
                yield name, StandIn.of(reader, shape, local.dtype)

    @torch.no_grad()
    def apply(self, name: str, local: torch.Tensor) -> None:
        """Copy the needed part of a tensor to where the loaders copy it, without the loaders.

        Use this only for models that compute with their parameters as they are loaded: copies that
        a model derives from its parameters (packed or quantised ones) are not updated.

        Raises:
            PartError: The part has not the shape or dtype that `part` requires, loaders do more
                than copy this tensor, or a parameter's dtype or memory layout has changed.
        """
        self._checked(name, local)
        if name in self.ordinary:
            raise PartError(f"loaders do more than copy {name!r}: load it with `load_weights`")
        for write in self._writes[name]:
            into = self._view(write)
            if write.region is None:
                into.fill_(write.value)
            else:
                into.copy_(elements(local, write.region, write.source_shape, write.dtype))

    def _checked(self, name: str, local: torch.Tensor) -> Box:
        box = self.part.get(name)
        if box is None:
            raise PartError(f"{name!r} is not among the {len(self.part)} tensors that are needed")
        dtype = self._tensors[name][0]
        sizes, kind = torch_shape(dtype, _sizes(box)), torch_dtype(dtype)
        if tuple(local.shape) != sizes or local.dtype != kind or not local.is_contiguous():
            raise PartError(
                f"the part of {name!r} is {local.dtype} {list(local.shape)}, and must be "
                f"{kind} {list(sizes)}, contiguous, for {bounds(box)}"
            )
        return box

    def _view(self, write: Write) -> torch.Tensor:
        """Return the view into which a recorded copy writes."""
        recorded = write.into
        path, _, last = recorded.name.rpartition(".")
        tensor: torch.Tensor = getattr(self._model.get_submodule(path), last)
        if (tensor.dtype, tuple(tensor.shape), tensor.stride()) != (
            *(recorded.dtype, recorded.shape, recorded.strides),
        ):
            raise PartError(
                f"{recorded.name} is {tensor.dtype} {list(tensor.shape)}, but was "
                f"{recorded.dtype} {list(recorded.shape)} when it was recorded: load it with "
                "`load_weights`"
            )
        offset = tensor.storage_offset() + write.offset
        return tensor.data.as_strided(write.shape, write.strides, offset)


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)
