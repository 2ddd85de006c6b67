"""Each chunk of a sharded version is sent by one rank, which gets the bytes that it lacks; so is
each block of a patch encoded."""

import random
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import ChunkPlan
from weightbus.python_client.publishing.placement import (
    placement_of,
    placement_of_blocks,
    uncovered,
)

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_after_the_exchange_each_rank_has_the_chunks_that_it_sends(seed: int) -> None:
    rng = random.Random(seed)
    nbytes, ranks, most = rng.randint(1, 400), rng.randint(1, 5), rng.choice([1, 3, 1000])
    cuts = sorted({0, nbytes, *(rng.randint(0, nbytes) for _ in range(rng.randint(0, 30)))})
    pieces = [(a, b, rng.randrange(ranks)) for a, b in pairwise(cuts)]
    rng.shuffle(pieces)
    plan = ChunkPlan(nbytes, rng.randint(1, 60))
    placement = placement_of(pieces, plan, ranks, most)
    has = np.zeros(nbytes, np.int64)
    for begin, end, rank in pieces:
        has[begin:end] = rank
    sends = has.copy()
    for part in placement.foreign.batches(rng.randint(1, 50)):
        for old in range(ranks):
            for new in range(ranks):
                for begin, end in part.between(old, new):
                    assert (has[begin:end] == old).all()
                    sends[begin:end] = new
    for index in range(plan.count):
        begin, end = plan.span(index)
        owner = placement.owners[index]
        assert (sends[begin:end] == owner).all()
        if most == 1000:  # otherwise neighbours are sent by one rank
            counts = np.bincount(has[begin:end], minlength=ranks)
            assert counts[owner] == counts.max()
    ranges = [placement.ranges(rank) for rank in range(ranks)]
    for rank, each in enumerate(ranges):
        pairs = zip(each[::2], each[1::2], strict=True)
        assert [i for first, n in pairs for i in range(first, first + n)] == placement.of(rank)
    assert sum(map(len, ranges)) // 2 <= most
    assert sorted(i for rank in range(ranks) for i in placement.of(rank)) == [*range(plan.count)]


@given(SEEDS)
def test_a_byte_that_no_rank_or_two_ranks_have_is_found(seed: int) -> None:
    rng = random.Random(seed)
    begin, nbytes, ranks = rng.randint(0, 50), rng.randint(1, 60), rng.randint(1, 4)
    end = begin + nbytes
    cuts = sorted({begin, end, *(rng.randint(begin, end) for _ in range(rng.randint(0, 5)))})
    pieces = [(a, b, rng.randrange(ranks)) for a, b in pairwise(cuts)]
    rng.shuffle(pieces)
    assert uncovered(pieces, begin, end) == ""
    at = rng.randrange(len(pieces))
    first, last, rank = pieces[at]
    pieces[at] = first + rng.randint(-3, 3), last + rng.randint(-3, 3), rank
    owners = np.zeros(end + 10, np.int64)
    for first, last, _ in pieces:
        owners[max(0, first + 5) : max(0, last + 5)] += 1
    right = (owners[begin + 5 : end + 5] == 1).all() and owners.sum() == nbytes
    assert (uncovered(pieces, begin, end) == "") == right


def test_what_is_wrong_with_parts_is_named() -> None:
    assert uncovered([], 4, 4) == ""
    assert uncovered([(4, 8, 0), (12, 16, 2)], 4, 16) == "its bytes from 4 on are on no rank"
    assert uncovered([(4, 8, 0)], 4, 16) == "its bytes from 4 on are on no rank"
    assert uncovered([(8, 16, 2), (4, 9, 1)], 4, 16) == "its bytes from 4 on are on ranks 1 and 2"
    assert uncovered([(4, 20, 3)], 4, 16) == "rank 3 has 4 bytes beyond it"


def test_a_placement_of_other_ranks_or_bytes_has_another_hash() -> None:
    plan = ChunkPlan(12, 4)
    pieces = [(0, 5, 0), (5, 12, 1)]
    others = [[(0, 5, 1), (5, 12, 0)], [(0, 6, 0), (6, 12, 1)], [(0, 4, 0), (4, 12, 1)]]
    hashes = {placement_of(some, plan, 2).hash() for some in [pieces, *others, pieces[::-1]]}
    assert len(hashes) == 4


def test_a_version_without_bytes_has_no_chunks() -> None:
    placement = placement_of([], ChunkPlan(0, 8), 3)
    assert [placement.of(rank) for rank in range(3)] == [[], [], []]
    assert placement.foreign.batches(8) == []


@given(SEEDS)
def test_after_another_exchange_each_rank_has_the_blocks_that_it_encodes(seed: int) -> None:
    rng = random.Random(seed)
    nbytes, ranks = rng.randint(1, 400), rng.randint(1, 5)
    plan = ChunkPlan(nbytes, rng.randint(1, 60))
    chunks = placement_of([(0, nbytes, 0)], plan, ranks)
    chunks.owners[:] = [rng.randrange(ranks) for _ in range(plan.count)]
    begins = sorted({0, *(rng.randrange(nbytes) for _ in range(rng.randint(0, 20)))})
    blocks = placement_of_blocks(chunks, plan, begins, ranks)
    has = np.repeat(chunks.owners, plan.chunk_bytes)[:nbytes]
    encodes = has.copy()
    for part in blocks.foreign.batches(rng.randint(1, 50)):
        for old in range(ranks):
            for new in range(ranks):
                for begin, end in part.between(old, new):
                    assert (has[begin:end] == old).all()
                    encodes[begin:end] = new
    for owner, begin, end in zip(blocks.owners, begins, [*begins[1:], nbytes], strict=True):
        assert (encodes[begin:end] == owner).all()
        counts = np.bincount(has[begin:end], minlength=ranks)
        assert counts[owner] == counts.max(), "fewer bytes would have to change ranks"
