"""Watching a checkpoint: only whole files, only after they changed, and every reason is told."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from weightbus.python_client.checkpoints.watch import Watch


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
