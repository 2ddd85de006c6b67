"""A safetensors file that always holds one whole version, for readers who know nothing of the bus.

Theory of operation: a version is written beside the file, under another name, and renamed over it:
whoever opens the file finds one whole version, and an attempt that fails leaves it as it was. A
link is followed, unless another user made it: what it leads to is replaced, and the link stays. Who
may read or write the file that is replaced may do so with the new one, and nobody else; a file that
was not there before is made as any other program of this user would make it (`umask`). Another
user's file in a folder that anybody may write to is not replaced: the new file would be theirs.

Its header is not the layout of the version, but one of the same tensors in the same order that says
what readers ask for: `"format": "pt"`, without which transformers 4 reads none; and the version's
metadata beside it, but for what readers would take for the name of a tied tensor.
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

from ..bus.staged import StagedVersion
from ..codecs.apply import STEP_BYTES
from ..codecs.layout import HEADER_BYTES_MAX, PREFIX_BYTES, Layout
from ..codecs.native import crc32c
from .places import Place, check_owner, open_plain, place_of
from .target import Names, Sums, Target

FORMAT = {"format": "pt"}  # what save_pretrained says: tensors named and laid out as PyTorch's are
ACCESS_LIST = "system.posix_acl_access"  # the attribute with what goes beyond the mode, on Linux
MOUNTED = "it is mounted by itself, so no new file can take its place: mount its folder instead"
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # how a file is opened that must not be there yet
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
        untied: Write a tied tensor under each of its names, for readers that do not know ties.
            Otherwise it is written once, under the first name in the source, and the file's
            metadata has its other names, as in `safetensors.torch.save_model`.

    Raises:
        OSError: The path names something that is no file, or its folder is not writable; or a
            link on the way, or the file in a folder for all, is another user's. The text says
            which, with the errno.
    """

    __module__ = "weightbus"

    on_disk = True

    def __init__(self, path: str | Path, *, untied: bool = False) -> None:
        self._path, self._untied = Path(path), untied
        # Of the last version its layout and metadata, and the layout of its file.
        self._known: tuple[Layout, Mapping[str, str], Layout] | None = None
        self._before: BinaryIO | None = None  # what the last version has replaced
        self._kept: str | None = None  # another name of that
        self._home: Place | None = None  # where the last version is, or was to be
        self._replaced = False  # whether it is there
        try:
            with place_of(self._path) as home:
                _check_not_mounted(home.path)
                if (before := _opened(home)) is not None:
                    before.close()
                _clear_away(home)
                trial = _hidden(home)
                os.close(open_plain(trial, NEW, home.folder))
                _remove(trial, home)  # another one may just have cleared it away
        except OSError as error:
            raise self._explained(error) from error

    def summing(self, layout: Layout, names: Names, sums: Sums) -> Iterator[int]:
        """Sum what the file holds, which somebody else may have written.

        Arguments are those of `Target.summing`.
        """
        with place_of(self._path) as home:
            file = _opened(home)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(self._path))
        with file:
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

    def apply(self, staged: StagedVersion) -> None:
        """Write the version beside the file, then rename it over the file.

        Arguments are those of `Target.apply`.

        Raises:
            OSError: It could not be written; the file is as it was.
        """
        self.settle()
        try:
            home = self._home = place_of(self._path)
            self._before = _opened(home)  # its bytes stay for as long as it is open
            self._kept = None if self._before is None else _other_name(home, self._before)
            _replace(home, self._before, lambda file: self._write(file, staged))
        except OSError as error:
            raise self._explained(error) from error
        self._replaced = True

    def undo(self) -> bool:
        """Put the file back that was there before, or have none if there was none."""
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
        """Rename the file that was there before; return whether it had another name for that."""
        if self._kept is None:
            return False
        try:
            os.replace(self._kept, home.name, src_dir_fd=home.folder, dst_dir_fd=home.folder)
        except FileNotFoundError:
            return False
        return True

    def settle(self) -> None:
        """Let go of what was there before."""
        if self._kept is not None and self._home is not None:
            with suppress(OSError):  # then the next subscriber of this file clears it away
                os.unlink(self._kept, dir_fd=self._home.folder)
        if self._before is not None:
            self._before.close()
        if self._home is not None:
            self._home.close()
        self._before, self._kept, self._home, self._replaced = None, None, None, False

    def _write(self, file: BinaryIO, staged: StagedVersion) -> None:
        layout = staged.layout
        known, texts = self._known, staged.metadata
        if known is None or known[0] is not layout or known[1] != texts:
            there = layout.filed({**texts, **FORMAT}, untied=self._untied)
            known = self._known = layout, texts, there
        there = known[2]
        file.write(there.header)
        if there.nbytes == layout.nbytes:
            file.write(staged.data.data)
            return
        for spec in map(layout.by_name, (each.name for each in there.tensors)):
            file.write(staged.data[spec.begin : spec.end].data)

    def _explained(self, error: OSError) -> OSError:
        """Name the file that is meant, not the one that is written beside it; what to do, too."""
        folder, text = Path(os.path.realpath(self._path)).parent, error.strerror
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir():
            text = f"there is no folder {folder} to write it into; make it first"
        return error if text is None else OSError(error.errno, text, str(self._path))


def _check_not_mounted(path: Path) -> None:
    """Check that another file may take the place of a path.

    Raises:
        OSError: The kernel does not let it: something is mounted there.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # not Linux
        return
    escaped = re.sub(rb"[ \t\n\\]", lambda c: rb"\%03o" % ord(c[0]), os.fsencode(path))
    if any(mount.split(b" ")[4] == escaped for mount in mounts):
        raise OSError(errno.EBUSY, MOUNTED, str(path))


def _opened(home: Place) -> BinaryIO | None:
    """Open what is to be replaced; None if nothing is there yet.

    Raises:
        OSError: It is no file that could be replaced, or may not be read, so not put back either;
            or it is another user's, in a folder that anybody may write to.
    """
    try:
        found = os.stat(home.name, dir_fd=home.folder, follow_symlinks=False)
        kind = stat.S_IFMT(found.st_mode)
        if kind in KINDS:
            number, what = KINDS[kind]
            raise OSError(number, f"it is {what}; give the file to write", str(home.path))
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
    temporary, handle = _temporary(home, 0o666 if before is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            if before is not None:
                _permit_alike(handle, before.fileno())
            write(file)
            file.flush()
            os.fsync(handle)
            os.replace(temporary, home.name, src_dir_fd=home.folder, dst_dir_fd=home.folder)
    except BaseException:
        with suppress(OSError):  # its folder is gone, for instance
            os.unlink(temporary, dir_fd=home.folder)
        raise


def _temporary(home: Place, mode: int) -> tuple[str, int]:
    """Make a file beside another, and hold its lock: somebody is at it."""
    while True:
        hidden = _hidden(home)
        handle = open_plain(hidden, NEW, home.folder, mode)
        try:
            ours = _locked(handle) and os.fstat(handle).st_nlink > 0
        except OSError:  # there are no locks here, so nobody clears anything away either
            ours = True
        if ours:
            return hidden, handle
        os.close(handle)  # it was cleared away before it had its lock


def _permit_alike(handle: int, before: int) -> None:
    """Let those use a new file, as yet its owner's alone, who may use the old one; nobody else."""
    old, new = os.fstat(before), os.fstat(handle)
    mode = stat.S_IMODE(old.st_mode)
    try:
        if old.st_uid != new.st_uid:
            with suppress(OSError):  # only root may give files away
                os.fchown(handle, old.st_uid, -1)
        if old.st_gid != new.st_gid:
            os.fchown(handle, -1, old.st_gid)
    except OSError:  # another group would have its rights: it has those of others
        mode = (mode & ~0o070) | (mode & 0o007) << 3
    with suppress(OSError):  # there are none here
        try:
            os.setxattr(handle, ACCESS_LIST, os.getxattr(before, ACCESS_LIST))
        except OSError as error:
            if error.errno == errno.ENODATA:  # nor shall there be what the folder gives
                os.removexattr(handle, ACCESS_LIST)
    with suppress(OSError):  # whoever has mounted this decides, or it stays its owner's alone
        os.fchmod(handle, mode)


def _other_name(home: Place, before: BinaryIO) -> str | None:
    """Give a file another name, under its lock, to be put back at once: a copy takes long."""
    with suppress(OSError):  # there are no links here, or no locks, or others have it
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
    """Remove what killed subscribers have left of this file: nobody holds its lock."""
    left = re.compile(re.escape(f".{home.name}.") + r"[0-9a-f]{16}")
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=home.folder)
    try:
        names = os.listdir(folder)
    finally:
        os.close(folder)
    for name in filter(left.fullmatch, names):
        with suppress(OSError):  # it is gone, or no file, or another user's
            handle = open_plain(name, os.O_RDONLY, home.folder)
            try:
                if _locked(handle):
                    os.unlink(name, dir_fd=home.folder)
            finally:
                os.close(handle)


def _locked(handle: int) -> bool:
    """Take the lock of a file, which the kernel ends with its holder; return whether it is ours."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
