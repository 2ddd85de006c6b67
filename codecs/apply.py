"""Applies a version: copies a whole data section into a target, in place.

A target is an `nn.Module`, a `TensorDict`, or a mapping of torch tensors or numpy arrays. Names,
dtypes and shapes are all compared before the first byte is written. The target's tensors keep their
memory (`data_ptr`), device and `requires_grad`. Only a module on the meta device gets new memory.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import numpy_tensors
from .copies import Copies, Differences, devices_of, on_device
from .errors import StateError
from .layout import Layout, Signature, Strict, TensorSpec, difference, trimmed
from .leaves import Leaf, of_torch
from .native import crc32c
from .overflow import LostValues, Narrowed
from .section import Section
from .state import (
    Marks,
    Outline,
    in_memory,
    is_module,
    named_leaves,
    outline_at_once,
    signature,
)
from .ties import TensorPlace, Ties, place_of
from .wrapping import explanation

if TYPE_CHECKING:
    import torch

    from .device_memory import Pinned
    from .torch_loading import Loading

STEP_BYTES = 2**22  # bytes hashed in one step: a fraction of a millisecond


@dataclass(frozen=True, slots=True)
class _Target:
    """The tensors of a target, and why some of them cannot be written to."""

    leaves: Mapping[str, Leaf]
    extra: "Mapping[str, Callable[[torch.Tensor], None]]"
    faults: list[str]
    materialises: bool = False  # whether tensors on the meta device are allowed, and get memory
    loading: "Loading | None" = None  # how to load the target if copying is not enough


def check(
    layout: Layout, target: object, *, strict: Strict = True, cast: bool = False
) -> list[str]:
    """Return error lines that say why versions of this layout do not fit the target, if any.

    The target is not changed.

    Args:
        layout: The layout of a version.
        target: The target.
        strict: True: names must be equal. False: names that only one side has are ignored.
            "target": names that only the layout has are ignored. A name that is tied to a name
            which both sides have is never a difference (`ties`).
        cast: Whether dtypes may differ (see `dtypes.castable`).
    """
    return _compare(layout, _open(target), strict=strict, cast=cast)


def devices_within(target: object) -> "tuple[frozenset[torch.device], bool]":
    """Return the CUDA devices of a target's tensors, and whether all tensors are on CUDA."""
    leaves = _open(target).leaves.values()
    return devices_of(leaves), all(map(on_device, leaves))


def calls_users(target: object) -> bool:
    """Return whether copying a version into a target calls the user's code."""
    if not is_module(target):
        return False
    from . import torch_loading, torch_modules

    loaded = torch_loading.loading_of(target) is not None
    return loaded or bool(torch_modules.with_extra(target, "set_extra_state"))


def summing(
    layout: Layout, target: object, names: Iterable[str], sums: list[int | None]
) -> Iterator[int]:
    """Compute checksums of a target's current tensors, step by step.

    Args:
        layout: The layout of a version.
        target: The target.
        names: Names of the layout.
        sums: A list to which one item is appended for each name: the CRC-32C of the tensor's bytes
            as a version would have them. None: the target has no such tensor, or its dtype or shape
            differs.

    Yields:
        The number of bytes of each step.
    """
    leaves = _open(target).leaves
    known = layout.signatures
    tied = {layout.by_name(name).name: leaf for name, leaf in leaves.items() if name in known}
    for name in names:
        spec = layout.by_name(name)
        leaf = leaves.get(name, tied.get(spec.name))
        total: int | None = None
        if leaf is not None and _has_signature(name, leaf, spec):
            total = 0
            for piece in _pieces(leaf):
                data = _bytes_of(piece, spec)
                total = crc32c(data, total)
                yield data.size
        sums.append(total)


def _has_signature(name: str, leaf: Leaf, spec: TensorSpec) -> bool:
    try:
        return not _on_meta(leaf) and signature(name, leaf) == (spec.dtype, spec.shape)
    except StateError:
        return False


def _pieces(leaf: Leaf) -> Iterator[Leaf]:
    """Yield small pieces of a tensor, in element order, since hashing may copy each piece."""
    if leaf.nbytes <= STEP_BYTES or not leaf.ndim:
        yield leaf
        return
    rows = STEP_BYTES * len(leaf) // leaf.nbytes
    for begin in range(0, len(leaf), max(1, rows)):
        if rows:
            yield leaf[begin : begin + rows]
        else:
            yield from _pieces(leaf[begin])


def _bytes_of(leaf: Leaf, spec: TensorSpec) -> numpy_tensors.Bytes:
    if isinstance(leaf, np.ndarray):
        return numpy_tensors.bytes_of(leaf, spec)
    from . import torch_tensors

    return torch_tensors.bytes_of(leaf)


def copy_into(
    layout: Layout,
    data: numpy_tensors.Memory,
    target: object,
    *,
    strict: Strict = True,
    cast: bool = False,
) -> None:
    """Copy a data section of `layout.nbytes` bytes into a target; see `Reader.copy_into`."""
    Reader(layout, data).copy_into(target, strict=strict, cast=cast)


def as_arrays(layout: Layout, data: numpy_tensors.Memory) -> dict[str, numpy_tensors.Array]:
    """Return the tensor of each name as a read-only array, which shares `data` if aligned."""
    section = Section(layout, data)
    for view in section.arrays.values():
        view.flags.writeable = False
    return {name: section.arrays[layout.by_name(name).name] for name in layout.names()}


def as_tensors(layout: Layout, data: numpy_tensors.Memory) -> "dict[str, torch.Tensor]":
    """Return the tensor of each name as a torch tensor.

    Aligned tensors share the memory of `data` if that is writable. If it is read-only, the tensors
    are copies, since torch has no read-only tensors.
    """
    section = Section(layout, data)
    tensors = section.tensors
    if not section.data.flags.writeable:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return {name: tensors[layout.by_name(name).name] for name in layout.names()}


@dataclass(frozen=True, slots=True)
class _Known:
    """The result of comparing a target with the layout; valid until the target's marks change."""

    target: object
    how: tuple[Strict, bool]  # the arguments `strict` and `cast` of the comparison
    marks: Marks  # the target's marks; see `Outline`
    copies: Copies
    pairs: "_Pairs"
    destinations: list[Leaf]
    sources: list[Leaf]
    large: list[Leaf]  # destinations whose storage sizes are checked: `torch_tensors.LARGE_BYTES`
    loading: "Loading | None"
    narrowed: Narrowed | None  # tensors converted to a dtype that cannot hold all values


class _Pairs:
    """Pairs of a target's tensor and a published tensor. A tied tensor of the target is in one.

    Attributes:
        written: Each tensor of the target to write, with the published tensor.
        tied: Pairs of names that are one tensor in the target but two in the version. An item is
            (name, published tensor, other name, other published tensor).
    """

    def __init__(self, layout: Layout, leaves: Mapping[str, Leaf]) -> None:
        self.written: list[tuple[Leaf, TensorSpec]] = []
        self.tied: list[tuple[str, TensorSpec, str, TensorSpec]] = []
        taken: dict[TensorPlace, tuple[str, TensorSpec]] = {}
        for name, leaf in leaves.items():
            if name not in layout.signatures or (place := place_of(name, leaf)) is None:
                continue  # not published, or empty
            spec = layout.by_name(name)
            first, other = taken.setdefault(place, (name, spec))
            if first == name:
                self.written.append((leaf, spec))
            elif other is not spec:
                self.tied.append((first, other, name, spec))

    def check(self, equal: Callable[[TensorSpec, TensorSpec], bool]) -> None:
        """Check that tensors that are tied only in the target have equal values.

        This is needed for every version, since values differ from version to version.

        Args:
            equal: Returns whether two published tensors have equal values.

        Raises:
            StateError: Two such tensors have different values.
        """
        for first, a, name, b in self.tied:
            if not equal(a, b):
                raise StateError(
                    f"{first!r} and {name!r} are one tensor in the target, but were published with "
                    "different values; untie them in the target, or tie them at the publisher"
                )


class Reader:
    """Copies successive versions of one layout from one buffer to targets.

    Attributes:
        begun: Whether a copy may have changed a target since the caller reset this attribute.
        lost: The finite values that did not fit the target's dtype in the last copy, by name.
    """

    def __init__(self, layout: Layout, data: numpy_tensors.Memory) -> None:
        self.section = Section(layout, data)
        self.begun = False
        self.lost: LostValues = {}
        self._known: _Known | None = None
        self._pinned: Pinned | None = None
        # The buffer's second copy on a device: its note, the device, and the mapped bytes.
        self._second: tuple[bytes, torch.device, torch.Tensor | None] | None = None
        self._from_second = False  # whether copies read the second copy

    def pin(self, devices: "Collection[torch.device]") -> None:
        """Pin the buffer, so that devices can copy from it directly. This is slow; done once."""
        if devices and self._pinned is None:
            from . import device_memory

            self._pinned = device_memory.pinned(self.section.data, next(iter(devices)))

    def from_second(self, note: bytes, devices: "Collection[torch.device]") -> bool:
        """Map the buffer's second copy on a device, so that later copies read it if possible.

        Args:
            note: The bytes that identify the second copy; empty or zeros: there is none.
            devices: The devices of the target.

        Returns:
            Whether the second copy is mapped. If so, later copies do not read the buffer itself.
        """
        second: torch.Tensor | None = None
        if note.strip(b"\0") and len(devices) == 1 and self.section.aligned():
            from . import device_memory

            (device,) = devices
            if self._second is None or self._second[:2] != (note, device):
                self._known = None  # it may refer to the previous second copy
                self._second = note, device, device_memory.mapped(note, device)
            second = self._second[2]
        found = second is not None and second.numel() == self.section.data.nbytes
        if found != self._from_second:
            self._known, self._from_second = None, found
        return found

    def _in_second(self, spec: TensorSpec) -> "torch.Tensor | None":
        """Return a tensor of the second copy; None if copies read the buffer."""
        if not self._from_second or self._second is None or self._second[2] is None:
            return None
        from . import torch_tensors

        return torch_tensors.shaped(self._second[2][spec.begin : spec.end], spec)

    def _source(self, spec: TensorSpec, leaf: Leaf) -> Leaf:
        """Return the published tensor to copy to a target's tensor `leaf`."""
        tensor = self._in_second(spec)
        return self.section.like(spec.name, leaf) if tensor is None else tensor

    def _value(self, spec: TensorSpec) -> "torch.Tensor":
        """Return a copy of a published tensor on the CPU."""
        tensor = self._in_second(spec)
        return self.section.tensors[spec.name].clone() if tensor is None else tensor.cpu()

    def _equal(self, a: TensorSpec, b: TensorSpec) -> bool:
        """Return whether two published tensors have the same bytes."""
        if self._from_second and self._second is not None and self._second[2] is not None:
            flat = self._second[2]
            return bool((flat[a.begin : a.end] == flat[b.begin : b.end]).all())
        data = self.section.data
        return np.array_equal(data[a.begin : a.end], data[b.begin : b.end])

    def differences(self, target: object, *, strict: Strict, cast: bool) -> Differences | None:
        """Return where a target differs from the version; None if copying everything is as fast.

        Also return None if this reader's last copy was not to this target.
        """
        known = self._known_as(target, outline_at_once(target), (strict, cast))
        if known is None:
            return None
        try:
            return Differences(known.destinations, known.sources)
        except (ValueError, MemoryError):
            return None

    def _known_as(
        self, target: object, outline: Outline | None, how: tuple[Strict, bool]
    ) -> _Known | None:
        """Return the last comparison if it is of this target and still valid, else None."""
        known = self._known
        if known is None or outline is None or not (known.target is target and known.how == how):
            return None
        if outline.marks != known.marks or (known.large and not in_memory(known.large)):
            return None
        return known

    def copy_into(
        self,
        target: object,
        *,
        strict: Strict = True,
        cast: bool = False,
        only: Differences | None = None,
    ) -> None:
        """Copy the version into a target.

        Args:
            target, strict, cast: As in `check`.
            only: The differences to write, found by `differences`. None: copy everything.

        Raises:
            StateError: The target does not fit, and was not changed; the text gives the reasons.
        """
        outline = outline_at_once(target)
        known = self._known_as(target, outline, (strict, cast))
        if known is not None:
            if known.pairs.tied:
                known.pairs.check(self._equal)
            if known.copies.devices is not None:
                known.copies.ready(known.destinations, known.sources)
            self.begun = True
            if only is not None:
                only.write()
            elif known.copies.plain is not None:
                known.copies.plain()
            else:
                known.copies.run(known.destinations, known.sources)
            if known.narrowed is not None:
                self.lost = self._lost(known.narrowed)
            if known.loading is not None:
                known.loading.finish(strict=bool(strict))
            return
        self._known = None
        opened, pairs = self._examine(target, strict=strict, cast=cast)
        loading, narrowed = opened.loading, _narrowed(pairs)
        if loading is not None and loading.makers:
            self.begun = True
            self.lost = {} if narrowed is None else self._lost(narrowed)
            extra = [name for name in opened.extra if name in self.section.layout.signatures]
            values = {name: self._value(self.section.layout.by_name(name)) for name in extra}
            loading.load(self.values(opened.leaves) | values, strict=bool(strict))
            return
        destinations = [leaf for leaf, _ in pairs.written]
        self.pin(devices_of(destinations))
        sources = [self._source(spec, leaf) for leaf, spec in pairs.written]
        copies = Copies(destinations, sources)
        copies.ready(destinations, sources)
        self.begun = True
        copies.run(destinations, sources)
        self.lost = {} if narrowed is None else self._lost(narrowed)
        if loading is not None:
            loading.finish(strict=bool(strict))
        if outline is not None and self.section.aligned():
            how = strict, cast
            kept = copies, pairs, destinations, sources, _large(destinations), loading, narrowed
            self._known = _Known(target, how, outline.marks, *kept)

    def _lost(self, narrowed: Narrowed) -> LostValues:
        """Return how many values of these tensors did not fit the target's dtype."""
        if self._from_second and self._second is not None and self._second[2] is not None:
            return narrowed.found_on(self._second[2], {})
        return narrowed.found(self.section.data, {})

    def values(self, leaves: "Mapping[str, Any]") -> "dict[str, torch.Tensor]":
        """Return copies of the published tensors, under all names in `leaves` that they fill."""
        layout = self.section.layout
        values: dict[str, torch.Tensor] = {}
        tied: dict[TensorPlace, torch.Tensor] = {}
        for name, leaf in leaves.items():
            if name in layout.signatures:
                values[name] = self._value(layout.by_name(name)).to(leaf.dtype)
                if (place := place_of(name, leaf)) is not None:
                    tied[place] = values[name]
        for name, leaf in leaves.items():
            place = place_of(name, leaf)
            if name not in values and place is not None and place in tied:
                values[name] = tied[place]  # published under another name
        return values

    def _examine(self, target: object, *, strict: Strict, cast: bool) -> tuple[_Target, _Pairs]:
        """Compare a target with the layout; return the target's tensors, and the pairs to copy."""
        opened = _open(target)
        layout = self.section.layout
        lines = _compare(layout, opened, strict=strict, cast=cast)
        if lines:
            raise StateError("the version does not fit the target:\n" + "\n".join(trimmed(lines)))
        if is_module(target) and any(map(_on_meta, opened.leaves.values())):
            from . import torch_modules

            self.begun = True  # new memory has no values before the copy
            torch_modules.materialise(target)
            opened = _open(target)
        pairs = _Pairs(layout, opened.leaves)
        pairs.check(self._equal)
        # Set extra state first: this runs the user's code, which may raise before any tensor is
        # written.
        for name, put in opened.extra.items():
            if name in layout.signatures and not (opened.loading and opened.loading.makers):
                self.begun = True
                put(self._value(layout.by_name(name)))
        return opened, pairs


def _narrowed(pairs: _Pairs) -> Narrowed | None:
    """Return the tensors whose conversion may lose values, since the new dtype has less range."""
    own = ((spec, signature(spec.name, leaf)[0]) for leaf, spec in pairs.written)
    targets = {spec.name: leaf for leaf, spec in pairs.written}
    return Narrowed.of(((spec, spec.dtype, dtype) for spec, dtype in own), targets)


def _open(target: object) -> _Target:
    if is_module(target):
        from . import torch_modules

        parts = torch_modules.parts_of(target)
        extra = {name: part.set_extra_state for name, part in parts.extra.items()}
        return _Target(parts.tensors, extra, parts.faults, True, parts.loading)
    try:
        return _Target(named_leaves(target, in_place=True), {}, [])
    except StateError as error:
        return _Target({}, {}, [str(error)])


def _compare(layout: Layout, target: _Target, *, strict: Strict, cast: bool) -> list[str]:
    # Return error lines that say how a target differs from the layout.
    published = dict(layout.signatures)
    lines = list(target.faults)
    if lines and not target.leaves:
        return lines  # its tensors could not be listed
    for name in target.extra:
        if published.pop(name, None) is None and strict:
            lines.append(f"{name}: extra state of the target, not published")
    ties = Ties(layout, target.leaves)
    for name in ties.arrived:
        published.pop(name, None)
    got: dict[str, Any] = {}
    for name, leaf in target.leaves.items():
        if name in ties.filled or (not strict and name not in published):
            continue
        try:
            got[name] = signature(name, leaf)
        except StateError as error:
            published.pop(name, None)
            lines.append(str(error))
            continue
        if not (target.materialises and _on_meta(leaf)) and (fault := _fault(name, leaf)):
            lines.append(fault)
    return differing(lines + ties.faults(), published, got, strict=strict, cast=cast)


def differing(
    faults: list[str],
    published: Mapping[str, Signature],
    got: Mapping[str, Signature],
    *,
    strict: Strict,
    cast: bool,
) -> list[str]:
    """Return error lines for a target's faults and differences, after a line that explains them."""
    lines = faults + difference(published, got, cast=cast, strict=strict)
    why = explanation(published, got) or (None if faults else _part(published, got, lines))
    why = why if lines else None
    return lines if why is None else [why, *lines]


def _part(
    published: Mapping[str, Signature], got: Mapping[str, Signature], lines: list[str]
) -> str | None:
    """Return advice if the version fits, but has only some of the target's tensors; else None."""
    lacking = len(got.keys() - published.keys())
    if not published or published.keys() - got.keys() or len(lines) != lacking:
        return None
    return (
        f"{len(published)} of the target's {len(got)} tensors are published, and they fit: publish "
        "all of it, or give the worker a mapping of just these tensors "
        "(docs/guides/adapters.md, An adapter)"
    )


def _large(leaves: list[Leaf]) -> list[Leaf]:
    return [leaves[place] for place in of_torch().large(leaves)] if "torch" in sys.modules else []


def _on_meta(leaf: Leaf) -> bool:
    return not isinstance(leaf, np.ndarray) and leaf.is_meta


def _fault(name: str, leaf: Leaf) -> str | None:
    if isinstance(leaf, np.ndarray):
        return numpy_tensors.target_fault(name, leaf)
    from . import torch_tensors

    return torch_tensors.target_fault(name, leaf)
