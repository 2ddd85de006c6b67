"""Memory of whole pages: allocated when requested, and touched ahead of use without harm."""

import numpy as np
import pytest

from weightbus.bus.memory.pages import memory_ahead, memory_of


def test_no_bytes_need_no_memory() -> None:
    assert memory_of(0).nbytes == 0


def test_more_memory_than_there_is() -> None:
    for take in (memory_of, memory_ahead):
        with pytest.raises(MemoryError, match="no memory for 1152921504606846976 bytes"):
            take(2**60)


def test_memory_that_is_touched_ahead_keeps_what_was_written_meanwhile() -> None:
    memory, touching = memory_ahead(3 * 2**16)
    memory[:] = 7
    for _ in touching:
        memory[1:] = np.uint8(8)
    assert memory[0] == 7
    assert (memory[1:] == 8).all()
