"""The examples that run by themselves do, and print what every worker runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["ray_actors.py", "rpc_plain_pytorch.py"])
def test_every_worker_runs_every_version(name: str) -> None:
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " runs version " in line]
    assert len(lines) == 6
    for step in range(3):
        for line in lines[2 * step : 2 * step + 2]:
            assert line.endswith(f"runs version {step + 2} and acts {4.0 * step}")
