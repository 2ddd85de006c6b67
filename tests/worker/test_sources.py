"""Chunks that sources have are accepted from nowhere else until that is over; then all is. (N1)"""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from weightbus.bus.chunks import ChunkPlan
from weightbus.bus.effects import Effect, FetchFromSources, Notice
from weightbus.bus.messages import Source
from weightbus.bus.protocol_limits import TRIES_MAX
from weightbus.bus.staged import SourceFetch, indexes_of
from weightbus.bus.worker.events import SourceFetched
from weightbus.codecs.native import crc32c
from weightbus.tests.worker.test_follower import Bench, ready, version
from weightbus.tests.worker.test_transfer import TIMING, TransferBench

COUNT = 12


def sources(*chunks: Sequence[int]) -> list[Source]:
    """Return sources that have ranges of chunks: first and count of each, in turn."""
    return [Source(f"tcp://rank-{i}:1", [*each]) for i, each in enumerate(chunks, 1)]


def fetch_bench(*chunks: Sequence[int]) -> tuple[TransferBench, SourceFetch]:
    bench = TransferBench(COUNT)
    bench.transfer.announce = replace(bench.transfer.announce, sources=sources(*chunks))
    job = bench.transfer.fetch_from_sources()
    assert job is not None
    return bench, job


def arrive(bench: TransferBench, job: SourceFetch, *indexes: int) -> list[tuple[int, int]]:
    """Write chunks as a source's thread does; return what it then tells."""
    for index in indexes:
        begin, end = job.plan.span(index)
        job.buffer[begin:end] = np.frombuffer(bench.pieces[index], np.uint8)
    return [(index, crc32c(bench.pieces[index])) for index in indexes]


def test_a_range_beyond_the_version_has_no_effect_and_no_chunk_is_at_two_sources() -> None:
    _, job = fetch_bench([10, 5, 3], [2, 2, 10, 1], [])
    assert [[*indexes] for _, indexes in job.sources] == [[10, 11], [2, 3]]
    assert indexes_of(Source("", [2**20, 2**20]), ChunkPlan(100, 10)) == []


def test_without_chunks_at_sources_nothing_is_fetched_there() -> None:
    bench = TransferBench(COUNT)
    for none in ([], sources([]), sources([COUNT, 4])):
        bench.transfer.announce = replace(bench.transfer.announce, sources=none)
        assert bench.transfer.fetch_from_sources() is None


@given(st.integers(0, 2**32))
def test_each_chunk_comes_from_one_place_and_what_sources_lack_is_fetched(seed: int) -> None:
    rng = random.Random(seed)
    there = sorted(rng.sample(range(COUNT), rng.randrange(1, COUNT)))
    bench, job = fetch_bench([n for index in there for n in (index, 1)])
    bench.transfer.end(bench.digest)
    now, lacking = 0.0, there[rng.randrange(len(there) + 1) :]
    requested = set[int]()
    for index in set(there).difference(lacking):
        now += 0.01
        requested.update(bench.wants(now))
        assert not bench.add(index, now), "a chunk that a source writes was written, too"
        assert bench.lends(index, len(bench.pieces[index])) is None
        bench.transfer.fetched(arrive(bench, job, index), now, over=False)
    requested.update(bench.wants(now))
    assert not requested.intersection(there)
    assert job.complete == (not lacking)
    bench.transfer.fetched((), now, over=True)
    for _ in range(COUNT):
        requested.update(bench.wants(now))
        for index in requested.difference(i for i, crc in enumerate(bench.chunks.crcs) if crc):
            assert bench.add(index, now)
    assert requested == set(range(COUNT)).difference(there).union(lacking)
    assert bench.complete
    assert bench.chunks.proves(bench.digest)
    assert np.array_equal(bench.buffer, bench.data)


def test_while_only_sources_are_to_send_the_publisher_is_not_late() -> None:
    bench, job = fetch_bench([0, COUNT])
    bench.transfer.end(bench.digest)
    for step in range(10 * TRIES_MAX):
        assert bench.wants(step * TIMING.patience_max) == []
    assert not bench.transfer.exhausted
    bench.transfer.fetched((), 1000.0, over=True)
    assert bench.wants(1000.0) == [*range(COUNT)]
    assert not job.complete


def test_a_pushed_chunk_of_a_lease_does_not_end_the_fetch() -> None:
    bench, job = fetch_bench([1, 1])
    bench.lend(0)
    bench.lend(2)  # ends the first lease
    assert job.live
    assert not bench.transfer.revoke()
    assert not job.live


# The version of a model.


def fetch_of(effects: list[Effect]) -> SourceFetch:
    (job,) = (e.job for e in effects if isinstance(e, FetchFromSources))
    return job


class TestFollower:
    """A follower of a model whose versions have sources."""

    @pytest.fixture(name="bench")
    def _bench(self) -> Bench:
        return Bench()

    def test_a_version_is_ready_once_sources_and_publisher_have_sent_it(self, bench: Bench) -> None:
        v = version(1)
        job = fetch_of(bench.announce(v, sources=sources([1, 1])))
        assert ready(bench.feed(v, 0, 2) + bench.end(v)) == []
        job.buffer[8:16] = 1
        told = [(1, crc32c(b"\1" * 8))]
        (staged,) = ready(bench.done(bench.follower.happened(SourceFetched(job, told), bench.now)))
        assert staged.digest == v.digest
        # The end of the threads comes late, and has no effect.
        assert bench.follower.happened(SourceFetched(job, (), over=True), bench.now) == []

    def test_what_a_source_does_not_send_is_fetched_and_the_reason_is_logged(
        self, bench: Bench
    ) -> None:
        v = version(1)
        job = fetch_of(bench.announce(v, sources=sources([1, 1])))
        bench.feed(v, 0, 2)
        bench.end(v)
        over = SourceFetched(job, (), over=True, faults=["it is gone"])
        effects = bench.follower.happened(over, bench.now)
        assert [e.text for e in effects if isinstance(e, Notice)] == ["it is gone"]
        (staged,) = ready(bench.feed(v, 1, pushed=False))
        assert staged.digest == v.digest

    def test_a_buffer_is_used_again_only_once_no_source_writes_there(self, bench: Bench) -> None:
        first, second = (
            fetch_of(bench.announce(version(number), sources=sources([0, 3]))) for number in (1, 2)
        )
        assert not first.live
        assert second.live
        assert second.buffer is not first.buffer
        told = [(i, crc32c(b"\2" * (8 if i < 2 else 4))) for i in range(3)]
        second.buffer[:] = 2
        bench.end(version(2))
        (staged,) = ready(
            bench.done(bench.follower.happened(SourceFetched(second, told), bench.now))
        )
        assert staged.version == 2
        waiting = bench.announce(version(3))
        assert not any(isinstance(e, FetchFromSources) for e in waiting), (
            "a source still writes there"
        )
        assert bench.follower.happened(SourceFetched(first, [(0, 1)]), bench.now) == []
        bench.done(bench.follower.happened(SourceFetched(first, (), over=True), bench.now))
        (staged,) = ready(bench.feed(version(3)) + bench.end(version(3)))
        assert staged.data is first.buffer
