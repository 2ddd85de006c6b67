"""Other users of the host: they read no weights, hold nothing up, and lead no file elsewhere."""

import fcntl
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

import weightbus
from weightbus.bus.net import listening
from weightbus.bus.net.listening import Listener
from weightbus.bus.staged import StagedVersion
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.files.file_target import FileTarget
from weightbus.python_client.files.places import place_of
from weightbus.python_client.files.state_folder import LOCK, TABLE, StateFolder, StateFolderError
from weightbus.python_client.serving.served_target import _locked
from weightbus.tests.state.test_state_folder import stored_of, write

OTHER = 12345  # another user, and group
LEFT = ".file.0123456789abcdef"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act for another user")


@pytest.fixture(name="shared")
def _shared(tmp_path: Path) -> Path:
    """A folder like /tmp."""
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o1777)
    for each in (tmp_path, *tmp_path.parents):  # which pytest has closed to others
        if each.stat().st_uid == os.geteuid() and each != Path("/"):
            each.chmod(each.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    return folder


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def of_another(path: Path) -> Path:
    os.lchown(path, OTHER, OTHER)
    return path


@contextmanager
def another_locks(path: Path) -> Iterator[bool]:
    """Have another user lock a file or a folder; yield whether that worked."""
    code = (
        "import fcntl, os, sys\n"
        f"os.setgroups([]), os.setgid({OTHER}), os.setuid({OTHER})\n"
        "try: fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError as error: print(error.errno, flush=True)\n"
        "else: print(0, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-S", "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        yield other.stdout.readline() == b"0\n"


def staged() -> StagedVersion:
    state = state_of({"w": np.arange(5.0)})
    layout = state.layout()
    data = np.empty(layout.nbytes, np.uint8)
    write_into(state, layout, data)
    return StagedVersion("m", (1, 1), layout, data, "")


# State folders.


def test_a_state_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with closing(StateFolder(path := tmp_path / "parent" / "state")) as folder:
        write(folder, 1)
        assert mode(path) == 0o700
        found = {each.name: mode(each) for each in path.iterdir()}
        assert found == dict.fromkeys((LOCK, TABLE, stored_of(1).file), 0o600)


def test_the_group_of_a_state_folder_has_the_folders_rights(tmp_path: Path) -> None:
    (path := tmp_path / "state").mkdir()
    for folders, files, locks in ((0o2750, 0o640, 0o600), (0o2770, 0o660, 0o660)):
        path.chmod(folders)
        with closing(StateFolder(path)) as folder:
            write(folder, 1)
            assert mode(path / TABLE) == mode(path / stored_of(1).file) == files
            (path / LOCK).unlink()
        with closing(StateFolder(path)):
            assert mode(path / LOCK) == locks, "who may read a lock's file may hold it"


def test_what_an_earlier_version_wrote_is_closed_to_others_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(StateFolder(path := tmp_path / "state")) as folder:
        write(folder, 1)
    path.chmod(0o755)
    (mine := path / "README").write_text("mine")
    mine.chmod(0o644)
    for each in path.iterdir():
        each.chmod(0o644)
    with closing(StateFolder(path)):
        found = {each.name: mode(each) for each in path.iterdir()}
        assert found == {LOCK: 0o600, TABLE: 0o600, stored_of(1).file: 0o600, "README": 0o644}
    (record,) = caplog.records
    assert "3 files" in record.getMessage()
    assert mode(path) == 0o755, "the folder may be the user's own"
    caplog.clear()
    StateFolder(path).close()
    assert not caplog.records


@as_root
def test_no_other_user_can_hold_the_lock_of_a_state_folder(shared: Path) -> None:
    (path := shared / "state").mkdir()  # as an earlier version made it
    path.chmod(0o755)
    (path / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    (path / LOCK).chmod(0o644)
    whose = r"is locked by process \d+ of user 12345: stop"
    with another_locks(path / LOCK) as locked, pytest.raises(StateFolderError, match=whose):
        StateFolder(path)
    assert locked
    StateFolder(path).close()
    with another_locks(path / LOCK) as locked:
        assert not locked
        StateFolder(path).close()


@as_root
@pytest.mark.parametrize("name", [LOCK, TABLE])
def test_in_a_folder_for_all_no_other_users_file_is_used(
    shared: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with closing(StateFolder(shared)) as folder:
        write(folder, 1)
    assert "every user of this host may write to the state folder" in caplog.text
    of_another(shared / name)
    with pytest.raises(StateFolderError, match=rf"{name} .*belongs to user 12345|{name} cannot"):
        StateFolder(shared)
    if name == TABLE:
        with pytest.raises(StateFolderError, match="belongs to user 12345"):
            weightbus.load(shared, "m", into={"w": np.zeros(20, np.uint8)})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [LOCK, TABLE])
@pytest.mark.parametrize("made", ["fifo", "link"])
def test_a_state_folder_waits_for_no_fifo_and_follows_no_link(
    tmp_path: Path, name: str, made: str
) -> None:
    (path := tmp_path / "state").mkdir()
    (elsewhere := tmp_path / "mine").write_text("mine")
    if made == "fifo":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to(elsewhere)
    with pytest.raises(StateFolderError):
        StateFolder(path)
    assert elsewhere.read_text() == "mine"


@as_root
def test_a_state_folder_is_not_one_that_another_users_link_leads_to(shared: Path) -> None:
    (mine := shared.parent / "mine").mkdir()
    (link := shared / "state").symlink_to(mine)
    StateFolder(link).close()
    of_another(link)
    with pytest.raises(StateFolderError, match="is a link that user 12345 made"):
        StateFolder(link)


# Files.


@as_root
@pytest.mark.parametrize("leads", ["the file", "its folder"])
def test_another_users_link_is_not_followed(shared: Path, leads: str) -> None:
    (home := shared.parent / "home").mkdir()
    (secret := home / "file").write_bytes(b"mine")
    if leads == "the file":
        link = path = shared / "file"
        link.symlink_to(secret)
    else:
        link = shared / "link"
        link.symlink_to(home)
        path = link / "file"
    target = FileTarget(path)  # our own link
    of_another(link)
    for attempt in (lambda: FileTarget(path), lambda: target.apply(staged())):
        with pytest.raises(PermissionError, match=r"is a link that user 12345 made.*'.*file'"):
            attempt()
    assert secret.read_bytes() == b"mine"
    assert [each.name for each in home.iterdir()] == ["file"]


@as_root
def test_no_file_is_given_to_the_user_that_made_one_before_it(shared: Path) -> None:
    target = FileTarget(path := shared / "file")
    path.write_bytes(b"theirs")
    of_another(path)
    for attempt in (lambda: FileTarget(path), lambda: target.apply(staged())):
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            attempt()
    assert path.read_bytes() == b"theirs"
    path.unlink()
    target.apply(staged())
    target.settle()
    assert (path.stat().st_uid, mode(path)) == (os.geteuid(), 0o644)
    assert [each.name for each in shared.iterdir()] == ["file"]


@pytest.mark.timeout(30)
def test_a_fifo_beside_a_file_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LEFT)
    target = FileTarget(path := tmp_path / "file")
    target.apply(staged())
    target.settle()
    assert path.stat().st_size
    assert (tmp_path / LEFT).is_fifo()


def test_what_is_left_of_a_link_is_not_followed_either(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / LEFT).symlink_to(mine)
    FileTarget(tmp_path / "file")
    assert (tmp_path / LEFT).is_symlink()
    assert mine.read_bytes() == b"mine"


def test_a_version_stays_in_the_folder_that_was_found(tmp_path: Path) -> None:
    """Its path leads elsewhere before it is put back."""
    (home := tmp_path / "home").mkdir()
    (home / "file").write_bytes(b"mine")
    before = (home / "file").stat().st_ino
    target = FileTarget(home / "file")
    target.apply(staged())
    home.rename(moved := tmp_path / "moved")
    home.mkdir()
    (home / "file").write_bytes(b"another's")
    assert target.undo()
    assert (moved / "file").read_bytes() == b"mine"
    assert (moved / "file").stat().st_ino == before, "it was no copy"
    assert (home / "file").read_bytes() == b"another's"


def test_a_path_is_followed_as_the_kernel_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (deep := tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "up").symlink_to("a/b/..")
    (tmp_path / "all").symlink_to(deep)
    (deep / "again").symlink_to("../../all/./file")
    monkeypatch.chdir(deep)
    for path in ("again", "file", "../../up/b/again", tmp_path / "all" / "x" / ".." / "file"):
        (deep / "x").mkdir(exist_ok=True)
        with place_of(Path(path)) as place:
            assert place.path == Path(os.path.realpath(path)) == deep / "file"
            assert os.fstat(place.folder).st_ino == deep.stat().st_ino
    with place_of(Path("/")) as place:
        assert place.name == "."
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        place_of(tmp_path / "round")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        place_of(tmp_path / "nowhere" / "file")
    assert len(os.listdir("/proc/self/fd")) == before


# Servers' folders.


@as_root
def test_the_lock_of_a_servers_folder_is_no_other_users(shared: Path) -> None:
    (mine := shared.parent / "mine").write_bytes(b"mine")
    (lock := shared / ".lock").symlink_to(mine)
    of_another(lock)
    with pytest.raises(PermissionError, match="is a link that user 12345 made"):
        _locked(shared)
    assert mine.read_bytes() == b"mine"
    lock.unlink()
    with closing(_locked(shared)), another_locks(lock) as locked:
        assert not locked
    of_another(lock)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        _locked(shared)


# Sockets.


@as_root
def test_a_lock_on_its_folder_keeps_no_path_from_being_bound(shared: Path) -> None:
    path = shared / "socket"
    with another_locks(shared) as locked:
        assert locked
        for _ in range(2):  # the second time it has been left behind
            listener = Listener(f"ipc://{path}")
            listener.socket.close()
        with closing(Listener(f"ipc://{path}")):
            assert not listening.is_stale_socket(str(path))
        assert not path.exists()


def test_a_socket_that_took_the_place_of_one_left_behind_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two start at once, and a stranger's lock on the folder lets both look."""
    path = tmp_path / "socket"
    Listener(f"ipc://{path}").socket.close()
    looked, others = listening.is_stale_socket, list[Listener]()

    def looked_before(where: str) -> bool:
        found = looked(where)
        if not others:  # a moment later it is another's
            path.unlink()
            others.append(Listener.__new__(Listener))
            others[0].socket = listening._listening_at(str(path))  # noqa: SLF001
        return found

    monkeypatch.setattr(listening, "is_stale_socket", looked_before)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(OSError, match="Address already in use"):
        Listener(f"ipc://{path}")
    assert not looked(str(path)), "it can be connected to"
    assert [each.name for each in tmp_path.iterdir()] == ["socket"]
    others[0].socket.close()
