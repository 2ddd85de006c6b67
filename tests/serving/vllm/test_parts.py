"""Two ranks of real models need half of most tensors each, and load it as they load whole ones."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.serving.vllm.parts_rank import ARCHITECTURES, RANKS

SECONDS = 600.0
Needs = dict[str, dict[str, Any]]  # what a rank needs of each model


@pytest.fixture(name="ranks", scope="module")
def _ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Needs]]:
    folder = tmp_path_factory.mktemp("parts")
    ranks: list[subprocess.Popen[bytes]] = []
    outputs = [folder / f"needs-{rank}" for rank in range(RANKS)]
    logs = [folder / f"log-{rank}" for rank in range(RANKS)]
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-m", "weightbus.tests.serving.vllm.parts_rank", str(rank)]
            command += [str(folder), *ARCHITECTURES]
            with outputs[rank].open("w") as output, logs[rank].open("w") as log:
                ranks.append(subprocess.Popen(command, stdout=output, stderr=log))  # noqa: S603 - of ours

        def ended() -> bool:  # a rank that fails leaves the other one waiting
            codes = [started.poll() for started in ranks]
            assert not any(codes), "".join(log.read_text()[-3000:] for log in logs)
            return None not in codes

        wait_for(ended, "both ranks have recorded all models", SECONDS)
        yield [needs_in(output.read_text()) for output in outputs]
    finally:
        for started in ranks:
            started.kill()
            started.wait(SECONDS)


def needs_in(output: str) -> Needs:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {name: needs for line in lines for name, needs in line.items()}


@pytest.mark.timeout(660)
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
