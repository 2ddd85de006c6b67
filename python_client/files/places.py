"""Opens files safely in folders that other users of the host may write to, too.

Theory of operation: a path is resolved once, name by name, and its folder is held open. All later
operations are relative to that descriptor, so they stay in that folder even if the path changes. A
link is followed only if this user or root made it, since another user's link could lead to any
file. Files are opened without blocking, since opening a FIFO would wait for its other end.
"""

import errno
import os
import pwd
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LINKS_MAX = 40  # links in one path, the kernel's own limit
EXAMINE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC  # flags to examine a name without opening it
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # flags that are added to the access mode
TRIES = 10  # attempts to open a file that other processes create and remove


class Place:
    """A name in a folder that is held open.

    Attributes:
        folder: The folder's descriptor, for `dir_fd`.
        name: The name in that folder, which was not the name of a link.
        path: The path of that name, for error texts.
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
        """Close the folder; idempotent."""
        folder, self.folder = self.folder, -1
        if folder >= 0:
            close(folder)


def place_of(path: Path) -> Place:
    """Return the open folder and the name to which a path leads; the file need not exist.

    Raises:
        OSError: A folder does not exist, or a link in the path belongs to another user. The text
            names the user.
    """
    parts = [*reversed(path.absolute().parts[1:])]  # the names that are not resolved yet
    folder, at, links, name = os.open("/", FOLDER), Path("/"), 0, "."
    try:
        while parts:
            name = parts.pop()
            target = _target(name, folder, at)
            if target:
                links += 1
                _check_links(links, path)
                parts.extend(reversed(Path(target).parts))
            elif parts or name in ("..", "/"):
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
    """Return where a link leads, as a path; empty if `name` is not a link.

    Raises:
        PermissionError: Another user made the link.
    """
    try:
        link = os.open(name, EXAMINE, dir_fd=folder)
    except FileNotFoundError:
        return ""
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            return ""
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(
                errno.EPERM,
                f"{at / name} is a link that {user(status.st_uid)} made, and is not followed: "
                "remove it, or give a path without another user's links",
                str(at / name),
            )
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def open_plain(name: str, flags: int, folder: int, mode: int = 0o600) -> int:
    """Open a regular file in a folder, without blocking; return its descriptor.

    Raises:
        OSError: The name is a link's, or not a regular file's.
    """
    handle = os.open(name, flags | PLAIN, mode, dir_fd=folder)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is not a regular file: remove it", name)


def open_lock(name: str, folder: int, mode: int = 0o600) -> int:
    """Open a lock file in a folder and return its descriptor; make the file if it does not exist.

    Raises:
        PermissionError: Another user made the file, and could hold its lock.
        OSError: The file cannot be opened.
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
            os.fchmod(handle, mode)  # regardless of the umask
            return handle
    raise FileExistsError(errno.EEXIST, "other processes make and remove it all the time", name)


def check_owner(handle: int, name: str, folder: int, open_to_others: int) -> None:
    """Check that a file does not belong to another user, if its folder is open to other users.

    Args:
        handle, name: The file's descriptor and name.
        folder: The folder's descriptor.
        open_to_others: Mode bits; the check applies only if the folder has one of them.

    Raises:
        PermissionError: The file belongs to a user who is not this user, root or the folder's
            owner.
    """
    file, place = os.fstat(handle), os.fstat(folder)
    if place.st_mode & open_to_others and file.st_uid not in (os.geteuid(), 0, place.st_uid):
        raise PermissionError(
            errno.EPERM,
            f"{name} belongs to {user(file.st_uid)}, in a folder that other users may write to: "
            "remove it, or use a folder of your own",
            name,
        )


def user(uid: int) -> str:
    """Return `user NAME` for a user id of this host, or `user UID` if it has no name."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
