"""Opens checkpoints: models in one or more safetensors files, as weights to publish.

A file's header is used only after `read_layout` has checked it. Tensors are views of the mapped
file, so a publish copies them once, from the page cache into its own memory. Only numpy is needed.

A mapped file shows bytes that are written into the file later, and reading beyond the end of a
truncated file kills the process (SIGBUS). So a caller that expects changes, such as a watcher,
passes `load=True`: the files are then read into memory, and rejected if they changed during that.
Other callers can check `changed` after they have used the tensors.

The path of a checkpoint leads to a safetensors file, to a folder with one such file, to a folder
with shards and their index (the format of Hugging Face), or to such an index.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from ...codecs.apply import as_arrays
from ...codecs.checksum import CHUNK_BYTES_DEFAULT, digest
from ...codecs.dtypes import numpy_dtype
from ...codecs.errors import LayoutError, LimitError, StateError
from ...codecs.layout import ORDER, PREFIX_BYTES, Layout, TensorSpec
from ...codecs.native import crc32c
from ...codecs.numpy_tensors import Array, Bytes
from ...codecs.protocol_limits import LAYOUT_BYTES_MAX
from .foreign import BEGINNING_BYTES, file_of, part_of
from .header import read_layout
from .shards import INDEX_SUFFIX, SUFFIX, CheckpointError, find, is_index, read_index

if TYPE_CHECKING:
    from typing_extensions import Buffer

READ_BYTES = 16 << 20  # bytes per read, small enough for a progress bar

Progress = Callable[[int], None]  # called with the number of bytes since the last call


class File(NamedTuple):
    """The identity of a file's content: every write changes at least one of these fields.

    Attributes:
        name, inode, size: The file's name, inode number and size in bytes.
        written_ns: The modification time (mtime), which programs can set.
        changed_ns: The change time (ctime), which programs cannot set.
    """

    name: str
    inode: int
    written_ns: int
    changed_ns: int
    size: int


Stamp = tuple[File, ...]  # one entry for each file of a checkpoint


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint: its path, its layout, and the bytes of its data section."""

    path: Path
    layout: Layout
    data: Bytes


class Checkpoint:
    """The tensors of one or more files, checked against their headers and their index.

    Attributes:
        path: The path that was opened.
        parts: The files.
        stamp: The files' identities when the checkpoint was opened; see `stamp_of`.
        aliases: For each additional name of a tied tensor, the name under which it is stored.
    """

    def __init__(self, path: Path, parts: tuple[CheckpointFile, ...], stamp: Stamp) -> None:
        self.path, self.parts, self.stamp = path, parts, stamp
        self.aliases: dict[str, str] = {}
        self._home: dict[str, CheckpointFile] = {}
        for part in parts:
            self._home.update(dict.fromkeys(part.layout.names(), part))
            self.aliases.update(part.layout.aliases)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {len(self.parts)} files, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes; tied tensors count once."""
        return sum(part.layout.nbytes for part in self.parts)

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """The files' metadata, such as `format`, without the entries for tied names and order."""
        texts: dict[str, str] = {}
        for part in self.parts:
            texts.update(part.layout.metadata)
        return {key: text for key, text in texts.items() if key not in {*self.aliases, ORDER}}

    @cached_property
    def layout(self) -> Layout:
        """The layout of a publish of this checkpoint, regardless of its division into files."""
        groups: dict[str, list[str]] = {
            spec.name: [spec.name] for part in self.parts for spec in part.layout.tensors
        }
        for alias, name in self.aliases.items():
            groups[name].append(alias)
        entries: list[tuple[str, str, tuple[int, ...]]] = []
        aliases: dict[str, str] = {}
        for stored, names in groups.items():
            spec, (first, *others) = self.spec(stored), names
            entries.append((first, spec.dtype, spec.shape))
            if spec.nbytes:
                aliases.update(dict.fromkeys(others, first))
            else:  # tensors without elements cannot share memory
                entries.extend((name, spec.dtype, spec.shape) for name in others)
        # With several shards, no file has the order of all names: then use the default order.
        order = self.parts[0].layout.names() if len(self.parts) == 1 else ()
        return Layout.plan(entries, aliases, names=order)

    def spec(self, name: str) -> TensorSpec:
        """Return dtype, shape and position (in its file) of the tensor with this name or alias."""
        return self._home[name].layout.by_name(name)

    def raw(self, name: str) -> Bytes:
        """Return the bytes of a tensor, as a view of the file's memory."""
        part, spec = self._home[name], self.spec(name)
        return part.data[spec.begin : spec.end]

    def arrays(self) -> dict[str, Array]:
        """Return a read-only array for every name and alias, to publish.

        Raises:
            CheckpointError: A tensor has a dtype that numpy lacks.
        """
        arrays: dict[str, Array] = {}
        for part in self.parts:
            for spec in part.layout.tensors:
                try:
                    numpy_dtype(spec.dtype)
                except StateError as error:
                    raise CheckpointError(
                        f"{part.path}: {spec.name!r} is {spec.dtype}, a dtype that numpy lacks, so "
                        "it cannot be published from a file; store it as U8, or in another dtype"
                    ) from error
            arrays.update(as_arrays(part.layout, part.data))
        return {name: arrays[name] for name in self.layout.names()}

    def digest(self, progress: Progress | None = None) -> str:
        """Return the digest that a publish of this checkpoint has, with the default chunk size."""
        crcs: list[int] = []
        crc, room = 0, CHUNK_BYTES_DEFAULT
        for spec in self.layout.tensors:
            rest = self.raw(spec.name)
            while rest.size:
                piece, rest = rest[:room], rest[room:]
                crc, room = crc32c(piece, crc), room - piece.size
                if not room:
                    crcs.append(crc)
                    crc, room = 0, CHUNK_BYTES_DEFAULT
                if progress is not None:
                    progress(piece.size)
        if room < CHUNK_BYTES_DEFAULT:
            crcs.append(crc)
        return digest(self.layout.id, CHUNK_BYTES_DEFAULT, crcs)

    def changed(self) -> bool:
        """Return whether a file was written or replaced since this checkpoint was opened."""
        return stamp_of(self.path) != self.stamp


def stamp_of(path: Path) -> Stamp:
    """Return the identity of each file of a checkpoint; () if there are no files.

    Every write to a file changes the result.
    """
    if is_index(path):
        path = path.parent
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"*{INDEX_SUFFIX}")])
    rows: list[File] = []
    for file in files:
        try:
            now = file.stat()
        except FileNotFoundError:  # the file was removed after it was listed, or is not written yet
            continue
        rows.append(File(file.name, now.st_ino, now.st_mtime_ns, now.st_ctime_ns, now.st_size))
    return tuple(rows)


def open_checkpoint(
    path: Path, *, load: bool = False, progress: Progress | None = None
) -> Checkpoint:
    """Open a checkpoint: check all headers, sizes and names, and map its files.

    Args:
        path: A safetensors file, a folder with one, a folder with shards and their index, or
            that index.
        load: Whether to read the files into memory instead of mapping them, and to reject files
            that change meanwhile.
        progress: With `load`, called with the number of bytes of each read.

    Raises:
        CheckpointError: The checkpoint is damaged, incomplete or contradictory, or is no
            checkpoint.
        OSError: A file cannot be read.
    """
    stamp = stamp_of(path)
    found = find(path)
    if is_index(found):
        index = read_index(found)
        parts = tuple(_open_file(file, load, progress) for file in index.files())
        index.check({part.path: part.layout for part in parts})
    else:
        parts = (_open_file(found, load, progress),)
    opened = Checkpoint(path, parts, stamp)
    if load and opened.changed():
        raise CheckpointError(
            f"{path} was written while it was read; read it again once the write has ended"
        )
    return opened


def _open_file(path: Path, load: bool, progress: Progress | None) -> CheckpointFile:
    # Open one file: check its header, then map or read its data.
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file that can be mapped; give a {SUFFIX} file")
    part = part_of(path)
    if part:
        raise CheckpointError(f"{path} is {part}")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _read_header(file, path, size)
        try:
            layout = read_layout(header)
        except LimitError as error:
            raise CheckpointError(f"{path} cannot be published: {error}") from error
        except LayoutError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        nbytes = size - len(header)
        if nbytes != layout.nbytes:
            what = "cut short, or still being written" if nbytes < layout.nbytes else "damaged"
            raise CheckpointError(
                f"{path} is {what}: its header describes {layout.nbytes} bytes of tensors, but the "
                f"file has {nbytes}; copy or download it again"
            )
        return CheckpointFile(
            path, layout, _read(file, path, nbytes, progress) if load else _map(file, nbytes)
        )


def _read_header(file: BufferedReader, path: Path, size: int) -> bytes:
    # Return the header of a file, with its length prefix; raise CheckpointError if it is damaged.
    prefix = file.read(PREFIX_BYTES)
    length = int.from_bytes(prefix, "little") if len(prefix) == PREFIX_BYTES else 0
    if length > LAYOUT_BYTES_MAX:
        other = file_of(prefix + file.peek(BEGINNING_BYTES))
        if other:
            raise CheckpointError(f"{path} is {other}")
        raise CheckpointError(
            f"{path} is not a safetensors file: its first 8 bytes would announce a header of "
            f"{length} bytes, but at most {LAYOUT_BYTES_MAX} are allowed"
        )
    header = prefix + file.read(length)
    if len(header) < PREFIX_BYTES + length:
        raise CheckpointError(
            f"{path} is cut short, or still being written: it has {size} bytes, but its header "
            "alone is longer; copy or download it again"
        )
    return header


def _map(file: BufferedReader, nbytes: int) -> Bytes:
    whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    return whole[whole.size - nbytes :]


def _read(file: BufferedReader, path: Path, nbytes: int, progress: Progress | None) -> Bytes:
    data = np.empty(nbytes, np.uint8)
    view, at = memoryview(cast("Buffer", data)), 0
    while at < nbytes:
        count = file.readinto(view[at : at + READ_BYTES])
        if not count:
            raise CheckpointError(f"{path} was cut short while it was read; read it again")
        at += count
        if progress is not None:
            progress(count)
    return data
