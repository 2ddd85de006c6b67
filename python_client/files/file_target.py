"""`FileTarget` writes versions to a safetensors file, which always holds one whole version.

Theory of operation: a version is written to a temporary file in the same folder, which is then
renamed over the file. So a program that opens the file finds one whole version, and a failed write
changes nothing. If the path is a symbolic link, the file that it points to is replaced, and the
link stays; a link that another user made is refused. The new file has the permissions of the file
that it replaces; the first file gets those of any new file of this user (`umask`). Another user's
file in a world-writable folder is not replaced, since the new file would belong to this user.

The file's header is not the layout of the version. The header has the same tensors in the same
order, and the version's metadata, except entries that readers would mistake for the name of a tied
tensor. To the metadata it adds `"format": "pt"`, which transformers 4 requires.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ...bus.staged import StagedVersion
from ...codecs.apply import STEP_BYTES
from ...codecs.layout import PREFIX_BYTES, Layout
from ...codecs.native import crc32c
from ...codecs.protocol_limits import LAYOUT_BYTES_MAX
from ..applying.target import Names, Sums, Target
from .places import Place, check_owner, open_plain, place_of

FORMAT = {"format": "pt"}  # as `save_pretrained` writes: the file has PyTorch's names and layouts
ACCESS_LIST = "system.posix_acl_access"  # the extended attribute of POSIX ACLs, on Linux
MOUNTED = "it is mounted by itself, so no new file can take its place: mount its folder instead"
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # flags for a file that must not exist yet
KINDS = {
    stat.S_IFDIR: (errno.EISDIR, "a folder"),
    stat.S_IFIFO: (errno.EINVAL, "a FIFO"),
    stat.S_IFSOCK: (errno.EINVAL, "a socket"),
    stat.S_IFCHR: (errno.EINVAL, "a device"),
    stat.S_IFBLK: (errno.EINVAL, "a device"),
}


class FileTarget(Target):
    """A file that is replaced by each version.

    Args:
        path: The file, or a link to it; its folder must exist.
        untied: Whether to write a tied tensor under each of its names, for readers that do not
            support ties. Otherwise it is written once, under its first name in the source, and the
            file's metadata has its other names, as in `safetensors.torch.save_model`.

    Raises:
        OSError: The path names something that is not a regular file, or its folder is not writable;
            or another user owns a link in the path, or the file in a world-writable folder. The
            text has the reason, and `errno` is set.
    """

    __module__ = "weightbus"

    on_disk = True

    def __init__(self, path: str | Path, *, untied: bool = False) -> None:
        self._path, self._untied = Path(path), untied
        # The last version's layout and metadata, and the layout of its file.
        self._cached: tuple[Layout, Mapping[str, str], Layout] | None = None
        self._before: BinaryIO | None = None  # the file that the last version replaced
        self._backup: str | None = None  # the name of a hidden hard link to that file
        self._home: Place | None = None  # the folder and name that the last `apply` wrote to
        self._replaced = False  # whether the last `apply` replaced the file
        try:
            with place_of(self._path) as home:
                _check_not_mounted(home.path)
                if (before := _opened(home)) is not None:
                    before.close()
                _clear_away(home)
                trial = _hidden(home)
                os.close(open_plain(trial, NEW, home.folder))
                _remove(trial, home)  # another target's `_clear_away` may have removed it already
        except OSError as error:
            raise self._explained(error) from error

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Compute checksums of the tensors in the file, which another program may have written.

        Arguments are those of `Target.summing`.

        Raises:
            FileNotFoundError: The file is gone.
        """
        with place_of(self._path) as home:
            file = _opened(home)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(self._path))
        with file:
            head = file.read(PREFIX_BYTES)
            head += file.read(min(int.from_bytes(head, "little"), LAYOUT_BYTES_MAX))
            file_layout = Layout.parse(head)
            for name in names:
                total: int | None = None
                if file_layout.signatures.get(name) == layout.signatures[name]:
                    spec, total = file_layout.by_name(name), 0
                    for begin in range(spec.begin, spec.end, STEP_BYTES):
                        count = min(STEP_BYTES, spec.end - begin)
                        piece = os.pread(file.fileno(), count, len(head) + begin)
                        total = crc32c(piece, total)
                        yield count
                sums.append(total)

    def apply(self, staged: StagedVersion) -> None:
        """Write the version beside the file, then rename it over the file.

        Arguments are those of `Target.apply`.

        Raises:
            OSError: The version could not be written; the file is unchanged.
        """
        self.settle()
        try:
            home = self._home = place_of(self._path)
            self._before = _opened(home)  # an open file keeps its bytes
            self._backup = None if self._before is None else _back_up(home, self._before)
            _replace(home, self._before, lambda file: self._write(file, staged))
        except OSError as error:
            raise self._explained(error) from error
        self._replaced = True

    def undo(self) -> bool:
        """Restore the previous file; without a previous file, remove the new one. Return True."""
        before, home = self._before, self._home if self._replaced else None
        try:
            if home is not None and before is None:
                _remove(home.name, home)
            elif home is not None and before is not None and not self._put_back(home):
                _replace(home, before, lambda file: shutil.copyfileobj(before, file))
        finally:
            self.settle()
        return True

    def _put_back(self, home: Place) -> bool:
        """Rename the hidden link to the previous file back; return False if there is no link."""
        if self._backup is None:
            return False
        try:
            os.replace(self._backup, home.name, src_dir_fd=home.folder, dst_dir_fd=home.folder)
        except FileNotFoundError:
            return False
        return True

    def settle(self) -> None:
        """Release the previous file."""
        if self._backup is not None and self._home is not None:
            with suppress(OSError):  # if this fails, the next target of this file removes the link
                os.unlink(self._backup, dir_fd=self._home.folder)
        if self._before is not None:
            self._before.close()
        if self._home is not None:
            self._home.close()
        self._before, self._backup, self._home, self._replaced = None, None, None, False

    def _write(self, file: BinaryIO, staged: StagedVersion) -> None:
        # Write a version into a file, with the file's own header.
        layout = staged.layout
        cached, texts = self._cached, staged.metadata
        if cached is None or cached[0] is not layout or cached[1] != texts:
            file_layout = layout.for_file({**texts, **FORMAT}, untied=self._untied)
            cached = self._cached = layout, texts, file_layout
        file_layout = cached[2]
        file.write(file_layout.header)
        if file_layout.nbytes == layout.nbytes:
            file.write(staged.data.data)
            return
        for spec in map(layout.by_name, (each.name for each in file_layout.tensors)):
            file.write(staged.data[spec.begin : spec.end].data)

    def _explained(self, error: OSError) -> OSError:
        """Return the error with advice, and with the user's path instead of a temporary path."""
        folder, text = Path(os.path.realpath(self._path)).parent, error.strerror
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir():
            text = f"its folder {folder} does not exist; make the folder first"
        return error if text is None else OSError(error.errno, text, str(self._path))


def _check_not_mounted(path: Path) -> None:
    """Raise OSError if a file cannot be renamed over this path.

    Raises:
        OSError: The path is a mount point, so the kernel refuses the rename.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # not Linux
        return
    escaped = re.sub(rb"[ \t\n\\]", lambda c: rb"\%03o" % ord(c[0]), os.fsencode(path))
    if any(mount.split(b" ")[4] == escaped for mount in mounts):
        raise OSError(errno.EBUSY, MOUNTED, str(path))


def _opened(home: Place) -> BinaryIO | None:
    """Open the file that will be replaced; return None if there is no file yet.

    Raises:
        OSError: The path is not a regular file, or `undo` could not restore the file, since it is
            not readable, or it belongs to another user, and its folder is world-writable.
    """
    try:
        status = os.stat(home.name, dir_fd=home.folder, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind in KINDS:
            number, what = KINDS[kind]
            raise OSError(number, f"it is {what}; give the path of a file", str(home.path))
        handle = open_plain(home.name, os.O_RDONLY, home.folder)
    except FileNotFoundError:
        return None
    try:
        check_owner(handle, "it", home.folder, stat.S_ISVTX)
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _replace(home: Place, before: BinaryIO | None, write: Callable[[BinaryIO], object]) -> None:
    # Write a temporary file, sync it, and rename it over the file at `home`.
    temporary, handle = _temporary(home, 0o666 if before is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            if before is not None:
                _copy_permissions(handle, before.fileno())
            write(file)
            file.flush()
            os.fsync(handle)
            os.replace(temporary, home.name, src_dir_fd=home.folder, dst_dir_fd=home.folder)
    except BaseException:
        with suppress(OSError):  # its folder is gone, for instance
            os.unlink(temporary, dir_fd=home.folder)
        raise


def _temporary(home: Place, mode: int) -> tuple[str, int]:
    """Make a locked temporary file beside the target; return its name and descriptor."""
    while True:
        hidden = _hidden(home)
        handle = open_plain(hidden, NEW, home.folder, mode)
        try:
            exists = _locked(handle) and os.fstat(handle).st_nlink > 0
        except OSError:  # this file system has no locks, so no `_clear_away` removes files either
            exists = True
        if exists:
            return hidden, handle
        os.close(handle)  # `_clear_away` removed the file before it was locked


def _copy_permissions(handle: int, before: int) -> None:
    """Give a new, private file the owner and permissions of the old file, or fewer permissions."""
    old, new = os.fstat(before), os.fstat(handle)
    mode = stat.S_IMODE(old.st_mode)
    try:
        if old.st_uid != new.st_uid:
            with suppress(OSError):  # only root may change the owner
                os.fchown(handle, old.st_uid, -1)
        if old.st_gid != new.st_gid:
            os.fchown(handle, -1, old.st_gid)
    except OSError:  # the new file keeps its own group, which gets the permissions of others
        mode = (mode & ~0o070) | (mode & 0o007) << 3
    with suppress(OSError):  # this file system has no ACLs
        try:
            os.setxattr(handle, ACCESS_LIST, os.getxattr(before, ACCESS_LIST))
        except OSError as error:
            if error.errno == errno.ENODATA:  # the old file has no ACL: remove the folder's default
                os.removexattr(handle, ACCESS_LIST)
    with suppress(OSError):  # mount options set the mode, or the file stays private
        os.fchmod(handle, mode)


def _back_up(home: Place, before: BinaryIO) -> str | None:
    """Lock the file, and make a hidden hard link to it; return its name, or None if that fails.

    With the link, `undo` is a rename, not a copy.
    """
    with suppress(OSError):  # this file system has no hard links, or no locks
        if _locked(before.fileno()):
            hidden, folder = _hidden(home), home.folder
            os.link(home.name, hidden, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            return hidden
    return None


def _hidden(home: Place) -> str:
    return f".{home.name}.{secrets.token_hex(8)}"


def _remove(name: str, home: Place) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=home.folder)


def _clear_away(home: Place) -> None:
    """Remove the temporary files of killed subscribers, which no process has locked."""
    hidden = re.compile(re.escape(f".{home.name}.") + r"[0-9a-f]{16}")
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=home.folder)
    try:
        names = os.listdir(folder)
    finally:
        os.close(folder)
    for name in filter(hidden.fullmatch, names):
        with suppress(OSError):  # the file is gone, is not a regular file, or is another user's
            handle = open_plain(name, os.O_RDONLY, home.folder)
            try:
                if _locked(handle):
                    os.unlink(name, dir_fd=home.folder)
            finally:
                os.close(handle)


def _locked(handle: int) -> bool:
    """Lock a file until it is closed or the process ends; return False if it is locked already."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
