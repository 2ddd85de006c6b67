"""Each chunk of a sharded version is sent by one rank, which gets the bytes that it lacks."""

import random
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.chunks import ChunkPlan
from weightbus.python_client.publishing.placement import placed

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_after_the_exchange_each_rank_has_the_chunks_that_it_sends(seed: int) -> None:
    rng = random.Random(seed)
    nbytes, ranks, most = rng.randint(1, 400), rng.randint(1, 5), rng.choice([1, 3, 1000])
    cuts = sorted({0, nbytes, *(rng.randint(0, nbytes) for _ in range(rng.randint(0, 30)))})
    pieces = [(a, b, rng.randrange(ranks)) for a, b in pairwise(cuts)]
    rng.shuffle(pieces)
    plan = ChunkPlan(nbytes, rng.randint(1, 60))
    placement = placed(pieces, plan, ranks, most)
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


def test_a_version_without_bytes_has_no_chunks() -> None:
    placement = placed([], ChunkPlan(0, 8), 3)
    assert [placement.of(rank) for rank in range(3)] == [[], [], []]
    assert placement.foreign.batches(8) == []
