"""Reads and writes key files: a publisher's folder, a relay's folder, and a worker's one file.

    DIR/publisher.json            the publisher's key pair
    DIR/allowed/NAME.json         an allowed public key, with its name and role
    DIR/workers/NAME.json         a worker's key pair, its name, and the publisher's public key
    DIR/workers/NAME@RELAY.json   the same for a worker of a relay, with the relay's public key
    DIR/relays/RELAY.json         the public key that a relay has as a publisher
    DIR/relays/RELAY/             the relay's own folder:
        publisher.json            the relay's key pair as a publisher
        upstream.json             its key pair as a worker, and the key of the publisher above
        upstream-2.json ...       the same for its second upstream address, and so on
        allowed/                  a link to DIR/allowed

`allowed` has no secrets. The files in `workers` and the folders in `relays` are copied to the hosts
of workers and relays, and can then be removed. Publishers and relays reread `allowed` regularly: a
new file allows a key, and the removal of a file revokes a key. Each file is one small JSON object,
so that every language can read it.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
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
RELAYS, UPSTREAM = "relays", "upstream.json"
STAR: Final = "+"  # in file names, for the `*` of a name; no name has a `+`
AT: Final = "@"  # in file names, between a worker and its relay; no name has an `@`
ORIGIN: Final = "publisher"  # given in place of a relay's name: the publisher itself

Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")]
NamePattern = Annotated[
    str, msgspec.Meta(pattern=r"^(?=.{1,128}\Z)[A-Za-z0-9._-]*\*?[A-Za-z0-9._-]*\Z")
]
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
    name: NamePattern
    public: Key
    role: Role = "worker"

    def __post_init__(self) -> None:
        _check_keys(self.public)


class _WorkerFile(msgspec.Struct):
    name: NamePattern
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
            complain: Called with the error of each file that is invalid or cannot be read.
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
            path: The file, or a folder made by `weightbus keygen` that contains the file.
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


@dataclass(frozen=True, slots=True)
class RelayKeys:
    """The keys of a relay. A side without keys must only have peers on the relay's host.

    Attributes:
        upstream: The relay's keys as a worker of the publishers above: one for each upstream
            address, or one for all; empty: no keys.
        below: The relay's keys as a publisher, and the permissions of its workers.
    """

    __module__ = "weightbus"

    upstream: tuple[WorkerKeys, ...]
    below: PublisherKeys | None

    @property
    def pinned(self) -> WorkerKeys | tuple[WorkerKeys, ...] | None:
        """The upstream keys in the form that sockets expect: one for all addresses, or a tuple."""
        return self.upstream if len(self.upstream) > 1 else next(iter(self.upstream), None)

    @classmethod
    def read(cls, path: str | Path, name: str | None = None) -> "RelayKeys":
        """Read a relay's folder.

        Args:
            path: The folder, or the folder of all keys, made by `weightbus keygen`.
            name: The relay's name, for a folder with several relays.

        Raises:
            KeysError: There is no such folder, or a file in it is missing or invalid.
        """
        folder = _path(path)
        if (folder / RELAYS).is_dir():
            folder = _file_of(folder / RELAYS, name).with_suffix("")
        files = takewhile(Path.exists, (folder / _upstream_file(at) for at in count()))
        upstream = tuple(WorkerKeys.read(file) for file in files)
        has_own = (folder / PUBLISHER).exists()
        if not upstream and not has_own:
            raise KeysError(
                f"{folder} is no relay's folder: a relay's keys= is one that holds {UPSTREAM}, "
                f"{PUBLISHER} and {ALLOWED}/; make it with: weightbus keygen DIR --relay NAME"
            )
        if has_own and not (folder / ALLOWED).is_dir():
            raise KeysError(
                f"{folder / ALLOWED} is missing: copy {ALLOWED}/ of the publisher's keys there, "
                "or mount it; without it the relay does not know its workers"
            )
        return cls(upstream, PublisherKeys.read(folder) if has_own else None)


class Allowed:
    """Reads the allowed keys in a publisher's folder; each call of `read` reads the folder anew.

    An invalid file does not prevent the removal of another file from revoking a key.

    Args:
        folder: The publisher's folder.
        complain: Called with an error for each invalid file, which then allows no key. Called for
            each file that cannot be read, whose last contents stay valid. Called if there are more
            than `KEYS_MAX` files; then only the files that were read before stay valid.
        known: The contents of the files when they were last read.

    Attributes:
        known: The contents of the files when they were last read, for use if a file cannot be read.
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
        """Return the grants of the last `read` whose files still exist, without a descriptor.

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
                    f"{error}; until it can be, its key stays allowed: remove the file to revoke it"
                )
            )
            return self.known[file]

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes when a file is added, changed or removed."""
        files = _files(self._folder)
        looked = files if len(files) <= KEYS_MAX else [f for f in files if f in self.known]
        rows = ((file.name, _stat(file)) for file in looked)
        return len(files), *(
            (name, seen.st_ino, seen.st_size, seen.st_mtime_ns)
            for name, seen in rows
            if seen is not None
        )


def _allow(file: Path, allowed: _AllowedFile, found: dict[str, Grant]) -> None:
    """Add the grant of a file to `found`; raise KeysError if another file has the same key."""
    if allowed.public in found:
        raise KeysError(f"{file}: another file there has the same key; remove one of the two")
    found[allowed.public] = Grant(allowed.name, allowed.role)


def generate(
    folder: Path,
    names: Mapping[str, Role],
    *,
    at: Iterable[str] = (),
    above: Iterable[str] = (),
) -> list[Path]:
    """Make files with a key pair for each name in `names`, and for the publisher if it has none.

    Args:
        folder: The folder of all keys.
        names: The role of each name.
        at: The relays to which the workers and observers connect (`ORIGIN`: the publisher itself).
            Each worker gets one file per relay. Empty: only the publisher.
        above: The relays to which the relays connect, in order of preference (`ORIGIN`: the
            publisher itself). Each relay gets one file per relay above. Empty: only the publisher.

    Returns:
        The files that were written. No existing file is overwritten.

    Raises:
        KeysError: A file exists already, a name is not valid, or there is no such relay.
    """
    relays = [name for name, role in names.items() if role == "relay"]
    others: dict[str, Role] = {name: role for name, role in names.items() if role != "relay"}
    at, above = ([*dict.fromkeys(where)] or [ORIGIN] for where in (at, above))
    _check_untaken(folder, relays, others, at)
    for relay in (*above, *(each for each in at if each not in relays)):
        if relay != ORIGIN and not (folder / RELAYS / file_name(relay)).exists():
            raise KeysError(
                f"{folder / RELAYS} has no relay {relay!r}: make it first, with: weightbus keygen "
                f"{folder} --relay {relay}"
            )
    homes = [folder / RELAYS] if relays else []
    for each in (folder, folder / ALLOWED, folder / WORKERS, *homes):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []
    if (folder / PUBLISHER).exists():
        publisher = curve.public_of(PublisherKeys.read(folder).secret)
    else:
        publisher, secret = curve.keypair()
        written.append(_write(folder / PUBLISHER, _PublisherFile(publisher, secret)))

    def pinned(relay: str) -> str:
        file = folder / RELAYS / file_name(relay)
        return publisher if relay == ORIGIN else _read(file, _AllowedFile).public

    for name in relays:
        (public, secret), (own, own_secret) = curve.keypair(), curve.keypair()
        home = folder / RELAYS / file_name(name).removesuffix(SUFFIX)
        home.mkdir(mode=0o700)
        written.append(_write(home / PUBLISHER, _PublisherFile(own, own_secret)))
        for index, relay in enumerate(above):
            upstream = _WorkerFile(name, public, secret, pinned(relay))
            written.append(_write(home / _upstream_file(index), upstream))
        (home / ALLOWED).symlink_to(Path("..", "..", ALLOWED), target_is_directory=True)
        for where, key in ((RELAYS, own), (ALLOWED, public)):
            made = _AllowedFile(name, key, "relay")
            written.append(_write(folder / where / file_name(name), made))
    for name, role in others.items():
        public, secret = curve.keypair()
        for relay in at:
            of_worker = _WorkerFile(name, public, secret, pinned(relay))
            written.append(_write(folder / WORKERS / _file_at(name, relay), of_worker))
        written.append(_write(folder / ALLOWED / file_name(name), _AllowedFile(name, public, role)))
    return written


def _check_untaken(
    folder: Path, relays: Iterable[str], others: Iterable[str], at: Iterable[str]
) -> None:
    """Check that no file exists that `generate` is about to write."""
    files = [folder / WORKERS / _file_at(name, relay) for name in others for relay in at]
    files += [folder / ALLOWED / file_name(name) for name in (*relays, *others)]
    for name in relays:
        if name == ORIGIN:
            raise KeysError(f"a relay cannot be named {ORIGIN!r}, which stands for the publisher")
        file = folder / RELAYS / file_name(name)
        files += [file, file.with_suffix("")]
    taken = next(filter(Path.exists, files), None)
    if taken is not None:
        raise KeysError(f"{taken} exists; remove it first, if its owner is to get a new pair")


def _upstream_file(at: int) -> str:
    """Return the name of a relay's file for the upstream address with this index."""
    return f"{Path(UPSTREAM).stem}-{at + 1}{SUFFIX}" if at else UPSTREAM


def _file_at(name: str, relay: str) -> str:
    """Return the name of a worker's file for its connection to this relay, or to `ORIGIN`."""
    of_worker, of_relay = file_name(name), file_name(relay)
    return of_worker if relay == ORIGIN else of_worker.removesuffix(SUFFIX) + AT + of_relay


def file_name(name: str) -> str:
    """Return the name of the file for a worker.

    Raises:
        KeysError: The worker's name is not valid.
    """
    try:
        msgspec.convert(name, NamePattern)
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
    exact = [file for file, of in files.items() if of.pattern == name]
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
    """Raise ValueError if a group of five characters exceeds 32 bits; `Key` cannot check this."""
    if not all(map(curve.is_key, keys)):
        raise ValueError("five characters of a key stand for more than 32 bits: copy it again")


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
