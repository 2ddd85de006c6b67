"""Models that are sharded over ranks: refused at once where one rank gives them alone.

The other rank takes no part meanwhile, so a call that asks for the whole model would wait for it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from weightbus.tests.client import sharded_ranks
from weightbus.tests.client.ranks import SECONDS, run_ranks
from weightbus.tests.client.sharded_ranks import RANKS

EVERY_RANK = "on every rank call weightbus.gather(model).publish("
RANK_0 = "gathers it on rank 0 and publishes it there"


def seen(folder: Path) -> dict[str, Any]:
    """Return what rank 0 saw, once both ranks have ended."""
    said = run_ranks(sharded_ranks.__file__, RANKS, folder)
    saw: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return saw


@pytest.mark.ranks
# One test, since each worker of a run in parallel would start ranks of its own.
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_one_rank_alone_is_told_at_once_and_all_ranks_publish_as_in_the_guide(
    tmp_path: Path,
) -> None:
    saw = seen(tmp_path)
    for place, text in saw["FSDP1"].items():
        if place == "target in a mapping":
            assert "in a mapping is not a target; give it by itself" in text
            continue
        assert "sharded by FullyShardedDataParallel" in text, (place, text)
        assert EVERY_RANK in text, (place, text)
        assert RANK_0 in text, (place, text)
    for place in ("publish", "publish_async", "prepare", "target, checked", "scheme, tensordict"):
        text = saw["FSDP2"][place]
        assert "a DTensor, of which each rank holds a part" in text, (place, text)
        assert EVERY_RANK in text, (place, text)
        assert RANK_0 in text, (place, text)
    assert "bias: its memory has been freed" in saw["freed"], "FSDP2 frees what it has gathered"
    assert saw["whole, FSDP1"]
    assert saw["whole, FSDP2"]
