"""Chunks cover a version exactly, and their map says which are here, however they come.

(Checksums and digests are those of the vectors.)
"""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import ChunkPlan, Chunks, Memory
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Chunk
from weightbus.bus.publisher.offers import announcement
from weightbus.bus.worker.transfer import Transfer
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT, digest_of
from weightbus.codecs.native import crc32c
from weightbus.codecs.protocol_limits import CHUNK_BYTES_MAX
from weightbus.tests.simulation.virtual_shell import version_of


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


CHUNK, NBYTES = 4, 18
WAYS = ("sent", "damaged", "short", "leased", "leased, damaged", "cut off")
EVENTS = ("ask", "new connection", "start over")


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from(WAYS), st.integers(0, 5)), st.sampled_from(EVENTS))
    )
)
def test_here_is_what_came_and_was_verified(steps: list[str | tuple[str, int]]) -> None:
    data = np.arange(1, NBYTES + 1, dtype=np.uint8)
    version = version_of(1, data, CHUNK, 1)
    chunks = Chunks(version.plan, np.zeros(NBYTES, np.uint8), [None] * 5, version.layout.id)
    transfer, here = Transfer(announcement(version), chunks, 0.0, Timing()), dict[int, int]()
    for step in steps:
        if step == "start over":
            transfer.restart()
            here.clear()
        elif step == "new connection":
            transfer.reconnected(0.0)
        elif isinstance(step, str):
            asked = [i for first, n in transfer.wants(0.0) for i in range(first, first + n)]
            assert not here.keys() & asked, "nothing is asked for that is here"
        else:
            way, index = step
            piece = bytes(data[index * CHUNK :][:CHUNK])
            comes(transfer, way, index, piece)
            if way in ("sent", "leased") and piece:
                here[index] = crc32c(piece)
        assert chunks.crcs == [here.get(i) for i in range(5)]
        assert chunks.here == len(here)
        for index in here:
            begin, end = version.plan.span(index)
            assert bytes(chunks.memory[begin:end]) == bytes(data[begin:end])
        assert chunks.proves(version.digest) == (len(here) == 5 and not chunks.proves("0" * 64))
        chunks.whole, chunks.digest = False, ""
    transfer.pull()
    transfer.reconnected(0.0)
    asked = [i for first, n in transfer.wants(0.0) for i in range(first, first + n)]
    assert asked == [i for i in range(5) if i not in here], "and the rest is asked for, once"


def comes(transfer: Transfer, way: str, index: int, piece: bytes) -> None:
    """Have a chunk come in some way."""
    proof = crc32c(piece)
    if way in ("sent", "damaged", "short"):
        sent = {"damaged": bytes(len(piece)), "short": piece[1:]}.get(way, piece)
        transfer.store(index, proof, sent, 0.0, pushed=True)
        return
    chunk = Chunk(model="a", epoch=1, version=1, index=index, crc=proof)
    lease = transfer.lend(chunk, len(piece))
    if lease is None:
        return
    lease.view[:] = piece if way == "leased" else bytes(len(piece))
    lease.received(len(piece) - (way == "cut off"))
    if way == "cut off":
        lease.cancel()
    else:
        transfer.store(index, proof, lease, 0.0, pushed=True)


@given(st.permutations(range(5)), st.sampled_from(["all", "but one", "given", "of a patch"]))
def test_a_digest_is_what_was_hashed_or_what_was_proved(order: list[int], how: str) -> None:
    data, layout = np.arange(NBYTES, dtype=np.uint8), "ab" * 32
    plan, right = ChunkPlan(NBYTES, CHUNK), digest_of(layout, data, CHUNK)
    crcs = [crc32c(data[b:e]) for b, e in map(plan.span, range(5))]
    about = "" if how == "of a patch" else layout
    mine, theirs = (Chunks(plan, data, [None] * 5, about, 0, whole) for whole in (True, False))
    if how == "given":
        mine.fill("c" * 64)
    for index in order[: 4 if how == "but one" else 5]:
        for chunks in (mine, theirs):
            assert chunks.digest in ("", "c" * 64), "before all are hashed"
            chunks.put(index, crcs[index])
            chunks.put(index, crcs[index])
    known = {"all": right, "given": "c" * 64}.get(how, "")
    assert (mine.digest, mine.whole) == (known, True)
    assert (theirs.digest, theirs.whole) == ("", False), "what others say is to be proved"
    assert not theirs.proves("0" * 64)
    assert theirs.proves(right) == theirs.whole == (how in ("all", "given"))
    assert theirs.digest == right * theirs.whole
    assert not theirs.proves("0" * 64)


def test_memory_is_in_use_while_somebody_has_it_or_a_slice_of_it() -> None:
    chunks: Chunks[Memory] = Chunks(ChunkPlan(8, 4), np.arange(8, dtype=np.uint8), [None] * 2)
    assert not chunks.in_use
    view, other = chunks.lend(), chunks.lend()
    assert view is other
    assert view.ctypes.data == chunks.memory.ctypes.data, "no copy"
    piece = view.data[4:]
    del view, other
    gc.collect()
    assert chunks.in_use
    del piece
    assert not chunks.in_use
    assert bytes(chunks.lend()) == bytes(range(8)), "as often as one likes"
