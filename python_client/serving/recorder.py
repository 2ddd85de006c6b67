# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# ruff: noqa: SLF001 - torch has no public names for these
"""Runs a model's loaders with stand-ins, and records what they read and write.

A stand-in (`stand_ins`) replaces each tensor to load. When a loader copies a view of it into a
parameter, or computes with the view, the box of the view's elements is needed. Writes into the
model are only recorded. The run fails, with a reason, if a loader decides by values, replaces a
parameter, copies to a tensor of its own, or keeps a stand-in after the load.
"""

import gc
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ...codecs.dtypes import dtype_named, torch_dtype
from ...codecs.layout import Signature
from . import regions
from .regions import Box, Region
from .stand_ins import COPIES, StandIn, flat, on_meta, written

aten = torch.ops.aten
Tensors = Iterable[tuple[str, torch.Tensor]]
FILLS = (aten.fill_.Scalar, aten.zero_.default)
CONSTANTS = (0.0, math.inf, -math.inf)  # another fill value may come from a loaded tensor
# Methods that read memory. torch does not dispatch them.
MEMORY_READS = (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.numpy)
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
MEMBERS = ("_parameters", "_buffers", "_modules")  # the attributes with a module's members


class _UnfollowedError(Exception):
    """A loader does what cannot be followed."""


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer: its name, and its dtype and memory layout when it was recorded."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Write:
    """A recorded write: a view of a parameter or buffer, and what is written into the view.

    Attributes:
        into: The parameter or buffer.
        shape, strides, offset: The view; the offset is relative to the parameter's.
        dtype: The dtype of the written elements.
        region: The written elements' positions in the loaded tensor, in a `Recording` in its box.
            None: `value` is written to all elements.
        source_shape: The shape of the written elements before they are broadcast.
    """

    into: ModelTensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    region: Region | None = None
    source_shape: tuple[int, ...] = ()
    value: float = 0.0


@dataclass
class Recorder:
    """Records what loaders read and write in one run.

    Attributes:
        model_tensors: The model's parameters and buffers, by their storage.
        boxes, writes: By name, the needed box of each tensor, and the writes from it, in order.
        ordinary: The names of tensors that loaders compute with, or that had values.
        why: Why the run cannot be followed; empty if it can.
        current: The name of the tensor that was yielded last; empty before and after the run.
        stand_ins: The stand-ins that are still referenced, by (number, value of `current`).
        made: The number of stand-ins made so far.
    """

    model_tensors: dict[int, ModelTensor]
    boxes: dict[str, Box] = field(default_factory=dict[str, Box])
    writes: dict[str, list[Write]] = field(default_factory=dict[str, list[Write]])
    ordinary: set[str] = field(default_factory=set[str])
    why: str = ""
    current: str = ""
    stand_ins: "weakref.WeakValueDictionary[tuple[int, str], StandIn]" = field(
        default_factory=lambda: weakref.WeakValueDictionary[tuple[int, str], StandIn]()
    )
    made: int = 0

    def fail(self, why: str) -> _UnfollowedError:
        """Record why the run cannot be followed, unless a reason is known; return the exception."""
        self.why = self.why or (f"{self.current!r}: {why}" if self.current else why)
        return _UnfollowedError(self.why)

    def kept_tensor(self) -> str:
        """Return the name of a tensor whose stand-in is still referenced; empty if none is."""
        return next((name for _, name in self.stand_ins), "")

    def remember(self, part: StandIn) -> None:
        """Record a new stand-in, as long as it is referenced."""
        self.made += 1
        self.stand_ins[self.made, self.current] = part

    def model_tensor(self, tensor: torch.Tensor) -> ModelTensor | None:
        """Return the parameter or buffer whose memory a tensor shares; None if there is none."""
        if isinstance(tensor, StandIn):
            return None
        try:
            return self.model_tensors.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # it has no storage
            return None

    def need(self, name: str, shape: Sequence[int], box: Box | None) -> None:
        """Record that a box of a tensor is needed; None: the whole tensor."""
        needed = regions.whole(shape) if box is None else box
        known = self.boxes.get(name)
        self.boxes[name] = needed if known is None else regions.joined(known, needed)

    def record_copy(self, into: torch.Tensor, part: StandIn) -> torch.Tensor:
        """Record a copy of a stand-in into `into`; return `into`."""
        target = self.model_tensor(into)
        region = self._record_read(part)
        if isinstance(into, StandIn):
            if into.memory is not None:
                raise self.fail("a loader writes into a tensor that it loads")
            self._mark_ordinary(part)
        elif target is None:
            raise self.fail(f"a loader copies it to a tensor of its own, of {list(into.shape)}")
        elif region is None:
            self._mark_ordinary(part)
        elif part.numel():
            shape = tuple(part.shape)
            write = _write(target, into, part.dtype, region=region, source_shape=shape)
            self.writes.setdefault(_name(part), []).append(write)
        return into

    def _record_read(self, part: StandIn) -> Region | None:
        """Record that a stand-in's elements are needed; return their positions, if known."""
        reader = part.reader
        if not isinstance(reader, _TensorReader) or not part.numel():
            return None
        region = part.region()
        box = None if region is None else region.box(reader.shape)
        self.need(reader.name, reader.shape, box)
        return None if box is None else region

    def _mark_ordinary(self, part: StandIn) -> None:
        if _name(part) and part.numel():
            self.ordinary.add(_name(part))

    def record_operation(self, func: Any, args: Any, named: Any, parts: list[StandIn]) -> object:
        """Record an operation other than a copy; return stand-ins for its results."""
        if func is aten.is_pinned.default:
            return False
        into = written(func, args, named)
        for each in into:
            if isinstance(each, StandIn):
                if each.memory is not None:
                    raise self.fail(f"a loader writes into a tensor that it loads ({func})")
            elif self.model_tensor(each) is None:
                raise self.fail(f"a loader writes to a tensor of its own ({func})")
        for part in parts:
            self._record_read(part)
            self._mark_ordinary(part)
        if into:
            return into[0]
        keep = func is aten.index.Tensor  # the values of indices determine the result's shape
        given, given_named = tree_map_only(
            torch.Tensor,
            lambda each: each.shown if isinstance(each, StandIn) else each if keep else _meta(each),
            (args, named),
        )
        try:
            out = func(*given, **on_meta(given_named))
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            raise self.fail(f"a loader needs its values ({func}: {words})") from error
        if not all(isinstance(each, torch.Tensor) for each in flat(out)):
            raise self.fail(f"a loader needs its values ({func})")
        return tree_map_only(
            torch.Tensor, lambda each: StandIn(_ResultReader(self), each, None), out
        )

    def record_write(self, func: Any, args: Any, target: ModelTensor, into: torch.Tensor) -> None:
        """Record a write into the model that has no stand-in among its arguments."""
        if not self.current:
            raise self.fail(f"a loader writes {target.name} before or after the load ({func})")
        value = args[1] if func is aten.fill_.Scalar else 0.0
        if func in FILLS and value in CONSTANTS:
            write = _write(target, into, into.dtype, value=float(value))
            self.writes.setdefault(self.current, []).append(write)
        elif into.numel():
            self.ordinary.add(self.current)


def _meta(tensor: torch.Tensor) -> torch.Tensor:

    size, stride = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def _write(target: ModelTensor, into: torch.Tensor, dtype: torch.dtype, **what: Any) -> Write:
    offset = int(into.storage_offset()) - target.offset
    return Write(target, tuple(into.shape), into.stride(), offset, dtype, **what)


class _ResultReader:
    """The reader of stand-ins for values that a loader computes."""

    device = torch.device("cpu")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def made(self, part: StandIn) -> None:
        """Record the stand-in, to find out later whether a loader keeps it."""
        self.recorder.remember(part)

    def run(self, func: Any, args: Any, named: Any, parts: list[StandIn]) -> object:
        """Record the operation; see `ElementReader.run`."""
        if func is aten.copy_.default and isinstance(args[1], StandIn):
            return self.recorder.record_copy(args[0], args[1])
        return self.recorder.record_operation(func, args, named, parts)


class _TensorReader(_ResultReader):
    """The reader of stand-ins for a tensor that is loaded: records which elements are read."""

    def __init__(self, recorder: Recorder, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(recorder)
        self.name, self.shape = name, shape

    def run(self, func: Any, args: Any, named: Any, parts: list[StandIn]) -> object:
        """Record the operation; see `ElementReader.run`."""
        copied = parts[0].copied(func, args, named) if func in COPIES else None
        return super().run(func, args, named, parts) if copied is None else copied


def _name(part: StandIn) -> str:
    return part.reader.name if isinstance(part.reader, _TensorReader) else ""


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes into the model that have no stand-in among their arguments, and skips them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        named = kwargs or {}
        if func._schema.is_mutable and not any(isinstance(e, StandIn) for e in flat((args, named))):
            into = written(func, args, named)
            targets = [(each, self._recorder.model_tensor(each)) for each in into]
            for each, target in targets:
                if target is not None:
                    self._recorder.record_write(func, args, target, each)
            if any(target is not None for _, target in targets):
                return into[0]
        return func(*args, **named)


class _MemoryGuard(TorchFunctionMode):
    """Fails the run on accesses that torch does not dispatch: reads and replacements of memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func == SET_DATA:
            replaced = self._recorder.model_tensor(args[0]) is not None
            if replaced or any(isinstance(each, StandIn) for each in args):
                raise self._recorder.fail("a loader replaces the memory of a tensor (`.data =`)")
        elif func in MEMORY_READS and isinstance(args[0], StandIn):
            raise self._recorder.fail(f"a loader needs its values ({func.__name__})")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def run(
    model: torch.nn.Module,
    load_weights: Callable[[Tensors], object],
    tensors: Mapping[str, Signature],
) -> Recorder:
    """Run the loaders once with stand-ins; return what they read and write.

    Args:
        model, load_weights, tensors: As in `recording.record`.
    """
    recorder = Recorder(_model_tensors(model))
    pairs = _stand_ins(recorder, tensors)
    with _unchanged(model, recorder):
        try:
            with _MemoryGuard(recorder), _Guard(recorder):
                load_weights(pairs)
        except Exception as error:
            recorder.fail(" ".join(f"{type(error).__name__}: {error}".split())[:500])
        pairs.close()
        if not recorder.why and recorder.kept_tensor():
            gc.collect()  # the stand-in may be in a cycle that nothing references
            if kept := recorder.kept_tensor():
                recorder.fail(f"a loader keeps a part of {kept!r} after the load")
    return recorder


def _stand_ins(
    recorder: Recorder, tensors: Mapping[str, Signature]
) -> Generator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape) in tensors.items():
        recorder.current = name
        kind, sizes = torch_dtype(dtype), torch_shape(dtype, shape)
        if math.prod(sizes) <= 1:  # loaders may ask a scale for its value
            recorder.need(name, shape, None)
            recorder.ordinary.add(name)
            yield name, torch.ones(sizes).to(kind)
        else:
            reader = _TensorReader(recorder, name, tuple(shape))
            packed = dtype_named(dtype).kind == "packed"
            yield name, StandIn.of(reader, sizes, kind, followed=not packed)
    recorder.current = ""


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's shape in torch, where an element of a packed dtype has two values."""
    if dtype_named(dtype).kind == "packed":
        return *shape[:-1], shape[-1] // 2
    return tuple(shape)


def _model_tensors(model: torch.nn.Module) -> dict[int, ModelTensor]:
    """Return the parameters and buffers of a model, by their storage."""
    found: dict[int, ModelTensor] = {}
    for name, tensor in _named(model):
        if not is_lazy(tensor):
            form = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            found.setdefault(tensor.untyped_storage()._cdata, ModelTensor(name, *form))
    return found


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _unchanged(model: torch.nn.Module, recorder: Recorder) -> Generator[None]:
    """Restore a model's attributes and tensors afterwards; fail if a loader replaced a tensor."""
    modules = [(m, {**vars(m)}, [{**vars(m)[name]} for name in MEMBERS]) for m in model.modules()]
    tensors = [(each, {**vars(each)}) for _, each in _named(model)]
    try:
        yield
    finally:
        for module, attributes, members in modules:
            current = vars(module)
            for name, before in zip(MEMBERS, members, strict=True):
                now = current.get(name, {})
                if now.keys() != before.keys() or any(now[k] is not v for k, v in before.items()):
                    recorder.fail(f"a loader replaces {name[1:]} of a {type(module).__name__}")
                attributes[name].clear()
                attributes[name].update(before)
            current.clear()
            current.update(attributes)
        for tensor, attributes in tensors:
            vars(tensor).clear()
            vars(tensor).update(attributes)
