"""Chunks cover a version exactly, and its digest binds the layout, the order and every byte."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import ChunkPlan
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, digest
from weightbus.codecs.native import crc32c

ID = hashlib.sha256(b"a layout").hexdigest()


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


def test_the_checksum_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@given(st.binary(max_size=100), st.integers(0, 100))
def test_a_checksum_goes_on_from_another_over_any_buffer(data: bytes, at: int) -> None:
    array = np.frombuffer(data, np.uint8)
    head, tail = memoryview(bytearray(data))[:at], array[at:]
    assert crc32c(tail, crc32c(head)) == crc32c(data)


def test_the_digest_is_what_the_protocol_says() -> None:
    packed = bytes.fromhex(ID) + (7).to_bytes(8, "little") + b"\x01\0\0\0" + b"\xff\xff\xff\xff"
    assert digest(ID, 7, [1, 2**32 - 1]) == hashlib.sha256(packed).hexdigest()


def test_the_digest_binds_everything() -> None:
    other = hashlib.sha256(b"another layout").hexdigest()
    digests = [
        digest(ID, 7, [1, 2]),
        digest(ID, 7, [2, 1]),
        digest(ID, 8, [1, 2]),
        digest(other, 7, [1, 2]),
        digest(ID, 7, [1]),
        digest(ID, 7, []),
    ]
    assert len(set(digests)) == len(digests)
