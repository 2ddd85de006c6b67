"""Watching a checkpoint: only whole files, only after they changed, and every reason is told."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from weightbus.python_client.checkpoints import checkpoint, watch
from weightbus.python_client.checkpoints.checkpoint import File, Stamp, stamp_of
from weightbus.python_client.checkpoints.watch import (
    AGAIN_SECONDS,
    POLL_SECONDS,
    SET_SECONDS,
    Watch,
)


def file_of(value: float) -> bytes:
    return save({"x": np.full(8, value, np.float32)})


class Script:
    """What happens between two looks, one step for each sleep."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def sleep(self, _seconds: float) -> None:
        self.steps.pop(0)()  # a watch that looks once too often ends the test here


def still() -> None:
    """Nothing happens."""


def value_of(watch: Watch) -> float | None:
    watch.wait_for_change()
    checkpoint = watch.load()
    return None if checkpoint is None else float(checkpoint.arrays()["x"][0])


def test_a_file_that_is_there_is_loaded_once_it_stands_still(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(1))
    script = Script(lambda: path.write_bytes(file_of(2)[:50]), lambda: path.write_bytes(file_of(2)))
    script.steps.append(still)
    told: list[str] = []
    watch = Watch(path, told.append, script.sleep)
    assert value_of(watch) == 2
    assert not script.steps
    assert not told


def test_it_waits_for_the_next_change(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(1))
    replaced = tmp_path / "new"
    script = Script(still)
    told: list[str] = []
    watch = Watch(path, told.append, script.sleep)
    assert value_of(watch) == 1

    def replace() -> None:
        replaced.write_bytes(file_of(3))
        replaced.replace(path)

    script.steps += [still, still, replace, still]
    assert value_of(watch) == 3
    assert not script.steps
    assert not told


def test_a_half_written_file_is_told_once_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(1)[:-5])
    script = Script(still, still, still, lambda: path.write_bytes(file_of(4)), still)
    told: list[str] = []
    watch = Watch(path, told.append, script.sleep)
    found = [value_of(watch) for _ in range(4)]
    assert found == [None, None, None, 4]
    assert len(told) == 1
    assert "cut short" in told[0]


def test_a_file_may_come_later_and_go_again(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    script = Script(still, lambda: path.write_bytes(file_of(5)), still)
    told: list[str] = []
    watch = Watch(path, told.append, script.sleep)
    assert [value_of(watch) for _ in range(2)] == [None, 5]
    script.steps += [path.unlink, still, lambda: path.write_bytes(file_of(6)), still]
    assert [value_of(watch) for _ in range(2)] == [None, 6]
    assert len(told) == 2
    assert all("No such file" in text for text in told)


def test_a_write_during_the_load_is_refused_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(1))
    script = Script(still, still)
    told: list[str] = []
    watch = Watch(path, told.append, script.sleep)
    watch.wait_for_change()

    def meddle(_nbytes: int) -> None:
        path.write_bytes(save({"x": np.full(9, 7, np.float32)}))

    assert watch.load(meddle) is None
    assert "written while it was read" in told[0]
    assert value_of(watch) == 7


# Changes that leave size and modification time as they were.


def tick(folder: Path) -> None:
    """Return once a file that is changed from now on has a later time than all that are there."""
    probe, newest = folder.parent / "probe", max(f.stat().st_ctime_ns for f in folder.iterdir())
    while True:
        probe.write_bytes(b"x")
        if probe.stat().st_ctime_ns > newest:
            return


def test_what_keeps_its_modification_time_is_seen(tmp_path: Path) -> None:
    """As `cp -p`, and `rsync --inplace -t` do it, by which the inode stays: files of one size."""
    (tmp_path / "there").mkdir()
    path, later = tmp_path / "there" / "x.safetensors", tmp_path / "later"
    for file, value in ((path, 1), (later, 2)):
        file.write_bytes(file_of(value))
        os.utime(file, (1_700_000_000, 1_700_000_000))
    script, told = Script(still), list[str]()
    watched = Watch(path, told.append, script.sleep)
    assert value_of(watched) == 1
    tick(path.parent)
    script.steps += [still, lambda: shutil.copy2(later, path), still]
    assert value_of(watched) == 2
    assert not script.steps
    assert not told


def test_a_mode_that_changes_is_no_new_version(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "x.safetensors"
    path.write_bytes(file_of(1))
    script, told = Script(still), list[str]()
    watched = Watch(path, told.append, script.sleep)
    assert value_of(watched) == 1
    tick(path.parent)
    script.steps += [lambda: path.chmod(0o600), still]
    assert value_of(watched) is None
    assert not told


def test_times_in_whole_seconds_are_looked_behind_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written again in place within the second in which it was read: nothing but bytes tells."""

    def coarse(path: Path) -> Stamp:
        second = 10**9
        return tuple(File(f.name, f.inode, second, second, f.size) for f in stamp_of(path))

    monkeypatch.setattr(watch, "stamp_of", coarse)
    monkeypatch.setattr(checkpoint, "stamp_of", coarse)
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(1))
    script = Script(still)
    watched = Watch(path, print, script.sleep)
    assert value_of(watched) == 1
    looks = round(AGAIN_SECONDS / POLL_SECONDS)
    script.steps += [lambda: path.write_bytes(file_of(2)), *[still] * (looks - 1)]
    assert value_of(watched) == 2
    script.steps += [still] * (2 * looks)
    with pytest.raises(IndexError):  # it looks on, and does not load again
        watched.wait_for_change()


# Shards that are saved again where they lie.

SHARDS = ("model-00001-of-00002", "model-00002-of-00002")


class Saves:
    """A folder into which models of two shards are saved, a file at a time.

    Args:
        order: In which order its files are written.
    """

    def __init__(self, folder: Path, order: tuple[int, ...] = (0, 1, 2)) -> None:
        self.folder, self.order = folder, order
        folder.mkdir()
        self.told: list[str] = []
        self.script = Script()
        self.watch = Watch(folder, self.told.append, self.script.sleep)

    def write(self, value: float, file: int) -> None:
        if any(self.folder.iterdir()):
            tick(self.folder)
        if file < len(SHARDS):
            data = save({f"w{file}": np.full(8, value, np.float32)})
            (self.folder / f"{SHARDS[file]}.safetensors").write_bytes(data)
        else:
            where = {f"w{n}": f"{name}.safetensors" for n, name in enumerate(SHARDS)}
            index = self.folder / "model.safetensors.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": where}))

    def save(self, value: float) -> None:
        for file in self.order:
            self.write(value, file)

    def save_slowly(self, value: float) -> None:
        """Have it saved while it is watched, with time between files for several looks."""
        for file in self.order:
            self.script.steps += [partial(self.write, value, file), still, still, still]

    def values(self) -> set[float] | None:
        self.watch.wait_for_change()
        found = self.watch.load()
        return None if found is None else {float(array[0]) for array in found.arrays().values()}


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)], ids=str)
def test_a_set_is_published_as_one_save(tmp_path: Path, order: tuple[int, ...]) -> None:
    """As `save_pretrained` writes it, the index last; and as others might, the index first."""
    saves = Saves(tmp_path / "model", order)
    saves.save(0)
    saves.script.steps += [still] * (2 if order[-1] == 2 else round(SET_SECONDS / POLL_SECONDS))
    assert saves.values() == {0}
    saves.script.steps.clear()
    for value in (1.0, 2.0, 3.0):
        saves.save_slowly(value)
        saves.script.steps += [still] * round(SET_SECONDS / POLL_SECONDS)
        assert saves.values() == {value}
        saves.script.steps.clear()
    assert any("waiting up to 30 s for the rest of the save" in text for text in saves.told)
    nevertheless = [text for text in saves.told if "loaded nevertheless" in text]
    assert len(nevertheless) == (4 if order[-1] != 2 else 0)


def test_a_save_that_was_begun_before_it_was_watched_is_waited_for(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "model")
    saves.save(1)
    saves.write(2, 0)
    saves.script.steps += [still] * 9 + [lambda: saves.write(2, 1), still, still]
    saves.script.steps += [lambda: saves.write(2, 2), still]
    assert saves.values() == {2}
    assert not saves.script.steps
    assert "model-00001-of-00002.safetensors is newer than model.safetensors.index" in saves.told[0]


def test_a_set_that_stays_mixed_is_taken_in_the_end_with_a_warning(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "model")
    saves.save(1)
    saves.script.steps += [still]
    assert saves.values() == {1}
    saves.script.steps += [lambda: saves.write(2, 1), *[still] * round(SET_SECONDS / POLL_SECONDS)]
    assert saves.values() == {1, 2}
    assert not saves.script.steps
    assert len(saves.told) == 2
    assert "loaded nevertheless, unchanged for 30 s" in saves.told[1]


def test_a_set_that_is_old_is_taken_at_once(tmp_path: Path) -> None:
    """Whoever downloads shards may have got the index first."""
    saves = Saves(tmp_path / "model", (2, 0, 1))
    saves.save(1)
    newest = max(file.changed_ns for file in stamp_of(saves.folder)) / 1e9
    later = Watch(saves.folder, saves.told.append, still_of, lambda: newest + SET_SECONDS + 1)
    later.wait_for_change()
    assert later.load() is not None
    assert not saves.told


def still_of(_seconds: float) -> None:
    """Nothing happens, however long that is."""
