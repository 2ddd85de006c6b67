"""The health check of the demo's containers: a program counts as alive while it prints lines."""

import os
import subprocess
import time
from pathlib import Path

import pytest

PULSE = Path(__file__).parents[2] / "examples" / "pulse"


def pulse(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # noqa: S603
        [str(PULSE), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PULSE": str(folder / "beat")},
    )


def test_lines_and_exit_status_pass_through(tmp_path: Path) -> None:
    done = pulse(tmp_path, "run", "sh", "-c", r"printf '%s\n' 'a  b\n' '' c; exit 7")
    assert done.stdout == "a  b\\n\n\nc\n"
    assert done.returncode == 7


def test_a_recent_line_is_a_pulse_and_an_old_one_is_none(tmp_path: Path) -> None:
    pulse(tmp_path, "run", "echo", "a line")
    assert pulse(tmp_path, "within", "60").returncode == 0
    long_ago = time.time() - 100
    os.utime(tmp_path / "beat", (long_ago, long_ago))
    late = pulse(tmp_path, "within", "60")
    assert late.returncode == 1
    assert late.stdout.startswith("the last line came 1")


def test_there_is_no_pulse_before_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "beat").touch()  # of an earlier run
    pulse(tmp_path, "run", "true")
    silent = pulse(tmp_path, "within", "60")
    assert (silent.returncode, silent.stdout) == (1, "no line yet\n")


@pytest.mark.parametrize("arguments", [(), ("stop",)])
def test_wrong_usage_says_how(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    wrong = pulse(tmp_path, *arguments)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage: pulse run PROGRAM")
