"""Keeps a publisher's state on disk: a folder with its versions, its epoch, and a lock.

    weightbus.json                         the epoch, and for each file: name, digest, chunk size
    policy@1795253000123-42.safetensors    the exact bytes of the version MODEL@EPOCH-NUMBER
    weightbus.lock                         locked by the publisher that uses the folder

Theory of operation: a file counts only if the table, `weightbus.json`, names it. A version is
written under a temporary name, synced, and renamed, and its folder is synced. Then the table is
replaced in the same way. Then files that the table no longer names are deleted. So after a crash at
any moment the folder has either the old or the new table, and each of them names only whole files.
A disk may damage bytes, and users may copy files. So the table contains its own hash, and a version
is checked against its digest each time it is read.

Versions are weights, so this module creates the folder and its files as private: modes 0700 and
0600. A folder with the set-group-ID bit is meant for a group: its files get the permissions that
the folder gives this group. Files are opened relative to the folder's descriptor. No link in the
folder is followed, and in a world-writable folder no other user's file is used.

This module starts no thread; `state_writer.py` has the thread that writes.
"""

import contextlib
import fcntl
import gc
import hashlib
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import numpy as np

from ...bus.messages import Count, Hex64, Metadata, Name, Positive
from ...bus.net.inheritance import close_in_children, keep_in_children
from ...bus.spare import Spare
from ...codecs.checksum import digest_of
from ...codecs.errors import WeightBusError
from ...codecs.layout import Layout
from ...codecs.numpy_tensors import Bytes
from ...codecs.protocol_limits import CHUNK_BYTES_MAX, INTEGER_MAX
from .. import checks
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.shards import SUFFIX, CheckpointError
from ..closing import Closable
from .places import check_owner, open_lock, open_plain, place_of, user

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("weightbus.state")

# Seconds to wait for a lock that this process holds, and between two attempts.
LOCK_SECONDS, RETRY_SECONDS = 1.0, 0.02
LOCK, TABLE, DAMAGED = "weightbus.lock", "weightbus.json", "weightbus.json.damaged"
PARTIAL = ".partial"  # suffix of a file that is being written
HISTORY_MAX = 10_000  # older files of a model; bounded, as each version rewrites the whole table
NAMES_MAX = 64  # keys that are kept for the same bytes; with an older key, a worker fetches them
SLICE_BYTES = 2**22  # bytes written between two calls of `pause`

_OURS = re.compile(rf"[A-Za-z0-9._-]{{1,128}}@([0-9]{{1,16}})-[0-9]{{1,16}}{re.escape(SUFFIX)}\Z")

Key = tuple[int, int]  # epoch, version


class StateFolderError(WeightBusError, OSError):
    """A state folder is in use, cannot be written, or does not have the requested version."""

    __module__ = "weightbus"


class StoredVersion(msgspec.Struct, frozen=True):
    """A version on disk.

    Attributes:
        model, epoch, version: The version's model id, epoch and number when it was published.
        nbytes: Bytes of its tensors.
        chunk_bytes: Bytes per chunk.
        digest: The digest of the version, in chunks of `chunk_bytes`.
        names: The newest 64 (epoch, version) under which these bytes were offered, newest first.
        metadata: The version's metadata, as text by name.
        companions: By model, the number of each version that was published as one with this one.
    """

    __module__ = "weightbus.types"

    model: Name
    epoch: Positive
    version: Positive
    nbytes: Count
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES_MAX)]
    digest: Hex64
    names: tuple[tuple[Count, Positive], ...]
    metadata: Metadata = msgspec.field(default_factory=dict[str, str])
    companions: dict[Name, Positive] = msgspec.field(default_factory=dict[str, int])

    def __hash__(self) -> int:
        return hash((self.model, self.epoch, self.version, self.digest))

    @property
    def key(self) -> Key:
        """The version's (epoch, version), by which versions are ordered."""
        return self.epoch, self.version

    @property
    def file(self) -> str:
        """The name of the version's file."""
        return f"{self.model}@{self.epoch}-{self.version}{SUFFIX}"


# The content of `weightbus.json`.
class _Table(msgspec.Struct, frozen=True):
    epoch: Count = 0  # the highest epoch of this folder's publishers
    versions: tuple[StoredVersion, ...] = ()  # in the order in which they were written


# The form of `weightbus.json` on disk: the table, and the table's hash.
class _Sealed(msgspec.Struct, frozen=True):
    sha256: str
    table: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Saved:
    """An opened version on disk, which can be published instead of weights.

    Attributes:
        stored: The version's entry in the table.
        layout: The version's layout, byte for byte as it was published.
        data: The file's data section, not verified yet: `copy_to` verifies it.
    """

    stored: StoredVersion
    layout: Layout
    data: Bytes

    def copy_to(self, memory: Bytes) -> None:
        """Copy the bytes, and check the copy against the digest.

        Raises:
            StateFolderError: The digest does not match.
        """
        np.copyto(memory, self.data)
        found = digest_of(self.layout.id, memory, self.stored.chunk_bytes)
        if found != self.stored.digest:
            raise StateFolderError(
                f"{self.stored.file} is damaged: it hashes to {found}, and {self.stored.digest} "
                "was published; it is not offered to workers. Publish anew, or roll back to another"
            )


def _idle() -> None:
    """Do nothing: the default of `pause`."""


class StateIndex:
    """Finds and opens the versions that a table names.

    Args:
        path: The folder.
        table: The folder's table.
    """

    def __init__(self, path: Path, table: _Table) -> None:
        self.path, self._table = path, table

    def models(self) -> list[str]:
        """Return the models that have versions, sorted."""
        return sorted({stored.model for stored in self._table.versions})

    def versions(self, model: str) -> list[StoredVersion]:
        """Return a model's versions, the newest first."""
        found = [stored for stored in self._table.versions if stored.model == model]
        return sorted(found, key=lambda stored: stored.key, reverse=True)

    def find(self, model: str, key: Key) -> StoredVersion:
        """Return the version that has this key, or was offered under it in another epoch.

        Raises:
            StateFolderError: The folder does not have this version; the text lists its versions.
        """
        versions = self.versions(model)
        for stored in versions:
            if stored.key == key or key in stored.names:
                return stored
        raise StateFolderError(
            f"version {key} of {model!r} is not in {self.path}; there are "
            f"{', '.join(str(stored.key) for stored in versions) or 'none'}: see history(), and "
            "keep more of them with history="
        )

    def open(self, stored: StoredVersion) -> Saved:
        """Open a version's file. `Saved.copy_to` reads and verifies the bytes.

        Raises:
            StateFolderError: The file is gone, truncated, or another model's.
        """
        path = self.path / stored.file
        try:
            part = open_checkpoint(path).parts[0]
        except FileNotFoundError:
            raise StateFolderError(
                f"{stored.file} is not in {self.path} any more: newer versions replace older ones; "
                "see history(), and keep more of them with history="
            ) from None
        except (CheckpointError, OSError) as error:
            raise StateFolderError(f"{stored.file} cannot be offered: {error}") from None
        if part.layout.nbytes != stored.nbytes:
            raise StateFolderError(f"{stored.file} is damaged: it is another model's file")
        return Saved(stored, part.layout, part.data)


def read_index(path: Path) -> StateIndex:
    """Return a folder's current versions. No lock is needed: a publisher may write meanwhile.

    Raises:
        StateFolderError: The folder's table cannot be read, or is damaged.
    """
    file = path / TABLE
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return StateIndex(path, _table_of(_read(TABLE, folder)))
        finally:
            os.close(folder)
    except FileNotFoundError:
        return StateIndex(path, _Table())
    except OSError as error:
        raise StateFolderError(f"{file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise StateFolderError(
            f"{file} is damaged ({error}): its versions cannot be distinguished. Start from a "
            "checkpoint of your own; the next version that is published makes a new table"
        ) from None


class StateFolder(StateIndex, Closable):
    """A state folder, locked for one publisher until `close`. Only one thread may write at a time.

    Args:
        path: The folder, which is made if it does not exist.
        history: How many older versions of each model are kept besides the latest.

    Raises:
        StateFolderError: Another publisher uses the folder, or the folder cannot be used.
    """

    def __init__(self, path: Path, history: int = 0) -> None:
        checks.whole(history, "history", 0, HISTORY_MAX)
        super().__init__(path, _Table())
        self._history, self._lock, self._spare = history, -1, Spare()
        try:
            self._home = _opened(path)
            about = os.fstat(self._home)
            group = about.st_mode & (stat.S_IRGRP | stat.S_IWGRP)
            self._mode = 0o600 | (group if about.st_mode & stat.S_ISGID else 0)
            # A user who can read the lock file can hold its lock, so a group needs write access.
            lock_mode = self._mode if group & stat.S_IWGRP else 0o600
        except OSError as error:
            raise StateFolderError(f"{path} cannot be a state folder: {error}") from None
        close_in_children(self)
        try:
            self._lock = open_lock(LOCK, self._home, lock_mode)
            self._acquire_lock()
            self._restrict_access(lock_mode)
            self._table = self._read_table()
            self._delete_leftovers()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StateFolderError):
                text = f"{path} cannot be a state folder: {error.strerror}"
                raise StateFolderError(text) from None
            raise

    def __repr__(self) -> str:
        return f"<StateFolder {self.path}: epoch {self.epoch}, {len(self._table.versions)} files>"

    def _acquire_lock(self) -> None:
        # Lock the folder; raise StateFolderError if another publisher keeps it locked.
        me, until = f"process {os.getpid()} on {socket.gethostname()}", 0.0
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(self._lock, 512, 0).decode(errors="replace").strip()
            if holder == me and not until:
                gc.collect()  # closes the publisher that has the lock, if nothing refers to it
                until = time.monotonic() + LOCK_SECONDS
            if time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                continue
            locker = _locker_of(self._lock)
            if locker and not holder.startswith(f"process {locker} "):
                reason = f"is locked by {_process_text(locker)}: stop that process"
            elif holder == me:
                reason = "belongs to a publisher of this process: close() it"
            else:
                who = holder or "which has only just started"
                reason = f"belongs to another publisher that is running ({who}): stop that one"
            raise StateFolderError(
                f"the state folder {self.path} {reason}, or use another folder here"
            )
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"{me}\n".encode(), 0)

    def _restrict_access(self, lock_mode: int) -> None:
        """Remove other users' access to files that earlier releases created with wider modes."""
        if os.fstat(self._home).st_mode & stat.S_IWOTH:
            log.warning(
                "every user of this host may write to the state folder %s, and could put other "
                "weights there for workers: chmod 700 it, or use a folder of your own",
                self.path,
            )
        names = [n for n in os.listdir(self._home) if n in (TABLE, LOCK, DAMAGED) or _OURS.match(n)]
        if some := [n for n in names if self._make_private(n, lock_mode if n == LOCK else None)]:
            log.warning(
                "other users of this host could read %d files of the state folder %s, which an "
                "earlier release created; the mode of these files is now %o. To let a group read "
                "versions, chgrp the folder and chmod it to 2750",
                len(some),
                self.path,
                self._mode,
            )

    def _make_private(self, name: str, mode: int | None) -> bool:
        """Remove other users' access to a file; return whether they had access."""
        mode = self._mode if mode is None else mode
        # the file is gone, is not a regular file, or is another user's
        with contextlib.suppress(OSError):
            file = open_plain(name, os.O_RDONLY, self._home)
            try:
                found = stat.S_IMODE(os.fstat(file).st_mode)
                if found & 0o077 & ~mode:
                    os.fchmod(file, found & (0o700 | mode))
                    return True
            finally:
                os.close(file)
        return False

    def _delete_leftovers(self) -> None:
        """Delete the files of a publisher that was killed while it wrote them."""
        named = {stored.file for stored in self._table.versions}
        for name in os.listdir(self._home):
            whole = _OURS.match(name.removesuffix(PARTIAL))
            if whole and (name.endswith(PARTIAL) or (named and name not in named)):
                self._remove(name)

    def _read_table(self) -> _Table:
        """Return the table; if it is damaged, log that, rename its file, and return a new table."""
        file = self.path / TABLE
        used = (int(m[1]) for name in os.listdir(self._home) if (m := _OURS.match(name)))
        least = min(max(used, default=0), INTEGER_MAX)
        try:
            text = _read(TABLE, self._home)
        except FileNotFoundError:
            return _Table(least)
        except OSError as error:
            raise StateFolderError(f"{file} cannot be read: {error}") from None
        try:
            table = _table_of(text)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            os.replace(TABLE, DAMAGED, src_dir_fd=self._home, dst_dir_fd=self._home)
            log.warning(
                "%s is damaged (%s) and was moved to %s: no version is offered from this folder "
                "until one is published; its files are left as they are",
                file,
                error,
                DAMAGED,
            )
            return _Table(least)
        return msgspec.structs.replace(table, epoch=max(table.epoch, least))

    @property
    def epoch(self) -> int:
        """The highest epoch of this folder's publishers."""
        return self._table.epoch

    # Writing.

    def begin(self, epoch: int, offered: Iterable[StoredVersion] = ()) -> None:
        """Record an epoch before it is announced; the versions `offered` are its version 1.

        Raises:
            StateFolderError: The table cannot be written.
        """
        again = {stored.key: stored.model for stored in offered}
        versions = tuple(
            msgspec.structs.replace(s, names=newest((*s.names, (epoch, 1))))
            if again.get(s.key) == s.model
            else s
            for s in self._table.versions
        )
        try:
            self._replace_table(_Table(max(epoch, self.epoch), versions))
            self._sync_folder()
        except OSError as error:
            raise StateFolderError(
                f"the epoch cannot be written to {self.path}: {error}; make room, or use another "
                "state folder"
            ) from None

    def write(
        self, stored: StoredVersion, parts: Iterable["Buffer"], pause: Callable[[], None] = _idle
    ) -> None:
        """Write a version, and delete versions beyond the history.

        Args:
            stored: The version's entry for the table.
            parts: The version's bytes: the layout, then the data section.
            pause: A function to call before each slice; an exception from it aborts the write.

        Raises:
            OSError: The disk is full or fails. The previous versions are still there.
        """
        self.write_as_one({stored: parts}, pause)

    def write_as_one(
        self,
        versions: Mapping[StoredVersion, Iterable["Buffer"]],
        pause: Callable[[], None] = _idle,
    ) -> None:
        """Write a version of each of several models, all or none; see `write`."""
        dropped: list[StoredVersion] = []
        for stored in versions:
            older = [s for s in self.versions(stored.model) if s.key != stored.key]
            dropped += older[self._history :]
        gone, files = {*dropped}, {stored.file for stored in versions}  # sets: it may be thousands
        kept = tuple(s for s in self._table.versions if s not in gone and s.file not in files)
        epoch = max(self.epoch, *(stored.epoch for stored in versions))
        try:
            for stored, parts in versions.items():
                self._replace(stored.file, parts, pause)
            self._sync_folder()  # before the table names the files
            self._replace_table(_Table(epoch, (*kept, *versions)))
        except BaseException:
            for stored in versions:
                if stored not in self._table.versions:
                    self._remove(stored.file)
            raise
        self._sync_folder()  # before the files that the table no longer names are deleted
        for old in dropped:
            self._remove(old.file)

    def _replace_table(self, table: _Table) -> None:
        text = msgspec.json.encode(table)
        sealed = _Sealed(hashlib.sha256(text).hexdigest(), msgspec.Raw(text))
        self._replace(TABLE, [msgspec.json.encode(sealed) + b"\n"])
        self._table = table

    def _replace(
        self, name: str, parts: Iterable["Buffer"], pause: Callable[[], None] = _idle
    ) -> None:
        """Replace a file atomically."""
        partial, new = name + PARTIAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._remove(partial)
        try:
            with self._spare.released():  # connections may have used up all other descriptors
                file = open_plain(partial, new, self._home)
                try:
                    os.fchmod(file, self._mode)  # regardless of the umask
                    for part in parts:
                        _write(file, memoryview(part).cast("B"), pause)
                    os.fsync(file)
                finally:
                    os.close(file)
            os.replace(partial, name, src_dir_fd=self._home, dst_dir_fd=self._home)
        except BaseException:
            self._remove(partial)
            raise

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._home)

    def _sync_folder(self) -> None:
        os.fsync(self._home)

    def close(self) -> None:
        """Unlock the folder, so that another publisher can use it; idempotent."""
        keep_in_children(self)
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # explicitly, as a forked child may share it
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close a forked child's inherited descriptors, which would keep the folder locked."""
        descriptors, self._lock, self._home = (self._lock, self._home), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


def _opened(path: Path) -> int:
    """Return the descriptor of a state folder; make the folder if it does not exist."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with place_of(path) as place:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(place.name, flags, dir_fd=place.folder)


def _read(name: str, folder: int) -> bytes:
    """Return a file's content; raise PermissionError if another user owns the file."""
    file = open_plain(name, os.O_RDONLY, folder)
    with os.fdopen(file, "rb") as opened:
        check_owner(file, name, folder, stat.S_ISVTX | stat.S_IWOTH)
        return opened.read()


def _locker_of(lock: int) -> int:
    """Return the pid that holds the lock of a file; 0 if /proc/locks does not show it."""
    inode = str(os.fstat(lock).st_ino)
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, device_inode, *_ = line.split()
            if kind == "FLOCK" and device_inode.rpartition(":")[2] == inode:
                return max(0, int(pid))
    return 0


def _process_text(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"process {pid} of {user(os.stat(f'/proc/{pid}').st_uid)}"
    return f"process {pid}"


def _write(file: int, view: memoryview, pause: Callable[[], None]) -> None:
    while len(view):
        pause()
        view = view[os.write(file, view[:SLICE_BYTES]) :]


def _table_of(text: bytes) -> _Table:
    sealed = msgspec.json.decode(text, type=_Sealed)
    if hashlib.sha256(sealed.table).hexdigest() != sealed.sha256:
        raise ValueError("it does not match its hash")
    return msgspec.json.decode(sealed.table, type=_Table)


def newest(keys: Iterable[Key]) -> tuple[Key, ...]:
    """Return the newest `NAMES_MAX` keys, the newest first."""
    return tuple(sorted(set(keys), reverse=True)[:NAMES_MAX])


def parts_of(layout: Layout, data: Bytes) -> list["Buffer"]:
    """Return the parts of a version's file: layout and data section."""
    return [layout.header, cast("Buffer", data)]


def new_epoch(requested: int | None, folder: StateFolder | None) -> int:
    """Return a new publisher's epoch, which is higher than all epochs in its state folder.

    Args:
        requested: The epoch that the user sets; None: milliseconds since 1970.
        folder: The state folder, if there is one.

    Raises:
        ValueError: `requested` is not higher than the folder's epochs.
    """
    least = 1 if folder is None else folder.epoch + 1  # P1
    if requested is None:
        return max(time.time_ns() // 1_000_000, least)
    seen = f" (above all that {folder.path} has seen)" if folder is not None else ""
    return checks.whole(requested, f"epoch{seen}", least, INTEGER_MAX)


def age_from_now() -> Callable[[], float]:
    """Return a clock that counts the seconds from now on, including those of a suspended host."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    started = time.clock_gettime(clock)
    return lambda: time.clock_gettime(clock) - started
