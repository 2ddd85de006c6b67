"""Files that are replaced: what is refused, who may read them, what is left of attempts."""

import errno
import fcntl
import os
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from tensordict import TensorDict
from torch import nn

from weightbus import Publisher, Settings, Subscriber
from weightbus.bus.staged import StagedVersion
from weightbus.codecs.apply import as_arrays
from weightbus.codecs.layout import Layout
from weightbus.codecs.state import named_leaves, state_of, write_into
from weightbus.python_client.applying.targets import READERS_MAX, MemoryTarget, targets_of
from weightbus.python_client.checkpoints.checkpoint import open_checkpoint
from weightbus.python_client.files.file_target import FileTarget

LEFT = ".file.0123456789abcdef"
SECONDS = 60.0


def version_of(source: object) -> StagedVersion:
    state = state_of(source)
    layout = state.layout()
    data = np.empty(layout.nbytes, np.uint8)
    write_into(state, layout, data)
    return StagedVersion("m", (1, 1), layout, data, "")


def staged() -> StagedVersion:
    return version_of({"w": np.arange(5.0)})


def test_a_buffer_from_which_nothing_is_applied_any_more_is_not_held_on_to() -> None:
    target, layout = MemoryTarget({"w": np.zeros(5)}, strict=True, cast=False), staged().layout
    one, other = (StagedVersion("m", (1, 1), layout, staged().data, "") for _ in range(2))
    target.apply(one)
    buffer = weakref.ref(one.data)
    del one
    assert buffer() is not None, "it may be used for the next version but one"
    for _ in range(READERS_MAX):
        target.apply(other)
    assert buffer() is None


def test_what_a_killed_subscriber_left_is_cleared_away(tmp_path: Path) -> None:
    others = [".file.0123456789abcde", ".file.0123456789abcdeg", ".other.0123456789abcdef", "file"]
    for name in (LEFT, *others):
        (tmp_path / name).write_bytes(b"half")
    FileTarget(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_what_somebody_is_writing_is_not_cleared_away(tmp_path: Path) -> None:
    with (tmp_path / LEFT).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        FileTarget(tmp_path / "file")
        assert (tmp_path / LEFT).exists()
    FileTarget(tmp_path / "file")
    assert not (tmp_path / LEFT).exists()


@pytest.mark.parametrize("locks", [True, False])
def test_a_file_is_written_though_others_clear_away_and_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    target, flock, looks = FileTarget(tmp_path / "file"), fcntl.flock, list[None]()

    def another_is_faster(file: int, operation: int) -> None:
        looks.append(None)
        if len(looks) == 1:
            FileTarget(tmp_path / "file")  # finds the new one, which has no lock yet
        if not locks:
            raise OSError("no locks available")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", another_is_faster)
    target.apply(staged())
    target.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (load_file(tmp_path / "file")["w"] == np.arange(5.0)).all()
    assert len(looks) == (3 if locks else 2)


@pytest.mark.parametrize("links", [True, False], ids=["links", "none"])
def test_what_was_there_is_put_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Others wait to hear what runs: it is not copied where the file system has links."""

    def no_link(*_: object, **__: object) -> None:
        raise OSError("not supported")

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / "file"
    target = FileTarget(path)
    path.write_bytes(b"mine")
    before = path.stat().st_ino
    target.apply(staged())
    FileTarget(path)  # another one clears nothing of it away
    assert target.undo()
    assert path.read_bytes() == b"mine"
    assert (path.stat().st_ino == before) == links
    target.apply(staged())
    target.settle()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


# What readers of the file find.


def tied_version(metadata: dict[str, str] | None = None) -> StagedVersion:
    """Return a version of `embed`, which is `a.head` as well, and of two others."""
    layout = Layout.plan(
        [("embed", "F32", (2, 3)), ("b", "F64", (1,)), ("c", "U8", (3,))],
        {"a.head": "embed"},
        metadata,
    )
    data = np.arange(layout.nbytes, dtype=np.uint8)
    return StagedVersion("m", (1, 1), layout, data, "")


def read(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the bytes by name, and the metadata, as the safetensors library has them."""
    with safe_open(path, "np") as file:
        found = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
        return found, file.metadata()


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_a_file_says_its_format_and_has_every_tensor_by_name(tmp_path: Path, untied: bool) -> None:
    """transformers 4 reads no file without a format, and wants one of pt, tf, flax and mlx."""
    target, version = FileTarget(tmp_path / "file", untied=untied), tied_version()
    for _ in range(2):
        target.apply(version)
    target.settle()
    tensors = as_arrays(version.layout, version.data)
    found, metadata = read(tmp_path / "file")
    names = tensors.keys() - (() if untied else {"a.head"})
    assert found == {name: tensors[name].tobytes() for name in names}
    assert metadata == {"format": "pt"} | ({} if untied else {"a.head": "embed"})
    sums: list[int | None] = []
    assert len([*target.summing(version.layout, version.layout.names(), sums)]) == 4
    assert None not in sums, "what was published is found in it again"


def test_texts_that_a_version_has_stay(tmp_path: Path) -> None:
    target = FileTarget(tmp_path / "file", untied=True)
    target.apply(tied_version({"format": "mlx", "step": "7"}))
    target.settle()
    assert read(tmp_path / "file")[1] == {"format": "mlx", "step": "7"}


def test_a_text_never_becomes_another_name_of_a_tensor(tmp_path: Path) -> None:
    layout = Layout.plan([("pt", "U8", (3,))])
    target = FileTarget(tmp_path / "file")
    target.apply(StagedVersion("m", (1, 1), layout, np.arange(3, dtype=np.uint8), ""))
    target.settle()
    head = (tmp_path / "file").read_bytes()[:-3]
    assert Layout.parse(head).names() == ("pt",)


# The order of the tensors.


class Unsorted(nn.Module):
    """Its names and dtypes are in no order, and its last tensor is its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(3, 2)
        self.a = nn.BatchNorm1d(3)
        self.m = nn.Linear(2, 3, bias=False).half()
        self.b = nn.Linear(3, 2)
        self.b.weight = self.z.weight


NUMBERED = {str(n): np.full(3, n, "f4" if n % 3 else "i8") for n in range(12)}
IN_ORDER: dict[str, Callable[[], Any]] = {
    "a module": Unsorted,
    "a state_dict": lambda: Unsorted().state_dict(),
    "a TensorDict": lambda: TensorDict(dict(Unsorted().state_dict())),
    "numbered arrays": lambda: NUMBERED,
    "a nested mapping": lambda: {"z": NUMBERED, "a": {"y": NUMBERED["1"], "x": NUMBERED["0"]}},
}


def got_by(address: str, publish: Callable[[], object]) -> tuple[list[str], list[str]]:
    """Return the names of the tensors and of the arrays that a function of a worker gets."""
    names: list[list[str]] = []

    def load(pairs: Any) -> None:
        names[:] = [[name for name, _ in pairs], [name for name, _ in pairs.arrays()]]

    with Subscriber(address, {"m": load}) as worker:
        worker.start()
        publish()
    tensors, arrays = names
    return tensors, arrays


@pytest.mark.parametrize("kind", IN_ORDER)
def test_a_function_gets_the_order_of_the_source(kind: str, tmp_path: Path) -> None:
    source = IN_ORDER[kind]()
    expected = [*named_leaves(source)]
    assert expected != sorted(expected), "the case shows nothing"
    with Publisher() as publisher:
        address = publisher.address
        publish = partial(publisher.publish, "m", expect=1, timeout=SECONDS)
        assert got_by(address, partial(publish, source)) == (expected, expected)
        path = tmp_path / "m.safetensors"
        FileTarget(path).apply(version_of(source))
        checkpoint = open_checkpoint(path)
        assert checkpoint.layout == state_of(source).layout()
        assert checkpoint.metadata == {"format": "pt"}
        publish_again = partial(publish, checkpoint.arrays())
        assert got_by(address, publish_again) == (expected, expected)
        renamed = [f"x.{name}" for name in expected]
        publish_renamed = partial(publish, source, settings=Settings(rename={"": "x."}))
        assert got_by(address, publish_renamed) == (renamed, renamed)
        publish_narrow = partial(publish, source, settings=Settings(dtype={"*": "bf16"}))
        assert got_by(address, publish_narrow) == (expected, expected)


def test_another_order_is_another_layout() -> None:
    one = state_of(dict(NUMBERED))
    other = state_of(dict(reversed(NUMBERED.items())))
    layout = one.layout()
    assert other.layout(layout).names() == tuple(reversed(NUMBERED))
    assert one.layout(layout) is layout
    assert state_of(dict(sorted(NUMBERED.items()))).layout().names() == tuple(sorted(NUMBERED))


def test_a_file_with_other_names_keeps_the_order(tmp_path: Path) -> None:
    version = version_of(Unsorted())
    names = [*version.layout.names()]
    for untied in (False, True):
        target = FileTarget(tmp_path / f"{untied}", untied=untied)
        target.apply(version)
        target.settle()
        [part] = open_checkpoint(tmp_path / f"{untied}").parts
        assert [*part.layout.names()] == names
    back = version.layout.renamed({name: f"{n:02}" for n, name in enumerate(reversed(names))})
    assert [*back.names()] == [f"{n:02}" for n in reversed(range(len(names)))]
    rows = [("k", "F32", (2,)), ("c", "U8", (1,))]
    tied = Layout.plan(rows, {"a": "k", "b": "k"}, names=("k", "b", "c", "a"))
    assert tied.names() == ("k", "b", "c", "a")
    swapped = tied.renamed({"k": "k", "c": "c", "a": "z", "b": "y"})
    assert swapped.names() == ("k", "y", "c", "z"), "aliases are sorted otherwise"


# What can never be written, and what cannot be written now.


def folder(path: Path) -> None:
    path.mkdir()


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


KINDS = [
    pytest.param(folder, errno.EISDIR, "is a folder", id="folder"),
    pytest.param(os.mkfifo, errno.EINVAL, "is a FIFO", id="fifo"),
    pytest.param(link_to_fifo, errno.EINVAL, "is a FIFO", id="link"),
    pytest.param(bound, errno.EINVAL, "is a socket", id="socket"),
    pytest.param(device, errno.EINVAL, "is a device", id="device"),
    pytest.param(loop, errno.ELOOP, "", id="loop"),
]


@pytest.mark.parametrize(("make", "number", "words"), KINDS)
def test_what_is_no_file_is_refused_and_what_is_none_any_more_neither_replaced_nor_waited_for(
    tmp_path: Path, make: Callable[[Path], None], number: int, words: str
) -> None:
    target, errors = FileTarget(path := tmp_path / "file"), list[BaseException]()
    make(path)
    before = sorted((each.name, each.lstat().st_mode) for each in tmp_path.iterdir())
    with pytest.raises(OSError, match=f"Errno {number}].*{words}.*{path}") as refused:
        FileTarget(path)
    assert refused.value.errno == number

    def apply() -> None:
        try:
            target.apply(staged())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=apply, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    (error,) = errors
    assert str(path) in str(error)
    assert (f"[Errno {number}]" in str(error), words in str(error)) == (True, True)
    assert target.undo()
    assert before == sorted((each.name, each.lstat().st_mode) for each in tmp_path.iterdir())


def test_a_folder_in_which_nothing_can_be_made_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder .*nowhere does not exist; make the"):
        FileTarget(tmp_path / "nowhere" / "file")
    with pytest.raises(OSError, match="File name too long: '/"):
        FileTarget(tmp_path / ("n" * 250))  # what is written beside it has a longer name
    opened = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777, **where: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, mode, **where)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match=rf"Read-only file system: '{tmp_path}/file'"):
        FileTarget(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("there", [True, False], ids=["there", "new"])
def test_a_file_stays_as_it_was_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, there: bool
) -> None:
    target = FileTarget(path := tmp_path / "file")
    if there:
        path.write_bytes(b"mine")

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=str(path)) as error:
        target.apply(staged())
    assert error.value.errno == number
    assert target.undo()
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"mine"] * there


def test_a_folder_that_vanishes_is_named(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    target = FileTarget(home / "file")
    home.rmdir()
    missing = f"its folder {home} does not exist; make the folder first: '{home}/file'"
    with pytest.raises(FileNotFoundError, match=missing):
        target.apply(staged())
    home.mkdir()
    target.apply(staged())
    target.settle()
    assert [each.name for each in home.iterdir()] == ["file"]


# Who may read it.


def write(path: Path) -> None:
    target = FileTarget(path)
    target.apply(staged())
    target.settle()


def modes_of(monkeypatch: pytest.MonkeyPatch, path: Path) -> set[int]:
    """Return the modes that what is written beside a file turns out to have once it is written."""
    fsync, modes = os.fsync, set[int]()

    def look(handle: int) -> None:
        modes.update(
            stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir() if each != path
        )
        fsync(handle)

    monkeypatch.setattr(os, "fsync", look)
    return modes


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o400])
def test_a_file_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    (path := tmp_path / "file").write_bytes(b"mine")
    path.chmod(mode)
    target, modes = FileTarget(path), modes_of(monkeypatch, path)
    for _ in range(2):
        target.apply(staged())
        assert stat.S_IMODE(path.stat().st_mode) == mode
    target.settle()
    assert modes == {mode}, "nobody else could read it while it was written, either"

    def no_link(*_: object, **__: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", no_link)
    target.apply(staged())
    assert target.undo()
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert len(load_file(path)["w"]) == 5


def test_a_new_file_has_the_mode_that_its_user_gives_to_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_leaves_a_file_to_its_owner(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"mine")
    os.chown(path, 12345, 23456)
    path.chmod(0o640)
    write(path)
    now = path.stat()
    assert (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) == (12345, 23456, 0o640)


@pytest.mark.parametrize(("mode", "then"), [(0o660, 0o600), (0o664, 0o644), (0o640, 0o600)])
def test_a_group_that_cannot_be_kept_gives_its_rights_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, then: int
) -> None:
    (path := tmp_path / "file").write_bytes(b"mine")
    path.chmod(mode)
    of, theirs = os.fstat, path.stat()

    def of_another_group(handle: int) -> os.stat_result:
        now = of(handle)
        if now.st_ino != theirs.st_ino:
            return now
        return os.stat_result((*now[:5], now.st_gid + 1, *now[6:10]))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "fstat", of_another_group)
    monkeypatch.setattr(os, "fchown", refuse)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == then


def test_an_access_list_is_kept(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"mine")
    path.chmod(0o640)
    entries = [(1, 6, 0), (2, 4, 12345), (4, 0, 0), (16, 4, 0), (32, 0, 0)]  # one user may read
    rules = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, may, who or 0xFFFFFFFF) for tag, may, who in entries
    )
    try:
        os.setxattr(path, "system.posix_acl_access", rules)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")
    write(path)
    assert os.getxattr(path, "system.posix_acl_access") == rules


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    (links := tmp_path / "links").mkdir()
    (home / "one").write_bytes(b"mine")
    (path := links / "file").symlink_to("../home/one")
    target = FileTarget(path)
    target.apply(staged())
    assert path.is_symlink()
    assert len(load_file(home / "one")["w"]) == 5
    assert target.undo()
    assert (home / "one").read_bytes() == b"mine"
    path.unlink()
    path.symlink_to("../home/two")  # nothing is there yet, and it is not where it led before
    target.apply(staged())
    target.settle()
    assert [each.name for each in links.iterdir()] == ["file"]
    assert sorted(each.name for each in home.iterdir()) == ["one", "two"]


class WithTrunk(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(4, 2)


@pytest.mark.parametrize("meta", [False, True])
def test_models_that_share_memory_are_warned_of_by_name(
    caplog: pytest.LogCaptureFixture, meta: bool
) -> None:
    with torch.device("meta" if meta else "cpu"):
        trunk = nn.Linear(4, 4)
        actor, critic = WithTrunk(trunk), WithTrunk(trunk)
    targets_of({"actor": actor, "critic": critic}, strict=True, cast=False)
    [record] = caplog.records
    text = record.getMessage()
    assert "models 'actor' and 'critic' share memory here" in text
    assert "(trunk.bias and trunk.bias, and 1 more)" in text or "trunk.weight" in text
    assert "nn.ModuleDict" in text


def test_a_part_of_an_array_that_another_model_has_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = np.zeros(8)
    targets_of({"a": {"w": whole}, "b": {"v": whole[2:4]}}, strict=True, cast=False)
    assert "(w and v)" in caplog.text


def test_models_with_memory_of_their_own_are_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tied = np.zeros(8)
    targets_of({"a": {"w": tied, "v": tied}, "b": {"w": np.zeros(8)}}, strict=True, cast=False)
    assert not caplog.records
