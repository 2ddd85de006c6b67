"""The thread that copies from shared memory: a copy is complete, fails, or is stopped halfway."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import numpy as np
import pytest

from weightbus.bus.chunks import ChunkPlan
from weightbus.bus.net.copier import Copier
from weightbus.bus.staged import Copying, StaleError
from weightbus.codecs.native import crc32c

SECONDS = 30.0  # far more than any step here takes
CHUNK = 10


class Memory:
    """A segment; a test can block a copy from it halfway."""

    def __init__(self, *, stale: bool = False) -> None:
        self.bytes = np.arange(35, dtype=np.uint8)
        self.stale, self.held, self.note = stale, False, b""
        self.looked = 0
        self.halfway, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    @property
    def data(self) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        self.looked += 1
        if self.looked == 2:
            self.halfway.set()
            assert self.go_on.wait(SECONDS)
        return self.bytes

    @contextmanager
    def reading(self, model: str, epoch: int, version: int, **_: bool) -> Generator[None]:
        assert (model, epoch, version) == ("a", 1, 2)
        if self.stale:
            raise StaleError
        self.held = True
        try:
            yield
        finally:
            self.held = False


class Bench:
    """A copier, and its results."""

    def __init__(self) -> None:
        self.done: Queue[Any] = Queue()
        self.copier = Copier(self.done.put)

    def copy(self, memory: Memory) -> Copying:
        copy = Copying("a", (1, 2), memory, np.zeros(35, np.uint8), ChunkPlan(35, CHUNK))
        self.copier.queue(copy)
        return copy


def test_a_copy_comes_with_the_checksum_of_each_chunk() -> None:
    bench, memory = Bench(), Memory()
    copy = bench.copy(memory)
    done = bench.done.get(timeout=SECONDS)
    assert done.copying is copy
    assert (copy.buffer == memory.bytes).all()
    assert done.crcs is not None
    assert [*done.crcs] == [crc32c(memory.bytes[i : i + CHUNK]) for i in range(0, 35, CHUNK)]
    assert copy.count == 4
    bench.copier.close()


def test_what_is_stale_comes_to_nothing_and_the_next_is_copied() -> None:
    bench = Bench()
    bench.copy(Memory(stale=True))
    bench.copy(Memory())
    assert bench.done.get(timeout=SECONDS).crcs is None
    assert bench.done.get(timeout=SECONDS).crcs is not None
    bench.copier.close()


@pytest.mark.parametrize("how", ["nobody wants it", "closed"])
def test_a_copy_ends_in_its_middle_and_lets_go(how: str) -> None:
    bench, memory = Bench(), Memory()
    memory.go_on.clear()
    copy = bench.copy(memory)
    assert memory.halfway.wait(SECONDS)
    assert memory.held
    if how == "closed":
        threading.Timer(0.01, memory.go_on.set).start()
        bench.copier.close()
    else:
        copy.live = False
        memory.go_on.set()
    assert bench.done.get(timeout=SECONDS).crcs is None
    assert copy.count < 4
    assert not memory.held
    bench.copier.close()


def test_a_copy_goes_before_what_is_touched_ahead_which_is_gone_on_with() -> None:
    bench, begun, steps = Bench(), threading.Event(), Queue[str]()

    def touching() -> Generator[None]:
        for step in range(3):
            begun.set()
            steps.put(f"step {step}")
            assert copied.wait(SECONDS)
            yield

    copied = threading.Event()
    bench.copier.run_when_idle(touching())
    assert begun.wait(SECONDS)
    copy = bench.copy(Memory())
    copied.set()
    assert bench.done.get(timeout=SECONDS).copying is copy
    assert [steps.get(timeout=SECONDS) for _ in range(3)] == ["step 0", "step 1", "step 2"]
    bench.copier.close()


def test_it_has_no_thread_until_there_is_something_to_do() -> None:
    before = threading.active_count()
    Bench().copier.close()
    assert threading.active_count() == before
