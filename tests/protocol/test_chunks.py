"""Chunks cover a version exactly. (Checksums and digests are those of the vectors.)"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import ChunkPlan
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX


@given(st.integers(0, 300), st.integers(1, 70))
def test_chunks_lie_end_to_end_and_only_the_last_is_short(nbytes: int, chunk_bytes: int) -> None:
    plan = ChunkPlan(nbytes, chunk_bytes)
    spans = [plan.span(index) for index in range(plan.count)]
    assert [end for _, end in spans] == [begin for begin, _ in spans[1:]] + [nbytes] * bool(spans)
    assert all(end - begin == chunk_bytes for begin, end in spans[:-1])
    assert all(0 < end - begin <= chunk_bytes for begin, end in spans)
    assert sum(end - begin for begin, end in spans) == nbytes


def test_no_bytes_are_no_chunks() -> None:
    assert ChunkPlan(0).count == 0
    assert ChunkPlan(CHUNK_BYTES_DEFAULT + 1).count == 2


@pytest.mark.parametrize("index", [-1, 2, 10**20])
def test_there_is_no_such_chunk(index: int) -> None:
    with pytest.raises(IndexError, match="of 2: chunks are numbered from 0"):
        ChunkPlan(10, 5).span(index)


@pytest.mark.parametrize(("nbytes", "chunk_bytes"), [(1, 0), (1, CHUNK_BYTES_MAX + 1), (-1, 1)])
def test_impossible_plans_are_refused(nbytes: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        ChunkPlan(nbytes, chunk_bytes)
