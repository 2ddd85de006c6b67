"""Where a worker's versions go: into a model's own memory, or into a file.

nn.Module, TensorDict, mapping of torch tensors or numpy arrays      copied in place
a path                                                               written, then renamed
a function                                                           called to load it (`loading`)

Each of them may have other names than what is published (`RenamedTarget`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ..bus.limits import MODELS_MAX
from ..bus.staged import StagedVersion
from ..bus.worker.layouts import Expected
from ..codecs.apply import Reader, calls_users, check, devices_within, summing
from ..codecs.copies import Differences
from ..codecs.errors import LayoutError, StateError
from ..codecs.layout import NAME_SHOWN, Layout, Strict, trimmed
from ..codecs.leaves import Leaf
from ..codecs.renaming import Renaming
from ..codecs.state import is_module, is_tensor, is_tensordict, named_leaves, state_of
from ..codecs.ties import shared_memory
from ..codecs.words import printable
from . import checks
from .file_target import FileTarget
from .loading import FunctionTarget
from .overflow_log import OverflowLog
from .target import Names, Sums, Target

if TYPE_CHECKING:
    import torch

# Others may write the layout of the same tensors with spaces, aliases and metadata of their own.
LAYOUT_SLACK_BYTES = 2**20
LAYOUTS_MAX = 4  # kept under other names
READERS_MAX = 4  # readers kept, of the last applies: two staging buffers, or a publisher's blocks


log = logging.getLogger("weightbus.subscriber")


class MemoryTarget(Target):
    """A module, TensorDict or mapping whose tensors are overwritten in place.

    Args:
        target: It.
        strict: Whether both sides must have the same names; else a version may have more of them,
            but none less, or nothing might be applied and reported as if it were.
        cast: Whether values may be converted to the target's dtype.
        sole_writer: Whether nobody else writes there while a version is applied, or just before.
        write: Who writes what a reader has, in place of a copy into each tensor.
    """

    # A plain attribute, which costs no call: it is looked at for every version.
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
        # What differs from a version that comes next, and how many writes there had been when that
        # was looked for. Each counts twice, so that nobody who looks in the middle is believed.
        self._differ: tuple[StagedVersion, int, Differences] | None = None
        self._writes = 0
        self._overflows = OverflowLog(log)
        self._strict: Strict = strict or "target"
        self._readers: list[tuple[StagedVersion, Reader]] = []  # of the buffers used lately
        self._begun = False  # the last apply may have changed something
        self.asks_user = calls_users(target)
        self.devices, self._on_devices = devices_within(target)  # as of when a buffer was new

    def from_second(self, staged: StagedVersion) -> bool:
        """Map it, if there is one on the device that all tensors are on."""
        if not self.devices:
            return False
        note = staged.note if self._on_devices and not staged.hash_chunks else b""
        return self._reader(staged).from_second(note, self.devices)

    def fault(self, layout: Layout) -> str:
        """Name the tensors that differ."""
        lines = check(layout, self._target, strict=self._strict, cast=self._cast)
        return "\n".join(trimmed(lines))

    def expected(self) -> Expected:
        """Say what its tensors would be published as, each once, if they could be."""
        try:
            layout = state_of(self._target).layout()
        except StateError:  # on the meta device, for instance
            return Expected()
        if self._strict is not True:  # others may have any number of names beside
            return Expected(layout.nbytes)
        longest = 2 * len(layout.header) + LAYOUT_SLACK_BYTES
        return Expected(layout.nbytes, min(longest, Expected().layout_bytes))

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        return summing(layout, self._target, names, sums)

    def ahead(self, staged: StagedVersion) -> None:
        """Find what differs, where few elements can and nobody else writes."""
        self._differ = None
        data, layout = staged.data, staged.layout
        known = [r for old, r in self._readers if old.data is data and old.layout is layout]
        if not known:
            now, self._on_devices = devices_within(self._target)
            self.devices = now  # pyright: ignore[reportIncompatibleMethodOverride]
            if self.devices:
                self._reader(staged).pin(self.devices)
            return
        if not self._sole_writer or staged.patch is None:
            return
        writes = self._writes
        with suppress(Exception):  # what is wrong with the target is for `apply` to say
            found = known[0].differences(self._target, strict=self._strict, cast=self._cast)
            self._differ = None if found is None else (staged, writes, found)

    def apply(self, staged: StagedVersion) -> None:
        """Copy every tensor to its place; or what differs, if that is known."""
        differ, self._differ = self._differ, None
        only = differ[2] if differ and differ[:2] == (staged, self._writes) else None
        self._begun, self._writes = False, self._writes + 1
        reader = self._reader(staged)
        reader.begun = False
        try:
            if self._write is not None:
                self._write(reader)
            else:
                reader.copy_into(self._target, strict=self._strict, cast=self._cast, only=only)
        finally:
            self._begun = reader.begun
        if reader.lost or self.detail:
            version = f"{staged.model} version {staged.key[1]}"
            self.detail = self._overflows.note(version, reader.lost)

    def undo(self) -> bool:
        """Say whether nothing was changed: nobody keeps the bytes of the version before."""
        self._writes += 1
        return not self._begun

    def settle(self) -> None:
        """Nothing is kept."""
        self._writes += 1

    def lies_in(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """They lie where they were copied from."""
        return staged.data if staged.shared is None else None

    def _reader(self, staged: StagedVersion) -> Reader:
        """Return a reader of this layout in this buffer, the one used before if there is one."""
        data, layout, alike = staged.data, staged.layout, self._readers
        known = [r for old, r in alike if old.data is data and old.layout is layout]
        reader = known[0] if known else Reader(layout, data)
        if not known:
            if not reader.section.aligned():  # its views are copies, of this version alone
                return reader
            alike = [each for each in alike if each[0].layout is layout]
        self._readers = [*alike[1 - READERS_MAX :], (staged, reader)]  # others hold old memory
        return reader


class RenamedTarget(Target):
    """A target that has other names than what is published: it is given versions under its own.

    Args:
        target: It.
        renaming: What the published names become.
    """

    def __init__(self, target: Target, renaming: Renaming) -> None:
        self._target, self._renaming = target, renaming
        self.asks_user, self.on_disk = target.asks_user, target.on_disk

        # Layouts with their names here; a new tuple each time, since two threads use it.
        self._known: tuple[tuple[Layout, Layout, Mapping[str, str]], ...] = ()
        self._looked_at: tuple[StagedVersion, StagedVersion] | None = None  # by `ahead`

    def fault(self, layout: Layout) -> str:
        """Say what cannot be renamed; then what the target says."""
        try:
            renamed, _ = self._of(layout)
        except (StateError, LayoutError) as error:
            return str(error)
        return self._target.fault(renamed)

    @property
    def devices(self) -> "frozenset[torch.device]":
        return self._target.devices

    def from_second(self, staged: StagedVersion) -> bool:
        """What the target says of the version under its names here."""
        if self._looked_at is None or self._looked_at[0] is not staged:
            self._looked_at = staged, self._here(staged)
        return self._target.from_second(self._looked_at[1])

    def expected(self) -> Expected:
        """Say what the target says, but for the length of names."""
        return Expected(self._target.expected().nbytes)

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Sum what is there by those names."""
        renamed, became = self._of(layout)
        return self._target.summing(renamed, [became[name] for name in names], sums)

    def ahead(self, staged: StagedVersion) -> None:
        """Do it for the version under its names here."""
        self._looked_at = staged, self._here(staged)
        self._target.ahead(self._looked_at[1])

    def apply(self, staged: StagedVersion) -> None:
        """Apply the version under its names here, which is the very object that `ahead` had."""
        known, self._looked_at = self._looked_at, None
        self._target.apply(known[1] if known and known[0] is staged else self._here(staged))
        self.detail = self._target.detail

    def undo(self) -> bool:
        return self._target.undo()

    def settle(self) -> None:
        self._target.settle()

    def keeps(self, key: tuple[int, int]) -> bool:
        return self._target.keeps(key)

    def lies_in(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        return self._target.lies_in(staged)

    def _here(self, staged: StagedVersion) -> StagedVersion:
        return structs.replace(staged, layout=self._of(staged.layout)[0])

    def _of(self, layout: Layout) -> tuple[Layout, Mapping[str, str]]:
        """Return a layout under the names of the target, and what became of its own."""
        for known, renamed, became in self._known:
            if known is layout:
                return renamed, became
        became = self._renaming.of(layout.names())
        renamed = layout.renamed(became)
        self._known = (*self._known[1 - LAYOUTS_MAX :], (layout, renamed, became))
        return renamed, became


def fault_of(targets: Mapping[str, Target], model: str, layout: Layout) -> str:
    """Say why a layout cannot be applied. (Called by the background thread.)"""
    try:
        return targets[model].fault(layout)
    except Exception as error:
        return f"the target could not be examined: {error!r}"


def by_id(models: object) -> Mapping[str, object]:
    """Return targets by model id, if they are that: the id may have been forgotten.

    Raises:
        ValueError: They are not.
    """
    outer = 'write Subscriber(address, {"policy": ...}), with the id that publish() is given'
    if is_tensordict(models) or not isinstance(models, Mapping):
        raise ValueError(f"models={_shown(models)} is no mapping of targets by model id: {outer}")
    named = cast("Mapping[str, object]", models)
    if named and all(map(_is_tensor, named.values())):
        what = f"models= has tensors by name ({next(iter(named))!r}, ...), not targets by model id"
        raise ValueError(f"{what}: {outer}")
    if not 1 <= len(named) <= MODELS_MAX:
        what = f"models={_shown(named)} has {len(named)} targets"
        raise ValueError(f"{what}: give 1 to {MODELS_MAX}, by model id")
    return {checks.check_name(model, "model"): target for model, target in named.items()}


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:100]  # of a module, one line


def _is_tensor(value: object) -> bool:
    return isinstance(value, np.ndarray) or (is_tensor(value) and not is_tensordict(value))


def is_function(named: object) -> bool:
    """Return whether a target is a function. (A module can be called, too.)"""
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
    """Return the target of each model that a user named; one that is a target already is taken.

    `keep` makes of a model in memory, and the target that copies to it, the target that is used. A
    `renaming` says what published names become in all of them.
    """

    in_memory: dict[str, Mapping[str, Leaf]] = {}

    def target_of(model: str, named: object) -> Target:
        if isinstance(named, Target):
            return named
        load = checks.hook(named, "a target that is a function") if is_function(named) else None
        if load is not None:
            return FunctionTarget(load)
        if isinstance(named, str | Path):
            return FileTarget(Path(named))
        try:
            in_memory[model] = named_leaves(named)
        except StateError as error:
            text = f"models={{{model!r}: ...}}: {error}; or a path, or a function"
            raise ValueError(text.replace("cannot travel", "is no target")) from None
        copying = MemoryTarget(named, strict=strict, cast=cast, sole_writer=sole_writer)
        return copying if keep is None else keep(named, copying)

    targets = {model: target_of(model, named) for model, named in models.items()}
    if len(in_memory) > 1:
        _warn_of_shared_memory(in_memory)
    if renaming is None:
        return targets
    return {model: RenamedTarget(target, renaming) for model, target in targets.items()}


def _warn_of_shared_memory(models: Mapping[str, Mapping[str, Leaf]]) -> None:
    """Warn where a version of one model overwrites tensors of another, such as a shared trunk."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for (one, name), (other, also) in shared_memory(models):
        found.setdefault((one, other), []).append((name, also))
    for (one, other), names in found.items():
        name, also = (printable(each, NAME_SHOWN) for each in names[0])
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning(
            "models %r and %r share memory here (%s and %s%s): a version of either overwrites a "
            "part of the other. Publish both as one model, such as nn.ModuleDict, or give each "
            "memory of its own",
            one,
            other,
            name,
            also,
            more,
        )
