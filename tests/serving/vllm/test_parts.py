"""Two ranks of real models need half of most tensors each, and load it as they load whole ones."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from weightbus.tests.serving.vllm.parts_rank import ARCHITECTURES, RANKS

SECONDS = 360.0
Needs = dict[str, dict[str, Any]]  # what a rank needs of each model


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Needs]]:
    folder = tmp_path_factory.mktemp("parts")
    logs = [folder / f"log-{rank}" for rank in range(RANKS)]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "weightbus.tests.serving.vllm.parts_rank", str(rank)]
            command += [str(folder), *ARCHITECTURES]
            with log.open("w") as errors:
                made = subprocess.Popen(  # noqa: S603 - of ours
                    command, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            ranks.append(made)
        found: list[Needs] = []
        for rank, log in zip(ranks, logs, strict=True):
            said, _ = rank.communicate(timeout=SECONDS)
            assert rank.returncode == 0, log.read_text()[-3000:]
            lines = [line for line in said.splitlines() if line.startswith("{")]
            found.append({k: v for line in lines for k, v in json.loads(line).items()})
        yield found
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(SECONDS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_rank_needs_its_half(name: str, ranks: list[Needs]) -> None:
    one, other = (needs[name] for needs in ranks)
    most = 0.65 if name == "phi3" else 0.51  # its q, k and v are one tensor, and gate and up
    for needs in (one, other):
        assert needs["share"] < most
        assert needs["ordinary"] == []
    for tensor, shape in one["shapes"].items():
        boxes = [needs["part"][tensor] for needs in (one, other)]
        for size, *ends in zip(shape, *boxes, strict=True):
            reached = sorted(ends)
            assert reached[0][0] == 0
            assert reached[1][0] <= reached[0][1], f"{tensor}: no rank needs all of it"
            assert max(end for _, end in ends) == size
