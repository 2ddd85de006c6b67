"""A version arrives whole, however its chunks arrive, and no chunk is requested needlessly."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import Chunks
from weightbus.bus.lease import Lease
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Chunk
from weightbus.bus.protocol_limits import FETCH_CHUNKS_MAX, WINDOW_CHUNKS
from weightbus.bus.publisher.offers import announcement
from weightbus.bus.worker.transfer import DAMAGED_MAX, Transfer
from weightbus.codecs.native import crc32c
from weightbus.tests.simulation.virtual_shell import version_of

CHUNK = 8
TIMING = Timing(ping=1.0, lost_after=5.0)


class TransferBench:
    """A transfer, and the version that is sent to it."""

    def __init__(self, chunks: int) -> None:
        self.nbytes = max(0, chunks * CHUNK - 3)  # the last chunk is shorter
        self.data = np.arange(self.nbytes, dtype=np.uint8)
        version = version_of(1, self.data, CHUNK, 1)
        self.buffer = np.zeros(self.nbytes, np.uint8)
        plan = version.plan
        self.chunks = Chunks(plan, self.buffer, [None] * plan.count, version.layout.id)
        self.transfer = Transfer(announcement(version), self.chunks, 0.0, TIMING)
        spans = map(version.plan.span, range(version.plan.count))
        self.pieces, self.digest = [bytes(self.data[b:e]) for b, e in spans], version.digest

    def add(self, index: int, now: float, *, pushed: bool = False) -> bool:
        piece = self.pieces[index]
        return self.transfer.store(index, crc32c(piece), piece, now, pushed=pushed)

    def lends(self, index: int, size: int) -> Lease | None:
        chunk = Chunk(model="a", epoch=1, version=1, index=index, crc=0)
        return self.transfer.lend(chunk, size)

    def lend(self, index: int) -> Lease:
        lease = self.lends(index, len(self.pieces[index]))
        assert lease is not None
        return lease

    @property
    def complete(self) -> bool:
        return self.chunks.here == len(self.pieces) and self.transfer.digest is not None

    def wants(self, now: float, *, answered: bool = True) -> list[int]:
        """Return the chunks that are requested now; -1 stands for announcement and `end`.

        Args:
            now: The time.
            answered: Whether the last ping was answered at once, so that no answer is on its way.
        """
        if answered:
            self.transfer.answered(now - 0.001)
        wanted: list[int] = []
        for first, count in self.transfer.wants(now):
            assert count <= FETCH_CHUNKS_MAX
            wanted += range(first, first + count) if count else [-1]
        return wanted


def test_pushed_in_order_nothing_is_fetched() -> None:
    bench = TransferBench(40)
    for index in range(40):
        assert bench.add(index, index * 0.01, pushed=True)
        assert bench.wants(index * 0.01) == []
    assert not bench.complete
    bench.transfer.end(bench.digest)
    assert bench.complete
    assert bench.chunks.proves(bench.digest)
    assert np.array_equal(bench.buffer, bench.data)


def test_what_may_still_be_pushed_is_not_fetched_before_the_end_or_silence() -> None:
    ended, silent = TransferBench(10), TransferBench(10)
    for bench in (ended, silent):
        bench.add(0, 0.0, pushed=True)
        assert bench.wants(0.0) == []
    ended.transfer.end(ended.digest)
    assert ended.wants(0.0) == list(range(1, 10))
    assert silent.wants(TIMING.quiet - 0.01) == []
    assert silent.wants(TIMING.quiet) == [-1, *range(1, 10)]


def test_at_most_a_window_is_outstanding() -> None:
    bench = TransferBench(100)
    bench.transfer.end(bench.digest)
    asked = bench.wants(0.0)
    assert asked == list(range(WINDOW_CHUNKS))
    outstanding = len(asked)
    for index in range(100):
        bench.add(index, 0.0)
        outstanding -= 1
        more = bench.wants(0.0)
        outstanding += len(more)
        asked += more
        assert outstanding <= WINDOW_CHUNKS
        assert outstanding > 0 or index == 99, "the window is refilled before it is empty"
    assert asked == list(range(100)), "each chunk once, in order"
    assert bench.complete


def test_silence_repeats_the_question_and_patience_doubles() -> None:
    bench = TransferBench(4)
    bench.transfer.end(bench.digest)
    assert bench.wants(0.0) == [0, 1, 2, 3]
    repeated: list[float] = []
    for tenth in range(1, 1000):
        if bench.wants(tenth / 10):
            repeated.append(tenth / 10)
    gaps = [b - a for a, b in zip([0.0, *repeated], repeated, strict=False)]
    assert gaps[:5] == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0])
    assert max(gaps) == pytest.approx(TIMING.patience_max)


@pytest.mark.parametrize(("seconds", "most"), [(0.9, 64), (3.0, 64 + 2 * WINDOW_CHUNKS)])
def test_a_slow_link_is_not_asked_twice_but_perhaps_in_the_beginning(
    seconds: float, most: int
) -> None:
    """Chunks that take longer than the timeout are on their way: the first wait shows that."""
    bench = TransferBench(64)
    bench.transfer.end(bench.digest)
    asked, now = len(bench.wants(0.0)), 0.0
    for index in range(64):
        arrives = now + seconds  # of each; the last of a window comes far later than its request
        while now < arrives - 0.05:
            now += 0.1
            asked += len(bench.wants(now))
        assert bench.add(index, now)
        asked += len(bench.wants(now))
    assert asked <= most


@pytest.mark.parametrize("pushed", [True, False])
def test_a_damaged_chunk_is_fetched_again_at_once(pushed: bool) -> None:
    bench = TransferBench(4)
    if not pushed:
        bench.transfer.end(bench.digest)
        assert bench.wants(0.0) == [0, 1, 2, 3]
    piece = bench.pieces[1]
    assert not bench.transfer.store(1, crc32c(piece) ^ 1, piece, 0.0, pushed=pushed)
    assert bench.transfer.damaged == 1
    assert bench.chunks.here == 0
    assert bench.wants(0.0) == ([0, 1] if pushed else [1])
    assert not bench.buffer.any(), "nothing of it was kept"


def test_a_chunk_of_another_size_is_damaged_though_its_checksum_is_right() -> None:
    bench = TransferBench(4)
    for piece in (b"", b"x" * (CHUNK - 1), b"x" * (CHUNK + 1)):
        assert not bench.transfer.store(0, crc32c(piece), piece, 0.0, pushed=True)
    assert bench.transfer.damaged == 3


def test_endless_damage_does_not_make_an_endless_storm() -> None:
    bench = TransferBench(1)
    bench.transfer.end(bench.digest)
    asked = len(bench.wants(0.0))
    for _ in range(1000):
        bench.transfer.store(0, 0, bench.pieces[0], 0.0, pushed=False)
        asked += len(bench.wants(0.0))
    assert asked == 1 + DAMAGED_MAX


def test_doubled_chunks_and_chunks_out_of_range_change_nothing() -> None:
    bench, forged = TransferBench(2), b"\xff" * CHUNK
    assert bench.add(0, 0.0)
    assert not bench.transfer.store(0, crc32c(forged), forged, 0.0, pushed=True)
    assert not bench.transfer.store(2, 0, b"", 0.0, pushed=True)
    assert bench.chunks.here == 1
    assert bytes(bench.buffer[:CHUNK]) == bench.pieces[0]


@given(st.integers(0, 60), st.integers(0, 2**32), st.floats(0.0, 0.7))
def test_any_order_and_any_loss_end_whole(chunks: int, seed: int, loss: float) -> None:
    draw = random.Random(seed).random
    bench = TransferBench(chunks)
    now = 0.0
    for index in sorted(range(chunks), key=lambda _: draw()):
        if draw() > loss:
            bench.add(index, now, pushed=True)
            assert bench.chunks.here <= chunks
    bench.transfer.end(bench.digest)
    for _ in range(4000):  # so much virtual time that bad luck alone cannot fail this test
        for index in bench.wants(now):
            if index >= 0 and draw() > loss:
                bench.add(index, now)
        if bench.complete:
            break
        now += 0.5
    assert bench.chunks.proves(bench.digest)
    assert np.array_equal(bench.buffer, bench.data)


def test_a_lent_chunk_is_taken_where_it_lies() -> None:
    bench = TransferBench(3)
    lease = bench.lend(1)
    lease.view[lease.count :][:5] = bench.pieces[1][:5]
    lease.received(5)
    assert not bench.add(1, 0.0), "the same chunk by another way is ignored meanwhile"
    lease.view[lease.count :] = bench.pieces[1][5:]
    lease.received(len(bench.pieces[1]) - 5)
    assert bench.transfer.store(1, crc32c(bench.pieces[1]), lease, 0.0, pushed=True)
    assert bytes(bench.buffer[CHUNK : 2 * CHUNK]) == bench.pieces[1]
    assert bench.lends(1, CHUNK) is None, "it is here"
    assert bench.lends(2, CHUNK) is None, "the last one is shorter"
    assert bench.lends(3, CHUNK) is None, "there is none"


@pytest.mark.parametrize("how", ["damaged", "short", "cut off"])
def test_a_lent_chunk_that_fails_is_fetched(how: str) -> None:
    bench = TransferBench(3)
    bench.transfer.end(bench.digest)
    assert bench.wants(0.0) == [0, 1, 2]
    lease = bench.lend(1)
    lease.view[lease.count :] = bytes(CHUNK)
    lease.received(CHUNK if how == "damaged" else 3)
    if how == "cut off":
        lease.cancel()
    else:
        crc = crc32c(bench.pieces[1])
        assert not bench.transfer.store(1, crc, lease, 0.0, pushed=True)
    assert not lease.live
    assert bench.wants(0.0) == [1]


def test_a_place_that_is_lent_again_is_taken_from_the_first() -> None:
    bench = TransferBench(3)
    first, second = bench.lend(0), bench.lend(1)
    assert (first.live, second.live) == (False, True)


def test_bytes_that_are_trickling_in_are_not_silence() -> None:
    bench = TransferBench(3)
    lease = bench.lend(0)
    for tenth in range(1, 9):
        lease.received(1)
        assert bench.wants(tenth * TIMING.quiet) == []
