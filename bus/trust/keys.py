"""Files with keys: a publisher's folder, and the one file that a worker needs.

    DIR/publisher.json        the publisher's key pair
    DIR/allowed/NAME.json     an allowed public key, with its name and role
    DIR/workers/NAME.json     a worker's key pair, its name, and the publisher's public key

`allowed` has no secrets. The files in `workers` are copied to the workers' hosts, and can then be
removed. The publisher rereads `allowed` regularly: a new file allows a key, and the removal of a
file revokes a key. Each file is one small JSON object, so that every language can read it.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, TypeVar

import msgspec

from ..errors import KeysError
from ..limits import KEYS_MAX
from ..protocol_limits import TEXT_MAX
from ..spare import SCARCE
from . import curve
from .grants import Grant, Role

PUBLISHER, ALLOWED, WORKERS, SUFFIX = "publisher.json", "allowed", "workers", ".json"
STAR: Final = "+"  # in file names, for the `*` of a name; no name has a `+`

Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")]
Form = Annotated[str, msgspec.Meta(pattern=r"^(?=.{1,128}\Z)[A-Za-z0-9._-]*\*?[A-Za-z0-9._-]*\Z")]
_T = TypeVar("_T", bound=msgspec.Struct)


class UnreadableError(KeysError):
    """A file exists but cannot be read now, so its contents are unknown."""


class ScarceError(KeysError):
    """No file can be read, since the process has no free file descriptor."""


class _PublisherFile(msgspec.Struct):
    public: Key
    secret: Key

    def __post_init__(self) -> None:
        _check_keys(self.public, self.secret)


class _AllowedFile(msgspec.Struct):
    name: Form
    public: Key
    role: Role = "worker"

    def __post_init__(self) -> None:
        _check_keys(self.public)


class _WorkerFile(msgspec.Struct):
    name: Form
    public: Key
    secret: Key
    publisher: Key

    def __post_init__(self) -> None:
        _check_keys(self.public, self.secret, self.publisher)


Files = Mapping[Path, _AllowedFile]


@dataclass(frozen=True, slots=True)
class PublisherKeys:
    """The keys of a publisher.

    Attributes:
        secret: The publisher's secret key, 40 characters of Z85.
        grants: The permissions of each allowed key, by public key.
        folder: The folder that the publisher rereads; None: the grants never change.
        known: The contents of each file in `allowed` when it was read last.
    """

    __module__ = "weightbus"

    secret: str = field(repr=False)
    grants: Mapping[str, Grant]
    folder: Path | None = None
    known: Files = field(default_factory=dict[Path, _AllowedFile], repr=False, compare=False)

    @classmethod
    def read(cls, path: str | Path) -> "PublisherKeys":
        """Read a folder made by `weightbus keygen`.

        Args:
            path: The folder.

        Raises:
            KeysError: There is no such folder, or a file in it is missing or invalid.
        """
        folder = _path(path)
        if not folder.is_dir():
            raise KeysError(
                f"{folder} is not a folder: a publisher's keys= is one that holds {PUBLISHER} and "
                f"{ALLOWED}/; make it with: weightbus keygen {folder} NAME..."
            )
        own = _read(folder / PUBLISHER, _PublisherFile, secret=True)
        _check_pair(own.public, own.secret, folder / PUBLISHER)
        allowed = Allowed(folder)
        return cls(own.secret, allowed.read(), folder, allowed.known)

    def allowed(self, complain: Callable[[KeysError], None]) -> "Allowed | None":
        """Return an object that rereads the folder; None if the keys do not come from a folder.

        Args:
            complain: Called with an error for each file that is invalid or cannot be read.
        """
        return None if self.folder is None else Allowed(self.folder, complain, self.known)


@dataclass(frozen=True, slots=True)
class WorkerKeys:
    """The keys of a worker.

    Attributes:
        name: The worker's name; a `*` in the name stands for any characters.
        public, secret: The worker's key pair, 40 characters of Z85 each.
        publisher: The public key of the only publisher that the worker connects to.
    """

    __module__ = "weightbus"

    name: str
    public: str
    secret: str = field(repr=False)
    publisher: str

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> "WorkerKeys":
        """Read one worker's file.

        Args:
            path: The file, or a folder made by `weightbus keygen` that has it.
            name: The worker's name, for a folder with several workers.

        Raises:
            KeysError: There is no such file, or the file is invalid.
        """
        file = _path(path)
        if file.is_dir():
            file = _file_of(file / WORKERS, name)
        own = _read(file, _WorkerFile, secret=True)
        _check_pair(own.public, own.secret, file)
        return cls(own.name, own.public, own.secret, own.publisher)


class Allowed:
    """Reads the allowed keys in a publisher's folder, again at each call of `read`.

    If one file is invalid, the removal of another file still revokes that file's key.

    Args:
        folder: The publisher's folder.
        complain: Called with an error for each invalid file, which then allows no key, and for each
            file that cannot be read, whose last contents stay valid. Also called if there are more
            than `KEYS_MAX` files, of which only files that were read before count.
        known: The contents of the files when they were read earlier.

    Attributes:
        known: The contents of the files when they were read last, for use if a file cannot be read.
        whole: Whether the last call could read all files. If not, call `read` again.
    """

    def __init__(
        self,
        folder: Path,
        complain: Callable[[KeysError], None] | None = None,
        known: Files = MappingProxyType({}),
    ) -> None:
        self._folder, self._complain = folder / ALLOWED, complain
        self.known, self.whole = known, True

    def read(self) -> Mapping[str, Grant]:
        """Read the folder; return the grants by public key.

        Raises:
            ScarceError: The process has no free descriptor.
            KeysError: The folder cannot be read, or a file is invalid and there is no `complain`.
        """
        found, known, self.whole = dict[str, Grant](), dict[Path, _AllowedFile](), True
        files = _files(self._folder)
        if len(files) > KEYS_MAX:
            self._report(_too_many(self._folder, files))
            files = [file for file in files if file in self.known]
        for file in files:
            try:
                known[file] = self._file(file)
                _allow(file, known[file], found)
            except ScarceError:
                raise
            except KeysError as error:
                self._report(error)
        self.known = MappingProxyType(known)
        return MappingProxyType(found)

    def remaining(self) -> Mapping[str, Grant]:
        """Return the grants of the last read whose files still exist; this needs no descriptor.

        Raises:
            KeysError: The folder itself cannot be found.
        """
        found = dict[str, Grant]()
        try:
            os.stat(self._folder)  # else each file would seem to be removed
        except OSError as error:
            raise _unreadable(self._folder, error) from None
        for file, allowed in self.known.items():
            if _may_exist(file):
                found.setdefault(allowed.public, Grant(allowed.name, allowed.role))
        return MappingProxyType(found)

    def _report(self, error: KeysError) -> None:
        if self._complain is None:
            raise error
        self._complain(error)

    def _file(self, file: Path) -> _AllowedFile:
        # Return the contents of a file; if it cannot be read now, its last contents.
        try:
            return _read(file, _AllowedFile)
        except UnreadableError as error:
            self.whole = False
            if file not in self.known:
                raise
            self._report(
                UnreadableError(
                    f"{error}; until it can be, it allows what it did: remove it to end that"
                )
            )
            return self.known[file]

    def stamp(self) -> tuple[object, ...]:
        """Return a value that differs after a file is added, changed or removed."""
        files = _files(self._folder)
        looked = files if len(files) <= KEYS_MAX else [f for f in files if f in self.known]
        rows = ((file.name, _stat(file)) for file in looked)
        return len(files), *(
            (name, seen.st_ino, seen.st_size, seen.st_mtime_ns)
            for name, seen in rows
            if seen is not None
        )


def _allow(file: Path, allowed: _AllowedFile, found: dict[str, Grant]) -> None:
    if allowed.public in found:
        raise KeysError(f"{file}: another file there has the same key; remove one of the two")
    found[allowed.public] = Grant(allowed.name, allowed.role)


def generate(folder: Path, names: Mapping[str, Role]) -> list[Path]:
    """Make files with a key pair for each name in `names`, and for the publisher if it has none.

    Returns:
        The files that were written. No existing file is overwritten.

    Raises:
        KeysError: A worker's file exists already, or a name is not valid.
    """
    taken = [
        file
        for name in names
        for file in (folder / ALLOWED / file_name(name), folder / WORKERS / file_name(name))
        if file.exists()
    ]
    if taken:
        raise KeysError(f"{taken[0]} exists; remove it first, if its worker is to get a new pair")
    for each in (folder, folder / ALLOWED, folder / WORKERS):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []
    if (folder / PUBLISHER).exists():
        publisher = curve.public_of(PublisherKeys.read(folder).secret)
    else:
        publisher, secret = curve.keypair()
        written.append(_write(folder / PUBLISHER, _PublisherFile(publisher, secret)))
    for name, role in names.items():
        public, secret = curve.keypair()
        made = _WorkerFile(name, public, secret, publisher)
        written.append(_write(folder / WORKERS / file_name(name), made))
        written.append(_write(folder / ALLOWED / file_name(name), _AllowedFile(name, public, role)))
    return written


def file_name(name: str) -> str:
    """Return the name of the file for a worker.

    Raises:
        KeysError: The worker's name is not valid.
    """
    try:
        msgspec.convert(name, Form)
    except msgspec.ValidationError:
        raise KeysError(
            f"{name!r}: a name is 1 to 128 of the characters A-Z a-z 0-9 . _ - and at most one *, "
            "which stands for any characters"
        ) from None
    return name.replace("*", STAR) + SUFFIX


def _file_of(folder: Path, name: str | None) -> Path:
    """Return the file in a folder for the worker `name`; without a name, the only file."""
    found = _files(folder)
    if len(found) > KEYS_MAX:
        raise _too_many(folder, found)
    files = {file: Grant(file.stem.replace(STAR, "*")) for file in found}
    fit = [file for file, of in files.items() if name is None or of.fits(name)]
    exact = [file for file, of in files.items() if of.name == name]
    if len(exact or fit) != 1:
        who, names = name or "a worker without a name", ", ".join(file.name for file in files)
        raise KeysError(
            f"{folder} has {len(fit)} files for {who} ({names or 'it is empty'}): give keys= one "
            "file, or name= of the worker that it is for; weightbus keygen makes more"
        )
    return (exact or fit)[0]


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.suffix == SUFFIX)
    except OSError as error:
        raise _unreadable(folder, error) from None


def _unreadable(path: Path, error: OSError) -> KeysError:
    kind = ScarceError if error.errno in SCARCE else KeysError
    return kind(f"{path} cannot be read: {error.strerror}")


def _too_many(folder: Path, files: list[Path]) -> KeysError:
    return KeysError(f"{folder} has {len(files)} keys; at most {KEYS_MAX} are allowed")


def _stat(file: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):  # the file was removed meanwhile: the next call omits it
        return file.stat()
    return None


def _may_exist(file: Path) -> bool:
    """Return False if a file certainly does not exist; True otherwise."""
    try:
        os.stat(file)
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _path(given: str | Path) -> Path:
    if str(given).lstrip().startswith("{"):  # the error must not quote the text, which has a secret
        raise KeysError(
            "keys= is not a path, but JSON (not shown): give the path of a file with that"
        )
    return Path(given)


def _nonblocking_opener(file: str, flags: int) -> int:
    """Open a file in non-blocking mode, since opening a named pipe would block otherwise."""
    return os.open(file, flags | os.O_NONBLOCK)


def _read(file: Path, kind: type[_T], *, secret: bool = False) -> _T:
    # Return the parsed contents of a file; a secret file must not be readable by everybody.
    try:
        with open(file, "rb", opener=None if secret else _nonblocking_opener) as opened:
            if secret and os.fstat(opened.fileno()).st_mode & stat.S_IRWXO:
                raise KeysError(f"{file} is open to every user of this host: chmod 600 {file}")
            return msgspec.json.decode(opened.read(TEXT_MAX) or b"", type=kind)
    except OSError as error:
        if error.errno in SCARCE:
            raise _unreadable(file, error) from None
        gone = isinstance(error, FileNotFoundError)
        wrong: type[KeysError] = KeysError if gone else UnreadableError
        raise wrong(f"{file} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeysError(f"{file} is not a key file: {error}; see weightbus keygen --help") from None


def _check_keys(*keys: str) -> None:
    """Check that no five characters of a key exceed 32 bits, which a pattern cannot check."""
    if not all(map(curve.is_key, keys)):
        raise ValueError("a key is 40 characters of Z85, each five of which stand for 32 bits")


def _check_pair(public: str, secret: str, file: Path) -> None:
    if curve.public_of(secret) != public:
        raise KeysError(f"{file}: public and secret key do not belong together; make a new pair")


def _write(file: Path, what: msgspec.Struct) -> Path:
    """Write a file atomically, readable only by its owner; raise an error if the file exists."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(msgspec.json.format(msgspec.json.encode(what)) + b"\n")
    try:
        os.link(part, file)
    finally:
        part.unlink()
    return file
