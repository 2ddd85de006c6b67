"""Where a worker's versions go: into a model's own memory, or into a file.

nn.Module, TensorDict, mapping of torch tensors or numpy arrays      copied in place
a path                                                               written, then renamed
a function                                                           called to load it (`loading`)
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from ..bus.staged import StagedVersion
from ..bus.worker.layouts import Expected
from ..codecs.apply import STEP_BYTES, Reader, calls_users, check, summing
from ..codecs.copies import Differences
from ..codecs.errors import StateError
from ..codecs.layout import HEADER_BYTES_MAX, PREFIX_BYTES, Layout, Strict, trimmed
from ..codecs.native import crc32c
from ..codecs.state import is_module, state_of
from . import checks
from .loading import FunctionTarget

# Others may write the layout of the same tensors with spaces, aliases and metadata of their own.
LAYOUT_SLACK_BYTES = 2**20
Names = Iterable[str]
Sums = list[int | None]
READERS_MAX = 4  # readers kept, of the last applies: two staging buffers, or a publisher's blocks


class Target(Protocol):
    """What a version can be applied to."""

    @property
    def asks_user(self) -> bool:
        """Whether applying calls the user's code, which has a deadline and may take its time."""
        ...

    def fault(self, layout: Layout) -> str:
        """Say why a layout cannot be applied here; nothing if it can. Changes nothing."""
        ...

    def ahead(self, staged: StagedVersion) -> None:
        """Do what can be done for an `apply` that follows, while readers go on; change nothing."""
        ...

    def apply(self, staged: StagedVersion) -> None:
        """Apply a version: all of it, or an exception."""
        ...

    def undo(self) -> bool:
        """Have what was there before the last `apply` in place again; say whether it is.

        It is called after that has failed, or the user's part of it.
        """
        ...

    def settle(self) -> None:
        """The last `apply` stands: let go of what was there before."""
        ...

    def expected(self) -> Expected:
        """Say what is known of versions that fit."""
        ...

    def lies_in(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """Return where the bytes of what was just applied lie from now on, in one piece."""
        ...

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Sum what is there by now, a little at a time: see `codecs.apply.summing`."""
        ...


class MemoryTarget:
    """A module, TensorDict or mapping whose tensors are overwritten in place.

    Args:
        target: It.
        strict: Whether both sides must have the same names; else a version may have more of them,
            but none less, or nothing might be applied and reported as if it were.
        cast: Whether values may be converted to the target's dtype.
        sole_writer: Whether nobody else writes there while a version is applied, or just before.
    """

    def __init__(
        self, target: object, *, strict: bool, cast: bool, sole_writer: bool = False
    ) -> None:
        self._target, self._cast, self._sole_writer = target, cast, sole_writer
        # What differs from a version that comes next, and how many writes there had been when that
        # was looked for. Each counts twice, so that nobody who looks in the middle is believed.
        self._differ: tuple[StagedVersion, int, Differences] | None = None
        self._writes = 0
        self._strict: Strict = strict or "target"
        self._readers: list[tuple[StagedVersion, Reader]] = []  # of the buffers used lately
        self._begun = False  # the last apply may have changed something
        self.asks_user = calls_users(target)

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
        """Sum the tensors."""
        return summing(layout, self._target, names, sums)

    def ahead(self, staged: StagedVersion) -> None:
        """Find what differs, where few elements can and nobody else writes."""
        self._differ = None
        reader = self._known_reader(staged)
        if not self._sole_writer or staged.patch is None or reader is None:
            return
        writes = self._writes
        with suppress(Exception):  # what is wrong with the target is for `apply` to say
            found = reader.differences(self._target, strict=self._strict, cast=self._cast)
            self._differ = None if found is None else (staged, writes, found)

    def apply(self, staged: StagedVersion) -> None:
        """Copy every tensor to its place; or what differs, if that is known."""
        differ, self._differ = self._differ, None
        only = differ[2] if differ and differ[:2] == (staged, self._writes) else None
        self._begun, self._writes = False, self._writes + 1
        reader = self._reader(staged)
        reader.begun = False
        try:
            if only is None:
                self._copy(reader)
            else:
                reader.copy_into(self._target, strict=self._strict, cast=self._cast, only=only)
        finally:
            self._begun = reader.begun

    def _copy(self, reader: Reader) -> None:
        reader.copy_into(self._target, strict=self._strict, cast=self._cast)

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
        reader = self._known_reader(staged) or Reader(staged.layout, staged.data)
        if reader.section.aligned():  # else its views are copies, of this version alone
            alike = [each for each in self._readers if each[0].layout is staged.layout]
            self._readers = [*alike[1 - READERS_MAX :], (staged, reader)]  # others hold old memory
        return reader

    def _known_reader(self, staged: StagedVersion) -> Reader | None:
        known = (
            reader
            for each, reader in self._readers
            if each.data is staged.data and each.layout is staged.layout
        )
        return next(known, None)


class FileTarget:
    """A safetensors file that always holds one whole version.

    Args:
        path: The file; its folder must exist.
    """

    asks_user = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: BinaryIO | None = None  # what the last version has replaced
        self._kept: Path | None = None  # another name of that
        self._replaced = False
        if not path.parent.is_dir():
            raise NotADirectoryError(
                f"{path}: there is no folder {path.parent} to write it into; make it first"
            )
        self._clear_away()

    def fault(self, layout: Layout) -> str:
        """Any layout can be written."""
        del layout
        return ""

    def expected(self) -> Expected:
        """Nobody knows."""
        return Expected()

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Sum what the file holds, which somebody else may have written."""
        with self._path.open("rb") as file:
            head = file.read(PREFIX_BYTES)
            head += file.read(min(int.from_bytes(head, "little"), HEADER_BYTES_MAX))
            there = Layout.parse(head)
            for name in names:
                total: int | None = None
                if there.signatures.get(name) == layout.signatures[name]:
                    spec, total = there.by_name(name), 0
                    for begin in range(spec.begin, spec.end, STEP_BYTES):
                        count = min(STEP_BYTES, spec.end - begin)
                        piece = os.pread(file.fileno(), count, len(head) + begin)
                        total = crc32c(piece, total)
                        yield count
                sums.append(total)

    def ahead(self, staged: StagedVersion) -> None:
        """Files have readers of their own."""

    def apply(self, staged: StagedVersion) -> None:
        """Write the version beside the file, then rename it over the file."""
        self.settle()
        with suppress(FileNotFoundError):
            self._before = self._path.open("rb")  # its bytes stay for as long as it is open
            self._kept = self._other_name(self._before)
        self._replace(lambda file: file.writelines((staged.layout.header, staged.data.data)))
        self._replaced = True

    def undo(self) -> bool:
        """Put the file back that was there before, or have none if there was none."""
        before = self._before
        try:
            if self._replaced and before is None:
                self._path.unlink(missing_ok=True)
            elif self._replaced and self._kept is not None and self._kept.exists():
                os.replace(self._kept, self._path)
            elif self._replaced and before is not None:
                self._replace(lambda file: shutil.copyfileobj(before, file))
        finally:
            self.settle()
        return True

    def settle(self) -> None:
        """Let go of what was there before."""
        if self._kept is not None:
            self._kept.unlink(missing_ok=True)
        if self._before is not None:
            self._before.close()
        self._before, self._kept, self._replaced = None, None, False

    def lies_in(self, staged: StagedVersion) -> NDArray[np.uint8] | None:
        """They lie where they were copied from."""
        return staged.data if staged.shared is None else None

    def _other_name(self, before: BinaryIO) -> Path | None:
        """Give a file another name, under its lock, to be put back at once: a copy takes long."""
        with suppress(OSError):  # there are no links here, or no locks, or others have it
            if _locked(before.fileno()):
                path = self._hidden()
                os.link(self._path, path)
                return path
        return None

    def _replace(self, write: Callable[[BinaryIO], object]) -> None:
        temporary, handle = self._temporary()
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _temporary(self) -> tuple[Path, int]:
        """Make a file beside the target, and hold its lock: somebody is at it.

        Not by `tempfile`, whose files nobody else may read: others are to load this one.
        """
        while True:
            path = self._hidden()
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                ours = _locked(handle) and os.fstat(handle).st_nlink > 0
            except OSError:  # there are no locks here, so nobody clears anything away either
                ours = True
            if ours:
                return path, handle
            os.close(handle)  # it was cleared away before it had its lock

    def _hidden(self) -> Path:
        return self._path.parent / f".{self._path.name}.{secrets.token_hex(8)}"

    def _clear_away(self) -> None:
        """Remove what killed subscribers have left of this file: nobody holds its lock."""
        left = re.compile(re.escape(f".{self._path.name}.") + r"[0-9a-f]{16}")
        for path in self._path.parent.iterdir():
            if left.fullmatch(path.name):
                with suppress(OSError), path.open("rb") as file:
                    if _locked(file.fileno()):
                        path.unlink()


def _locked(handle: int) -> bool:
    """Take the lock of a file, which the kernel ends with its holder; return whether it is ours."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fault_of(targets: Mapping[str, Target], model: str, layout: Layout) -> str:
    """Say why a layout cannot be applied. (Called by the background thread.)"""
    try:
        return targets[model].fault(layout)
    except Exception as error:
        return f"the target could not be examined: {error!r}"


def is_function(named: object) -> bool:
    """Return whether a target is a function. (A module can be called, too.)"""
    return callable(named) and not (is_module(named) or isinstance(named, Mapping))


def targets_of(
    models: Mapping[str, object],
    *,
    strict: bool,
    cast: bool,
    sole_writer: bool = False,
    keep: Callable[[object, Target], Target] | None = None,
) -> dict[str, Target]:
    """Return the target of each model that a user named; one that is a target already is taken.

    `keep` makes of a model in memory, and the target that copies to it, the target that is used.
    """

    def target_of(named: object) -> Target:
        if isinstance(named, MemoryTarget | FileTarget):
            return named
        load = checks.hook(named, "a target that is a function") if is_function(named) else None
        if load is not None:
            return FunctionTarget(load)
        if isinstance(named, str | Path):
            return FileTarget(Path(named))
        copying = MemoryTarget(named, strict=strict, cast=cast, sole_writer=sole_writer)
        return copying if keep is None else keep(named, copying)

    return {model: target_of(named) for model, named in models.items()}
