"""Models that are sharded over ranks: refused at once where one rank gives them alone.

The other rank takes no part meanwhile, so a call that asks for the whole model would wait for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightbus.tests.client import sharded_ranks
from weightbus.tests.client.sharded_ranks import RANKS

SECONDS = 240.0
EVERY_RANK = "on every rank call get_model_state_dict("
RANK_0 = "then publish what it returns on rank 0"


def seen(folder: Path) -> dict[str, Any]:
    """Return what rank 0 saw, once both ranks have ended."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(RANKS):
            command = [sys.executable, sharded_ranks.__file__, str(rank), str(folder)]
            with (folder / f"{rank}.err").open("w") as errors:
                ranks.append(
                    subprocess.Popen(  # noqa: S603 - our own code
                        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
                    )
                )
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    words = [(folder / f"{rank}.err").read_text() for rank in range(RANKS)]
    assert [process.returncode for process in ranks] == [0] * RANKS, "\n".join(words)
    saw: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return saw


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
