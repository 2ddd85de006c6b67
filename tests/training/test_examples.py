"""Examples with the trainers and collectors of others run; workers run what these publish."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weightbus.tests.cli.starting import python

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SECONDS = 100.0
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


def printed(name: str | Path, *options: str) -> list[str]:
    done = python(EXAMPLES / name, *options, timeout=SECONDS, env=ENVIRONMENT)
    return done.stdout.splitlines()


def test_a_language_model_that_counts(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/bus"
    with subprocess.Popen(  # noqa: S603
        [sys.executable, EXAMPLES / "huggingface_trainer.py", address, "--steps", "61"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as trainer:
        try:
            lines = printed("generation_worker.py", address, "--seconds", "30", "--versions", "5")
            said = trainer.communicate(timeout=SECONDS)[1]
        finally:
            trainer.kill()
    assert [line.split(":")[0] for line in lines] == [f"version {n}" for n in range(1, 6)]
    assert lines[-1] == "version 5: 3 4 5 6 7 8 9 0 1 2"
    assert len(re.findall(r"step \d+: policy version \d+ .* applied after", said)) == 5


def test_a_line_by_lightning() -> None:
    assert printed("lightning_trainer.py")[-1] == "version 10: f(3) = 7.0"


def test_a_policy_by_stable_baselines() -> None:
    lines = printed("stable_baselines3_trainer.py", "--steps", "1024")
    assert re.fullmatch(r"version \d+: mean reward [\d.]+", lines[-1])


@pytest.mark.parametrize("with_bus", [True, False])
def test_ten_lines_of_difference(tmp_path: Path, with_bus: bool) -> None:
    lines = (EXAMPLES / "ppo_single_file.py").read_text().splitlines(keepends=True)
    without = [line for line in lines if not line.endswith("# weightbus\n")]
    assert len(lines) - len(without) == 10
    path = tmp_path / "ppo.py"
    path.write_text("".join(lines if with_bus else without))
    rows = printed(path, "--iterations", "3")
    assert len(rows) == (3 if with_bus else 0)
    assert all(re.fullmatch(r"\d: version \d gets [\d.]+", row) for row in rows)


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
