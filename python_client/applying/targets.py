"""Makes a `Target` from each object that a user gives a Subscriber as a target:

nn.Module, TensorDict, mapping of torch tensors or numpy arrays      copied in place
a path                                                               written, then renamed
a function                                                           called to load it (`loading`)

`RenamedTarget` wraps any of them if the published tensor names differ from the target's.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ...bus.protocol_limits import MODELS_MAX
from ...bus.staged import StagedVersion
from ...bus.worker.layouts import Boxes, Expected
from ...codecs.apply import Reader, calls_users, check, devices_within, summing
from ...codecs.copies import Differences
from ...codecs.errors import LayoutError, StateError
from ...codecs.layout import NAME_SHOWN, Layout, Strict, trimmed
from ...codecs.leaves import Leaf
from ...codecs.parts import Box, PartLayout
from ...codecs.renaming import Renaming
from ...codecs.state import is_module, is_tensor, is_tensordict, named_leaves, state_of
from ...codecs.ties import shared_memory
from ...codecs.words import printable
from .. import checks
from ..files.file_target import FileTarget
from .loading import FunctionTarget
from .overflow_log import OverflowLog
from .parts import Part, boxes_of, local_part
from .target import Names, Sums, Target

if TYPE_CHECKING:
    import torch

# Other publishers may add spaces, aliases and metadata to the layout header of the same tensors.
LAYOUT_SLACK_BYTES = 2**20
LAYOUTS_MAX = 4  # renamed layouts that are cached
READERS_MAX = 4  # readers that are cached: for two staging buffers, or a publisher's blocks


log = logging.getLogger("weightbus.subscriber")


class MemoryTarget(Target):
    """A module, TensorDict or mapping whose tensors are overwritten in place.

    Args:
        target: The module, TensorDict or mapping.
        strict: Whether version and target must have the same names. If False, a version may have
            more names, but not fewer: a version that changes nothing must not be reported as
            applied.
        cast: Whether values may be converted to the target's dtype.
        sole_writer: Whether no other code ever writes to the target, not even between applies.
        write: A function that writes a reader's tensors to the target; None: copy each tensor.
    """

    # A plain attribute, not a property: it is read for every version.
    devices: "frozenset[torch.device]" = frozenset()

    def __init__(
        self,
        target: object,
        *,
        strict: bool,
        cast: bool,
        sole_writer: bool = False,
        write: Callable[[Reader], None] | None = None,
    ) -> None:
        self._target, self._cast, self._sole_writer = target, cast, sole_writer
        self._write = write
        # The differences between the target and the next version: that version, the value of
        # `_writes` when they were compared, and the differences. Each apply increments `_writes`
        # when it begins and ends, so that differences found during an apply are not used.
        self._differences: tuple[StagedVersion, int, Differences] | None = None
        self._writes = 0
        self._overflows = OverflowLog(log)
        self._strict: Strict = strict or "target"
        self._readers: list[tuple[StagedVersion, Reader]] = []  # readers of recently used buffers
        self._changed = False  # whether the last apply may have changed the target
        self.calls_user = calls_users(target)
        self.devices, self._on_devices = devices_within(target)  # updated with each new buffer

    def from_second(self, staged: StagedVersion) -> bool:
        """Return whether all tensors are on the device of the version's copy, which is mapped."""
        if not self.devices:
            return False
        note = staged.note if self._on_devices and not staged.hash_chunks else b""
        return self._reader(staged).from_second(note, self.devices)

    def fault(self, layout: Layout) -> str:
        """Return an error text that names the tensors that do not fit; "" if all fit."""
        lines = check(layout, self._target, strict=self._strict, cast=self._cast)
        return "\n".join(trimmed(lines))

    def expected(self) -> Expected:
        """Return upper bounds for a version: from the target's own bytes and layout."""
        try:
            layout = state_of(self._target).layout()
        except StateError:  # for instance on the meta device
            return Expected()
        if self._strict is not True:  # a version may have more names
            return Expected(layout.nbytes)
        longest = 2 * len(layout.header) + LAYOUT_SLACK_BYTES
        return Expected(layout.nbytes, min(longest, Expected().layout_bytes))

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        return summing(layout, self._target, names, sums)

    def prepare(self, staged: StagedVersion) -> None:
        """Pin a new buffer for the target's devices, or find the elements that a patch changes."""
        self._differences = None
        data, layout = staged.data, staged.layout
        known = [r for old, r in self._readers if old.data is data and old.layout is layout]
        if not known:
            devices, self._on_devices = devices_within(self._target)
            self.devices = devices  # pyright: ignore[reportIncompatibleMethodOverride]
            if self.devices:
                self._reader(staged).pin(self.devices)
            return
        if not self._sole_writer or staged.patch is None:
            return
        writes = self._writes
        with suppress(Exception):  # `apply` raises the error
            found = known[0].differences(self._target, strict=self._strict, cast=self._cast)
            self._differences = None if found is None else (staged, writes, found)

    def apply(self, staged: StagedVersion) -> None:
        """Copy all tensors into the target, or only the differences that `prepare` has found."""
        found, self._differences = self._differences, None
        only = found[2] if found and found[:2] == (staged, self._writes) else None
        self._changed, self._writes = False, self._writes + 1
        reader = self._reader(staged)
        reader.begun = False
        try:
            if self._write is not None:
                self._write(reader)
            else:
                reader.copy_into(self._target, strict=self._strict, cast=self._cast, only=only)
        finally:
            self._changed = reader.begun
        if reader.lost or self.detail:
            version = f"{staged.model} version {staged.key[1]}"
            self.detail = self._overflows.note(version, reader.lost)

    def undo(self) -> bool:
        """Return whether the last apply has changed nothing: it cannot restore previous bytes."""
        self._writes += 1
        return not self._changed

    def settle(self) -> None:
        """Record the end of the apply; there are no previous bytes to release."""
        self._writes += 1

    def applied_bytes(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """Return the staging buffer, which still has the version; None if it is in a segment."""
        return staged.data if staged.shared is None else None

    def _reader(self, staged: StagedVersion) -> Reader:
        """Return a reader of this buffer in this layout, a cached one if possible."""
        data, layout, alike = staged.data, staged.layout, self._readers
        known = [r for old, r in alike if old.data is data and old.layout is layout]
        reader = known[0] if known else Reader(layout, data)
        if not known:
            # do not cache: the reader has copies of this version's unaligned tensors
            if not reader.section.aligned():
                return reader
            alike = [each for each in alike if each[0].layout is layout]
        self._readers = [*alike[1 - READERS_MAX :], (staged, reader)]  # drop readers of old memory
        return reader


class RenamedTarget(Target):
    """Passes renamed versions to a target whose tensor names differ from the published names.

    Args:
        target: The target with its own names.
        renaming: Maps published names to the target's names.
    """

    def __init__(self, target: Target, renaming: Renaming) -> None:
        self._target, self._renaming = target, renaming
        self.calls_user, self.on_disk = target.calls_user, target.on_disk
        if target.boxes is not None:
            self.boxes = partial(self._renamed_boxes, target.boxes)

        # Cached (layout, renamed layout, names). Two threads read the tuple, so replace it whole.
        self._cached: tuple[tuple[Layout, Layout, Mapping[str, str]], ...] = ()
        # the version that was renamed last, and the renamed version
        self._last: tuple[StagedVersion, StagedVersion] | None = None

    def fault(self, layout: Layout) -> str:
        """Return why a layout cannot be renamed, or does not fit the target; "" if it fits."""
        try:
            renamed, _ = self._rename_layout(layout)
        except (StateError, LayoutError) as error:
            return str(error)
        return self._target.fault(renamed)

    @property
    def devices(self) -> "frozenset[torch.device]":
        return self._target.devices

    def from_second(self, staged: StagedVersion) -> bool:
        """Return what the target returns for the renamed version."""
        if self._last is None or self._last[0] is not staged:
            self._last = staged, self._rename(staged)
        return self._target.from_second(self._last[1])

    def expected(self) -> Expected:
        """Return the target's bounds, without the layout's: renaming changes its length."""
        return Expected(self._target.expected().nbytes)

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Compute checksums under the target's names."""
        renamed, own_names = self._rename_layout(layout)
        return self._target.summing(renamed, [own_names[name] for name in names], sums)

    def prepare(self, staged: StagedVersion) -> None:
        """Prepare the target for the renamed version."""
        self._last = staged, self._rename(staged)
        self._target.prepare(self._last[1])

    def apply(self, staged: StagedVersion) -> None:
        """Apply the renamed version.

        If `prepare` renamed `staged`, pass the same renamed object, which the target recognises.
        """
        last, self._last = self._last, None
        self._target.apply(last[1] if last and last[0] is staged else self._rename(staged))
        self.detail = self._target.detail

    def undo(self) -> bool:
        return self._target.undo()

    def settle(self) -> None:
        self._target.settle()

    def has_kept(self, key: tuple[int, int]) -> bool:
        return self._target.has_kept(key)

    def applied_bytes(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        return self._target.applied_bytes(staged)

    def _renamed_boxes(self, boxes: Boxes, layout: Layout) -> Mapping[str, Box | None]:
        """Return the slices by published name; `boxes` returns them by the target's names."""
        renamed, own_names = self._rename_layout(layout)
        own = boxes(renamed)
        return {name: own[mine] for name, mine in own_names.items() if mine in own}

    def _rename(self, staged: StagedVersion) -> StagedVersion:
        return structs.replace(staged, layout=self._rename_layout(staged.layout)[0])

    def _rename_layout(self, layout: Layout) -> tuple[Layout, Mapping[str, str]]:
        """Return the layout with the target's names; and the target's name, by published name."""
        for cached, renamed, own_names in self._cached:
            if cached is layout:
                return renamed, own_names
        own_names = self._renaming.of(layout.names())
        renamed = layout.renamed(own_names)
        self._cached = (*self._cached[1 - LAYOUTS_MAX :], (layout, renamed, own_names))
        return renamed, own_names


def fault_of(targets: Mapping[str, Target], model: str, layout: Layout) -> str:
    """Return an error text if a layout does not fit a model's target, else an empty text."""
    target = targets[model]
    try:
        if target.boxes is not None:
            try:
                layout = PartLayout(layout, target.boxes(layout)).layout
            except LayoutError as error:
                return str(error)
        return target.fault(layout)
    except Exception as error:
        return f"the target could not be examined: {error!r}"


def by_id(models: object) -> Mapping[str, object]:
    """Check that `models` maps model ids to targets, and is not itself a target; return it.

    Raises:
        ValueError: `models` is not such a mapping, has no or too many models, or an invalid id.
    """
    example = 'write Subscriber(address, {"policy": ...}), with the id that publish() is given'
    if is_tensordict(models) or not isinstance(models, Mapping):
        raise ValueError(f"models={_shown(models)} does not map model ids to targets: {example}")
    named = cast("Mapping[str, object]", models)
    if named and all(map(_is_tensor, named.values())):
        what = f"models= has tensors by name ({next(iter(named))!r}, ...), not targets by model id"
        raise ValueError(f"{what}: {example}")
    if not 1 <= len(named) <= MODELS_MAX:
        what = f"models={_shown(named)} has {len(named)} targets"
        raise ValueError(f"{what}: give 1 to {MODELS_MAX}, by model id")
    return {checks.check_name(model, "model"): target for model, target in named.items()}


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:100]  # a module's repr has many lines


def _is_tensor(value: object) -> bool:
    return isinstance(value, np.ndarray) or (is_tensor(value) and not is_tensordict(value))


def is_function(named: object) -> bool:
    """Return whether a target is a function. (A module is callable, too, but not a function.)"""
    return callable(named) and not (is_module(named) or isinstance(named, Mapping))


def targets_of(
    models: Mapping[str, object],
    *,
    strict: bool,
    cast: bool,
    sole_writer: bool = False,
    renaming: Renaming | None = None,
    keep: Callable[[object, Target], Target] | None = None,
) -> dict[str, Target]:
    """Return a `Target` for each of the user's targets; a `Target` is returned unchanged.

    Args:
        models: The user's targets, by model id.
        strict, cast, sole_writer: As in `MemoryTarget`.
        renaming: Maps published names to the targets' names, for all models.
        keep: A function that returns the target to use for a model in memory; its arguments are the
            model and the target that copies to it. None: use the copying target.

    Raises:
        ValueError: A value in `models` is not a target.
    """

    in_memory: dict[str, Mapping[str, Leaf]] = {}

    def target_of(model: str, named: object) -> Target:
        if isinstance(named, Target):
            return named
        if isinstance(named, Part):
            return part_of(model, named)
        load = checks.hook(named, "a target that is a function") if is_function(named) else None
        if load is not None:
            return FunctionTarget(load)
        if isinstance(named, str | Path):
            return FileTarget(Path(named))
        try:
            in_memory[model] = named_leaves(named)
        except StateError as error:
            text = f"models={{{model!r}: ...}}: {error}; or a path, or a function"
            raise ValueError(text.replace("cannot travel", "is not a target")) from None
        local = local_part(named, in_memory[model])
        if local is not None:
            return part_of(model, local)
        copying = MemoryTarget(named, strict=strict, cast=cast, sole_writer=sole_writer)
        return copying if keep is None else keep(named, copying)

    def part_of(model: str, part: Part) -> Target:
        target = target_of(model, part.target)
        names = None
        if model in in_memory:
            names = partial(named_leaves, part.target)
            target = MemoryTarget(part.target, strict=strict, cast=cast, sole_writer=sole_writer)
        target.take_part(boxes_of(part.slices, names, strict=strict))
        return target

    targets = {model: target_of(model, named) for model, named in models.items()}
    if len(in_memory) > 1:
        _warn_of_shared_memory(in_memory)
    if renaming is None:
        return targets
    return {model: RenamedTarget(target, renaming) for model, target in targets.items()}


def _warn_of_shared_memory(models: Mapping[str, Mapping[str, Leaf]]) -> None:
    """Warn about models that share tensors: a version of one model changes the other."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for (one, name), (other, also) in shared_memory(models):
        found.setdefault((one, other), []).append((name, also))
    for (one, other), names in found.items():
        name, also = (printable(each, NAME_SHOWN) for each in names[0])
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning(
            "models %r and %r share memory here (%s and %s%s): a version of either overwrites a "
            "part of the other. Publish both as one model, such as nn.ModuleDict, or give each "
            "its own memory",
            one,
            other,
            name,
            also,
            more,
        )
