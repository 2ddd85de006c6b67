"""Files that are replaced: what a killed subscriber left goes, what a living one writes stays."""

import fcntl
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from weightbus.bus.staged import StagedVersion
from weightbus.codecs.state import state_of, write_into
from weightbus.python_client.targets import READERS_MAX, FileTarget, MemoryTarget

LEFT = ".file.0123456789abcdef"


def staged() -> StagedVersion:
    state = state_of({"w": np.arange(5.0)})
    layout = state.layout()
    data = np.empty(layout.nbytes, np.uint8)
    write_into(state, layout, data)
    return StagedVersion("m", 1, 1, layout, data, "")


def test_a_buffer_from_which_nothing_is_applied_any_more_is_not_held_on_to() -> None:
    target, layout = MemoryTarget({"w": np.zeros(5)}, strict=True, cast=False), staged().layout
    one, other = (StagedVersion("m", 1, 1, layout, staged().data, "") for _ in range(2))
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

    def no_link(*_: object) -> None:
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
