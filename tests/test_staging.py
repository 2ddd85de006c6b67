"""Staging buffers: made once, used again, and there before the first version if possible."""

from weightbus.bus.limits import BUFFERS_MAX
from weightbus.bus.memory.staging import Buffers


def address(buffer: object) -> int:
    return buffer.__array_interface__["data"][0]  # type: ignore[attr-defined]


def test_a_reserved_buffer_is_the_first_one_given_out() -> None:
    buffers = Buffers()
    buffers.reserve(1000)
    buffers.reserve(1000)
    first = buffers.take(1000)
    assert first is not None
    first[:] = 7
    buffers.give_back(first)
    assert buffers.take(1000) is first


def test_a_reserved_buffer_of_another_size_is_let_go() -> None:
    buffers = Buffers()
    buffers.reserve(1000)
    taken = buffers.take(2000)
    assert taken is not None
    assert taken.nbytes == 2000


def test_there_are_no_more_than_allowed() -> None:
    buffers = Buffers()
    held = [buffers.take(10) for _ in range(BUFFERS_MAX)]
    assert all(buffer is not None for buffer in held)
    assert len({address(buffer) for buffer in held}) == BUFFERS_MAX
    assert buffers.take(10) is None


def test_more_memory_than_there_is_is_not_reserved() -> None:
    buffers = Buffers()
    buffers.reserve(2**60)
    assert buffers.take(10) is not None


def test_no_bytes_need_no_memory() -> None:
    buffers = Buffers()
    buffers.reserve(0)
    taken = buffers.take(0)
    assert taken is not None
    assert taken.nbytes == 0
