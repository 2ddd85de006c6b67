"""The transfer of a part: what the checksums of all chunks say of those that arrived. (T4)"""

from typing import Any

import numpy as np

from weightbus.bus.chunks import Chunks, plan_of
from weightbus.bus.cut import Cut
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Announce
from weightbus.bus.worker.transfer import Transfer
from weightbus.codecs.checksum import digest
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.codecs.parts import PartLayout

DATA, CHUNK = bytes(range(40)), 10
SUMS = [crc32c(DATA[at : at + CHUNK]) for at in range(0, len(DATA), CHUNK)]


def test_a_chunk_that_is_not_the_published_one_is_fetched_again() -> None:
    layout = Layout.plan([("w", "U8", (len(DATA),))])
    plan, wanted = plan_of(len(DATA), CHUNK), digest(layout.id, CHUNK, SUMS)
    memory = np.zeros(20, np.uint8)
    chunks = Chunks(plan, memory, [None] * plan.count, layout.id)
    form: Any = {"layout": layout.id, "layout_bytes": 10, "nbytes": 40, "chunk_bytes": CHUNK}
    terms: Any = {"commit": "auto", "acknowledge": "applied", "encoding": "raw"}
    announce = Announce(model="m", epoch=1, version=1, **form, **terms)
    cut = Cut(PartLayout(layout, {"w": ((0, 20),)}), plan)
    transfer = Transfer(announce, chunks, 0.0, Timing(), cut=cut, pieces=True)
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
    assert memory.tobytes() == DATA[:20]
