"""The examples that run by themselves do, and print what every worker runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["ray_actors.py", "rpc_plain_pytorch.py"])
def test_every_worker_runs_every_version(name: str) -> None:
    lines = [line for line in printed(name) if " runs version " in line]
    assert len(lines) == 6
    for step in range(3):
        for line in lines[2 * step : 2 * step + 2]:
            assert line.endswith(f"runs version {step + 2} and acts {4.0 * step}")


def test_every_worker_of_a_torchrl_collector_runs_every_update() -> None:
    lines = printed("torchrl_collector.py")
    runs = [line.split(" and acts ") for line in lines if line.startswith("batch")]
    for step in range(4):
        for worker in range(2):
            ran, acted = runs[2 * step + worker]
            assert ran == f"batch {step}: worker {worker} runs update {step}"
            if step > 0:  # until then, what chance has put into the network
                assert float(acted) == pytest.approx((step - 1) / 10, abs=0.005)
    assert lines[-1] == "now at version {0: 5, 1: 5} by worker"


def printed(name: str) -> list[str]:
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
