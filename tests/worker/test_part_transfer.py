"""The transfer of a part: what the checksums of all chunks say of those that arrived. (T4)"""

from typing import Any

import numpy as np

from weightbus.bus.chunks import Chunks, Memory, plan_of
from weightbus.bus.cut import Cut
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Announce, Source
from weightbus.bus.worker.transfer import CHECKSUMS, Transfer
from weightbus.codecs.checksum import digest
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.parts import PartLayout

DATA, CHUNK = bytes(range(40)), 10
SUMS = [crc32c(DATA[at : at + CHUNK]) for at in range(0, len(DATA), CHUNK)]


def transfer_of(*sources: Source) -> tuple[Transfer, Chunks[Memory], str]:
    """Return the transfer of the first half of a version, its memory, and the version's digest."""
    layout = Layout.plan([("w", "U8", (len(DATA),))])
    plan = plan_of(len(DATA), CHUNK)
    chunks = Chunks(plan, np.zeros(20, np.uint8), [None] * plan.count, layout.id)
    form: Any = {"layout": layout.id, "layout_bytes": 10, "nbytes": 40, "chunk_bytes": CHUNK}
    terms: Any = {"commit": "auto", "acknowledge": "applied", "encoding": "raw"}
    announce = Announce(model="m", epoch=1, version=1, **form, **terms, sources=[*sources])
    cut = Cut(PartLayout(layout, {"w": ((0, 20),)}), plan)
    transfer = Transfer(announce, chunks, 0.0, Timing(), cut=cut, pieces=True)
    transfer.pull()
    return transfer, chunks, digest(layout.id, CHUNK, SUMS)


def test_a_chunk_that_is_not_the_published_one_is_fetched_again() -> None:
    transfer, chunks, wanted = transfer_of()
    wrong = bytes(CHUNK)  # undamaged by its own checksum
    assert transfer.store(0, crc32c(wrong), wrong, 0.0, pushed=False)
    assert transfer.store(1, SUMS[1], DATA[10:20], 0.0, pushed=False)
    transfer.end(wanted)
    transfer.take_checksums(np.array(SUMS[::-1], "<u4").tobytes(), 0.0)  # of another version
    assert chunks.here == 2
    transfer.take_checksums(np.array(SUMS, "<u4").tobytes(), 0.0)
    assert chunks.crcs == [None, *SUMS[1:]]
    assert not transfer.store(0, crc32c(wrong), wrong, 0.0, pushed=False)
    assert transfer.store(0, SUMS[0], DATA[:10], 0.0, pushed=False)
    assert chunks.proves(wanted)
    assert chunks.memory.tobytes() == DATA[:20]


def test_such_a_chunk_of_a_source_is_fetched_from_the_publisher() -> None:
    transfer, chunks, wanted = transfer_of(Source("tcp://127.0.0.1:1", [0, 4]))
    job = transfer.fetch_from_sources()
    assert job is not None
    assert job.sources == [("tcp://127.0.0.1:1", [0, 1])]  # and not what the part lacks
    transfer.end(wanted)
    assert transfer.wants(0.0) == [CHECKSUMS]
    transfer.take_checksums(np.array(SUMS, "<u4").tobytes(), 0.0)
    assert transfer.wants(0.0) == []
    transfer.fetched([(0, SUMS[0] ^ 1), (1, SUMS[1])], 0.0, over=False)
    assert chunks.crcs == [None, *SUMS[1:]]
    assert transfer.wants(0.0) == [(0, 1)]
