"""Patches to sharded models: each rank encodes its own part, and workers get the same bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weightbus.tests.client import patching_ranks
from weightbus.tests.client.ranks import SECONDS, run_ranks

RANKS = 2
MEMORY_MAX = 1.25  # a rank's memory rises by so many of its shards in a publish, patched or not
SHARE_MAX = 0.05  # of the version's bytes; one element in fifty changes

PATCHED = {
    *("second", "third", "fourth", "other shards again", "first shards again"),
    *("other layout again", "after that", "after raw", "after other", "after failures"),
    "after a quarter",
    *("auto, slow", "auto, slow again", "converted again"),
}
# Where there is nothing to build on, no rank may build on something else.
WHOLE = {
    *("first", "other shards", "first shards", "other layout", "a rank begins again", "raw"),
    "a quarter is other",
    *("nothing to build on", "all is other", "no memory", "no time", "auto, fast", "converted"),
}


@pytest.mark.ranks
# One test, since each worker of a run in parallel would start ranks of its own.
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_ranks_patch_what_they_publish_or_agree_that_there_is_no_patch(tmp_path: Path) -> None:
    printed = run_ranks(patching_ranks.__file__, RANKS, tmp_path, dies=RANKS - 1)
    ranks: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in printed]
    first = ranks[0]
    cases = {case: saw for case, saw in first.items() if case in PATCHED | WHOLE}
    assert cases.keys() == PATCHED | WHOLE
    assert {case: saw["faults"] for case, saw in cases.items() if saw["faults"]} == {}
    assert {case: saw["notices"] for case, saw in cases.items() if saw["notices"]} == {}
    ways = {case: saw["ways"] for case, saw in cases.items()}
    assert ways == {
        case: {"direct": "delta-1" if case in PATCHED else "raw", "plain": "raw"} for case in cases
    }
    assert max(cases[case]["share"] for case in PATCHED) < SHARE_MAX
    assert {cases[case]["share"] for case in WHOLE} == {1.0}
    for saw in ranks:
        assert max(rise for rise, _ in rises_of(saw)) <= MEMORY_MAX
    assert [way for _, way in rises_of(first)] == ["raw", "delta-1", "delta-1"]
    last = RANKS - 1
    assert re.match(f"WeightBusError: rank {last} has ended", first["died"]), first["died"]
    assert first["kept"], "a worker has other weights than before"


def rises_of(saw: dict[str, Any]) -> list[tuple[float, str]]:
    """Return how far a rank's memory rose in each publish, and how a worker received it."""
    rises = [saw[f"memory, {number}"] for number in range(3)]
    return [(rise, way) for rise, way in rises]
