# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# ruff: noqa: SLF001 - torch has no public names for these
"""Runs a model's loaders with stand-ins; has what they read and write, and leaves the model alone.

When a loader copies a view of a stand-in into a parameter, or computes with a view, the box of the
view's elements is needed. What cannot be followed fails the run, with a reason: a decision by
values, another parameter in place of one, a tensor of the loader's own that it copies to, and a
stand-in that is still referenced after the load.
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
CONSTANTS = (0.0, math.inf, -math.inf)  # other fills may come from a tensor's value
# Methods that read memory, which torch does not dispatch.
UNSEEN = (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.numpy)
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
HELD = ("_parameters", "_buffers", "_modules")  # what a module holds


class _UnfollowedError(Exception):
    """A loader does what cannot be followed."""


@dataclass(frozen=True)
class Home:
    """A parameter or buffer, and its form when it was recorded."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Write:
    """A recorded copy, or a fill: the view of a parameter, and what is written there.

    Attributes:
        home: The parameter.
        shape, strides, offset: The view; the offset is relative to the parameter's.
        dtype: The dtype of what is written.
        region: The elements in the tensor; later in its box. None: `value` everywhere.
        counts: The shape of the elements, before they are broadcast.
    """

    home: Home
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    region: Region | None = None
    counts: tuple[int, ...] = ()
    value: float = 0.0


@dataclass
class Recorder:
    """What loaders read and write, in one run.

    Attributes:
        homes: The model's parameters and buffers, by their memory.
        boxes: The box that is needed of each tensor.
        writes: The writes from each tensor, in order.
        ordinary: Tensors that loaders compute with, or that were given with values.
        why: What could not be followed; empty: nothing.
        current: The tensor that was given last; empty: none, or all are loaded.
        stand_ins: The stand-ins that are still referenced, by number and the tensor that was
            current.
        made: How many stand-ins there were.
    """

    homes: dict[int, Home]
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
        """Record why the run cannot be followed (the first reason counts)."""
        self.why = self.why or (f"{self.current!r}: {why}" if self.current else why)
        return _UnfollowedError(self.why)

    def kept(self) -> str:
        """Return the tensor of which a stand-in is still referenced; empty: none."""
        return next((name for _, name in self.stand_ins), "")

    def remember(self, part: StandIn) -> None:
        """Remember a stand-in as long as it is referenced."""
        self.made += 1
        self.stand_ins[self.made, self.current] = part

    def home(self, tensor: torch.Tensor) -> Home | None:
        """Return the parameter of which this is a view; None: of none."""
        if isinstance(tensor, StandIn):
            return None
        try:
            return self.homes.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # it has no such memory
            return None

    def need(self, name: str, shape: Sequence[int], box: Box | None) -> None:
        """Record that a box of a tensor is needed; None: all of it."""
        needed = regions.whole(shape) if box is None else box
        known = self.boxes.get(name)
        self.boxes[name] = needed if known is None else regions.joined(known, needed)

    def copies(self, into: torch.Tensor, part: StandIn) -> torch.Tensor:
        """Record that a stand-in is copied."""
        home = self.home(into)
        region = self._reads(part)
        if isinstance(into, StandIn):
            if into.memory is not None:
                raise self.fail("a loader writes into a tensor that it loads")
            self._computes_with(part)
        elif home is None:
            raise self.fail(f"a loader copies it to a tensor of its own, of {list(into.shape)}")
        elif region is None:
            self._computes_with(part)
        elif part.numel():
            counts = tuple(part.shape)
            write = _write(home, into, part.dtype, region=region, counts=counts)
            self.writes.setdefault(_name(part), []).append(write)
        return into

    def _reads(self, part: StandIn) -> Region | None:
        """Record that a stand-in's elements are needed; return where they are in the tensor."""
        reader = part.reader
        if not isinstance(reader, _Unread) or not part.numel():
            return None
        region = part.region()
        box = None if region is None else region.box(reader.shape)
        self.need(reader.name, reader.shape, box)
        return None if box is None else region

    def _computes_with(self, part: StandIn) -> None:
        if _name(part) and part.numel():
            self.ordinary.add(_name(part))

    def computes(self, func: Any, args: Any, named: Any, parts: list[StandIn]) -> object:
        """Record any other operation on stand-ins; return stand-ins for its results."""
        if func is aten.is_pinned.default:
            return False
        into = written(func, args, named)
        for each in into:
            if isinstance(each, StandIn):
                if each.memory is not None:
                    raise self.fail(f"a loader writes into a tensor that it loads ({func})")
            elif self.home(each) is None:
                raise self.fail(f"a loader writes to a tensor of its own ({func})")
        for part in parts:
            self._reads(part)
            self._computes_with(part)
        if into:
            return into[0]
        keep = func is aten.index.Tensor  # indices decide about the shape of the result
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
        return tree_map_only(torch.Tensor, lambda each: StandIn(_Computed(self), each, None), out)

    def writes_own(self, func: Any, args: Any, home: Home, into: torch.Tensor) -> None:
        """Record a write into the model that has no stand-in among its arguments."""
        if not self.current:
            raise self.fail(f"a loader writes {home.name} when it has no tensor ({func})")
        value = args[1] if func is aten.fill_.Scalar else 0.0
        if func in FILLS and value in CONSTANTS:
            write = _write(home, into, into.dtype, value=float(value))
            self.writes.setdefault(self.current, []).append(write)
        elif into.numel():
            self.ordinary.add(self.current)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    size, stride = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def _write(home: Home, into: torch.Tensor, dtype: torch.dtype, **what: Any) -> Write:
    offset = int(into.storage_offset()) - home.offset
    return Write(home, tuple(into.shape), into.stride(), offset, dtype, **what)


class _Computed:
    """The reader of values that a loader computes."""

    device = torch.device("cpu")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def made(self, part: StandIn) -> None:
        """Remember the stand-in, until it is seen whether a loader keeps it."""
        self.recorder.remember(part)

    def run(self, func: Any, args: Any, named: Any, parts: list[StandIn]) -> object:
        """Record the operation; see `ElementReader.run`."""
        if func is aten.copy_.default and isinstance(args[1], StandIn):
            return self.recorder.copies(args[0], args[1])
        return self.recorder.computes(func, args, named, parts)


class _Unread(_Computed):
    """The reader of a tensor whose reads are recorded."""

    def __init__(self, recorder: Recorder, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(recorder)
        self.name, self.shape = name, shape

    def run(self, func: Any, args: Any, named: Any, parts: list[StandIn]) -> object:
        """Record the operation; see `ElementReader.run`."""
        copied = parts[0].copied(func, args, named) if func in COPIES else None
        return super().run(func, args, named, parts) if copied is None else copied


def _name(part: StandIn) -> str:
    return part.reader.name if isinstance(part.reader, _Unread) else ""


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes into the model in place of performing them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        named = kwargs or {}
        if func._schema.is_mutable and not any(isinstance(e, StandIn) for e in flat((args, named))):
            into = written(func, args, named)
            homes = [(each, self._recorder.home(each)) for each in into]
            for each, home in homes:
                if home is not None:
                    self._recorder.writes_own(func, args, home, each)
            if any(home is not None for _, home in homes):
                return into[0]
        return func(*args, **named)


class _Unseen(TorchFunctionMode):
    """Refuses what torch does not dispatch: other memory for a tensor, and a stand-in's memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func == SET_DATA:
            replaced = self._recorder.home(args[0]) is not None
            if replaced or any(isinstance(each, StandIn) for each in args):
                raise self._recorder.fail("a loader replaces the memory of a tensor (`.data =`)")
        elif func in UNSEEN and isinstance(args[0], StandIn):
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
        model, load_weights, tensors: As of `recording.record`.
    """
    recorder = Recorder(_homes(model))
    pairs = _stand_ins(recorder, tensors)
    with _unchanged(model, recorder):
        try:
            with _Unseen(recorder), _Guard(recorder):
                load_weights(pairs)
        except Exception as error:
            recorder.fail(" ".join(f"{type(error).__name__}: {error}".split())[:500])
        pairs.close()
        if not recorder.why and recorder.kept():
            gc.collect()  # it may be in a cycle that nothing references
            if kept := recorder.kept():
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
            reader = _Unread(recorder, name, tuple(shape))
            packed = dtype_named(dtype).kind == "packed"
            yield name, StandIn.of(reader, sizes, kind, followed=not packed)
    recorder.current = ""


def torch_shape(dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's shape in torch, where an element of a packed dtype has two values."""
    if dtype_named(dtype).kind == "packed":
        return *shape[:-1], shape[-1] // 2
    return tuple(shape)


def _homes(model: torch.nn.Module) -> dict[int, Home]:
    """Return the parameters and buffers of a model, by their memory."""
    homes: dict[int, Home] = {}
    for name, tensor in _named(model):
        if not is_lazy(tensor):
            form = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            homes.setdefault(tensor.untyped_storage()._cdata, Home(name, *form))
    return homes


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _unchanged(model: torch.nn.Module, recorder: Recorder) -> Generator[None]:
    """Restore a model's attributes and tensors afterwards; fail if a loader replaced a tensor."""
    modules = [
        (each, {**vars(each)}, [{**vars(each)[name]} for name in HELD]) for each in model.modules()
    ]
    tensors = [(each, {**vars(each)}) for _, each in _named(model)]
    try:
        yield
    finally:
        for module, attributes, kept in modules:
            held = vars(module)
            for name, before in zip(HELD, kept, strict=True):
                now = held.get(name, {})
                if now.keys() != before.keys() or any(now[k] is not v for k, v in before.items()):
                    recorder.fail(f"a loader replaces {name[1:]} of a {type(module).__name__}")
                attributes[name].clear()
                attributes[name].update(before)
            held.clear()
            held.update(attributes)
        for tensor, attributes in tensors:
            vars(tensor).clear()
            vars(tensor).update(attributes)
