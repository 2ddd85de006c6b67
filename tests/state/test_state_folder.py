"""A state folder names whole versions only, whatever stops the one who writes it, and when."""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from weightbus.codecs.checksum import digest_of
from weightbus.codecs.layout import Layout
from weightbus.python_client.files import state_folder
from weightbus.python_client.files.places import open_plain
from weightbus.python_client.files.state_folder import (
    DAMAGED,
    NAMES_MAX,
    PARTIAL,
    TABLE,
    StateFolder,
    StateFolderError,
    StoredVersion,
    newest,
    parts_of,
)

CHUNK = 8
LAYOUT = Layout.plan([("w", "U8", (20,))], {"tied": "w"}, {"format": "np"})

Op = tuple[Any, ...]


def data_of(version: int) -> Any:
    return np.random.default_rng(version).integers(0, 256, LAYOUT.nbytes, np.uint8)


def stored_of(version: int, epoch: int = 7, model: str = "m") -> StoredVersion:
    digest = digest_of(LAYOUT.id, data_of(version), CHUNK)
    key = (epoch, version)
    return StoredVersion(model, *key, LAYOUT.nbytes, CHUNK, digest, (key,))


def write(folder: StateFolder, version: int, epoch: int = 7, model: str = "m") -> None:
    folder.write(stored_of(version, epoch, model), parts_of(LAYOUT, data_of(version)))


def read(folder: StateFolder, stored: StoredVersion) -> bytes:
    memory = np.empty(stored.nbytes, np.uint8)
    saved = folder.open(stored)
    saved.copy_to(memory)
    assert saved.layout == LAYOUT
    return memory.tobytes()


def keys(folder: StateFolder, model: str = "m") -> list[tuple[int, int]]:
    return [stored.key for stored in folder.versions(model)]


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if "weightbus" not in file.name}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    made = StateFolder(tmp_path / "state", history=1)
    yield made
    made.close()


def again(folder: StateFolder, history: int = 1) -> StateFolder:
    folder.close()
    return StateFolder(folder.path, history)


def test_what_is_written_is_there_again_byte_for_byte(folder: StateFolder) -> None:
    write(folder, 1)
    folder = again(folder)
    (stored,) = folder.versions("m")
    assert stored == stored_of(1)
    assert read(folder, stored) == data_of(1).tobytes()
    loaded = load_file(folder.path / "m@7-1.safetensors")
    assert np.array_equal(loaded["w"], data_of(1))
    assert folder.epoch == 7
    folder.close()


def test_so_many_older_versions_are_kept(folder: StateFolder) -> None:
    for version in (1, 2, 3):
        write(folder, version)
        write(folder, version, model="n@"[:1])
    assert keys(folder) == [(7, 3), (7, 2)]
    assert files(folder.path) == {f"{m}@7-{v}.safetensors" for m in "mn" for v in (2, 3)}
    folder = again(folder, history=0)
    write(folder, 4)
    assert keys(folder) == [(7, 4)]
    assert keys(folder, "n") == [(7, 3), (7, 2)], "until the next of its own is written"
    folder.close()


def test_a_second_publisher_is_told_who_has_the_folder(folder: StateFolder) -> None:
    with pytest.raises(StateFolderError, match=r"a publisher of this process: close\(\) it"):
        StateFolder(folder.path)
    again(folder).close()


def test_an_epoch_is_remembered_and_so_is_what_was_offered_in_it(folder: StateFolder) -> None:
    write(folder, 3)
    folder.begin(9, folder.versions("m"))
    folder = again(folder)
    assert folder.epoch == 9
    assert folder.versions("m")[0].names == ((9, 1), (7, 3))
    assert folder.find("m", (9, 1)) == folder.find("m", (7, 3)) == folder.versions("m")[0]
    with pytest.raises(StateFolderError, match=r"\(8, 1\) of 'm' is not in .*; there are \(7, 3\)"):
        folder.find("m", (8, 1))
    folder.close()


def test_names_are_bounded() -> None:
    names = newest((epoch, 1) for epoch in range(1000))
    assert len(names) == NAMES_MAX
    assert names[0] == (999, 1)


def test_a_table_that_was_altered_is_put_aside(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, 3)
    folder.begin(9)
    file = folder.path / TABLE
    file.write_bytes(file.read_bytes().replace(b'"epoch":9', b'"epoch":1'))
    folder = again(folder)
    assert "does not match its hash" in caplog.text
    assert folder.models() == []
    assert folder.epoch == 7, "the names of the files still tell"
    assert (folder.path / DAMAGED).exists()
    assert files(folder.path) == {"m@7-3.safetensors"}
    folder.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_file_is_never_read(tmp_path: Path, position: int, bit: int, cut: bool) -> None:
    with closing(StateFolder(tmp_path)) as folder:
        write(folder, 1)
        file = tmp_path / stored_of(1).file
        whole = bytearray(file.read_bytes())
        position %= len(whole)
        whole[position] ^= 1 << bit
        file.write_bytes(whole[:position] if cut else whole)
        with pytest.raises(StateFolderError, match=file.name):
            read(folder, folder.versions("m")[0])


def test_a_file_that_is_gone_is_never_read(folder: StateFolder) -> None:
    write(folder, 1)
    (folder.path / stored_of(1).file).unlink()
    with pytest.raises(StateFolderError, match=r"m@7-1\.safetensors is not in .* any more"):
        folder.open(folder.versions("m")[0])


class Disk:
    """Stands in for `os` in the folder's module: fails at one call, or remembers every one."""

    def __init__(self, fail_at: int = -1) -> None:
        self.calls, self._fail_at, self.failed = 0, fail_at, ""
        self.log: list[Op] = []
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _call(self, name: str) -> None:
        self.calls += 1
        if self.calls - 1 == self._fail_at:
            self.failed = name
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_plain(self, name: str, flags: int, *arguments: Any) -> int:
        self._call("open")
        file = open_plain(name, flags, *arguments)
        self._names[file] = name
        if flags & os.O_CREAT:
            self.log.append(("create", name))
        return file

    def close(self, file: int) -> None:
        self._names.pop(file, None)
        os.close(file)

    def write(self, file: int, data: memoryview) -> int:
        self._call("write")
        data = data[: max(1, len(data) // 2)]  # a write may be cut short
        self.log.append(("write", self._names[file], bytes(data)))
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        self._call("fsync")
        self.log.append(("fsync", self._names.get(file, "the folder")))

    def replace(self, old: str, new: str, **folders: int) -> None:
        self._call("replace")
        self.log.append(("rename", old, new))
        os.replace(old, new, **folders)

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(state_folder, "os", self)
        patch.setattr(state_folder, "open_plain", self.open_plain)


def test_a_full_disk_at_any_moment_leaves_what_was_there(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)
    fail_at = 0
    for fail_at in range(1_000):
        disk = Disk(fail_at)
        before, there = keys(folder), files(folder.path)
        with monkeypatch.context() as patch:
            disk.stand_in(patch)
            with suppress(OSError):
                write(folder, 2 + fail_at)
        if not disk.failed:
            break
        assert [*folder.path.glob(f"*{PARTIAL}")] == []
        if keys(folder) == before:
            assert files(folder.path) == there, "what was not taken in takes up room"
        newest_key = keys(folder)[0]
        assert read(folder, folder.versions("m")[0]) == data_of(newest_key[1]).tobytes()
        folder = again(folder)
        assert newest_key in keys(folder)
        folder.close()
        folder = StateFolder(folder.path, 1)
    assert fail_at > 8
    assert read(folder, folder.versions("m")[0]) == data_of(2 + fail_at).tobytes()
    folder.close()


def crashed(log: list[Op], rng: random.Random) -> dict[str, bytes]:
    """Return what may be on a disk after a crash at the end of a log of operations.

    What was written and not synced is there in part; names are what they were when their folder was
    synced last, or as any of the changes since has left them, each name by itself.
    """
    written: dict[int, bytes] = {}
    synced: dict[int, int] = {}
    names: dict[str, int] = {}  # as processes see them
    durable: dict[str, int] = {}
    changes: list[dict[str, int]] = []
    for number, (kind, name, *more) in enumerate(log):
        if kind == "create":
            written[number], synced[number] = b"", 0
            names = {**names, name: number}
        elif kind == "write":
            written[names[name]] += more[0]
        elif kind == "rename":
            names = {**{k: v for k, v in names.items() if k != name}, more[0]: names[name]}
        elif name in names:
            synced[names[name]] = len(written[names[name]])
        else:  # the folder itself
            durable, changes = names, []
        changes.append(names)
    disk: dict[str, bytes] = {}
    for name in sorted({name for names in (durable, *changes) for name in names}):
        file = rng.choice([durable, rng.choice([durable, *changes]), changes[-1]]).get(name)
        if file is None:
            continue
        data, safe = written[file], synced[file]
        disk[name] = data[: rng.choice([safe, rng.randint(safe, len(data)), len(data)])]
    return disk


@pytest.mark.parametrize("history", [0, 1])
def test_a_crash_at_any_moment_leaves_whole_versions(
    history: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, disk = random.Random(history), Disk()
    done: list[tuple[int, int, int]] = [(0, 0, 0)]  # length of the log, epoch, version
    with monkeypatch.context() as patch, closing(StateFolder(tmp_path / "x", history)) as folder:
        disk.stand_in(patch)
        for version in (1, 2, 3):
            folder.begin(10 * version)
            done.append((len(disk.log), 10 * version, version - 1))
            write(folder, version, 10 * version)
            done.append((len(disk.log), 10 * version, version))
    for number in range(3 * len(disk.log)):
        end = 1 + number // 3
        (after := tmp_path / str(number)).mkdir()
        for name, data in crashed(disk.log[:end], rng).items():
            (after / name).write_bytes(data)
        _, epoch, version = max(d for d in done if d[0] <= end)
        with closing(StateFolder(after, history)) as folder:
            check_after_crash(folder, epoch, version)


def check_after_crash(folder: StateFolder, epoch: int, version: int) -> None:
    """A folder has what had been written by then, and nothing that is not whole."""
    assert not (folder.path / DAMAGED).exists()
    assert folder.epoch >= epoch
    assert max((key[1] for key in keys(folder)), default=0) >= version
    for stored in folder.versions("m"):
        assert read(folder, stored) == data_of(stored.version).tobytes()
    if keys(folder):
        assert files(folder.path) == {stored.file for stored in folder.versions("m")}
