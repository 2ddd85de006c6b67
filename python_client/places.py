"""Files in folders that other users of the host may write to as well.

Theory of operation: a path is followed once, name by name, and its folder is held open. All else
is done relative to that descriptor, so it stays in that folder, whatever a path leads to meanwhile.
A link is followed only if this user or root made it, since another user's link leads to a file of
that user's choice. Nothing is opened that would wait, such as a FIFO for its other end.
"""

import errno
import os
import pwd
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LINKS_MAX = 40  # in one path, as the kernel has it
LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # to open a file with, beside what for
TRIES = 10  # to open a file that others make and remove at the same time


class Place:
    """A name in a folder that is held open.

    Attributes:
        folder: The folder's descriptor, for `dir_fd`.
        name: The name in it, which is no link.
        path: Both, for words.
    """

    def __init__(self, folder: int, name: str, path: Path) -> None:
        self.folder, self.name, self.path = folder, name, path

    def __enter__(self) -> "Place":
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Let go of the folder; calling it twice is fine."""
        folder, self.folder = self.folder, -1
        if folder >= 0:
            close(folder)


def place_of(path: Path) -> Place:
    """Find the folder and the name that a path leads to; there need be no file of that name.

    Raises:
        OSError: A folder is not there, or a link on the way is another user's; the text says whose.
    """
    todo = [*reversed(path.absolute().parts[1:])]
    folder, at, links, name = os.open("/", FOLDER), Path("/"), 0, "."
    try:
        while todo:
            name = todo.pop()
            target = _target(name, folder, at)
            if target:
                links += 1
                _check_links(links, path)
                todo.extend(reversed(Path(target).parts))
            elif todo or name in ("..", "/"):
                before, folder = folder, os.open(name, FOLDER, dir_fd=folder)
                os.close(before)
                at = Path("/") if name == "/" else at.parent if name == ".." else at / name
                name = "."
        return Place(folder, name, at / name)
    except BaseException:
        os.close(folder)
        raise


def _check_links(links: int, path: Path) -> None:
    if links > LINKS_MAX:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _target(name: str, folder: int, at: Path) -> str:
    """Return where a link leads; empty if it is none.

    Raises:
        PermissionError: Another user made the link.
    """
    try:
        found = os.open(name, LOOK, dir_fd=folder)
    except FileNotFoundError:
        return ""
    try:
        about = os.fstat(found)
        if not stat.S_ISLNK(about.st_mode):
            return ""
        if about.st_uid not in (os.geteuid(), 0):
            raise PermissionError(
                errno.EPERM,
                f"{at / name} is a link that {user(about.st_uid)} made, and is not followed: "
                "remove it, or give a path without another user's links",
                str(at / name),
            )
        return os.readlink("", dir_fd=found)
    finally:
        os.close(found)


def open_plain(name: str, flags: int, folder: int, mode: int = 0o600) -> int:
    """Open a file of a folder, without waiting and without following a link.

    Raises:
        OSError: It is a link, or no file.
    """
    handle = os.open(name, flags | PLAIN, mode, dir_fd=folder)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no file: remove it", name)


def open_lock(name: str, folder: int, mode: int = 0o600) -> int:
    """Open a file of a folder for its lock; make it if it is not there.

    Raises:
        PermissionError: Another user made it, and could keep it locked.
        OSError: It cannot be opened.
    """
    for _ in range(TRIES):
        with suppress(FileNotFoundError):
            handle = open_plain(name, os.O_RDWR, folder)
            try:
                check_owner(handle, name, folder, stat.S_ISVTX | stat.S_IWOTH)
            except BaseException:
                os.close(handle)
                raise
            return handle
        with suppress(FileExistsError):
            handle = open_plain(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, folder, mode)
            os.fchmod(handle, mode)  # whatever the umask is
            return handle
    raise FileExistsError(errno.EEXIST, "it is made and removed again and again", name)


def check_owner(handle: int, name: str, folder: int, open_to_others: int) -> None:
    """Check that no other user has put a file into a folder where any user can.

    Args:
        handle, name: The file.
        folder: The folder.
        open_to_others: The bits of its mode of which one says that any user can.

    Raises:
        PermissionError: Somebody has, who is neither root nor the folder's owner.
    """
    about, where = os.fstat(handle), os.fstat(folder)
    if where.st_mode & open_to_others and about.st_uid not in (os.geteuid(), 0, where.st_uid):
        raise PermissionError(
            errno.EPERM,
            f"{name} belongs to {user(about.st_uid)}, in a folder that other users may write to: "
            "remove it, or use a folder of your own",
            name,
        )


def user(number: int) -> str:
    """Return what a user of this host is called."""
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
