"""The batch script for Slurm: as Slurm runs it, signals it and requeues it, with a stand-in."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.ports import lasting_ports

SECONDS = 100.0  # eight processes start on a busy machine
EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm"
JOB = EXAMPLE / "job.sh"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS)]


class Queue:
    """Runs the script as Slurm does, again and again: two nodes, two workers on each."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self.folder = stack, folder
        (folder / "bin").mkdir()
        stand_ins = {
            "srun": f'exec {sys.executable} {Path(__file__).with_name("srun.py")} "$@"',
            "scontrol": f'echo "$@" >> {folder / "requeued"}',
            "weightbus": f'exec {sys.executable} -m weightbus "$@"',
            "python": f'exec {sys.executable} "$@"',
        }
        for name, line in stand_ins.items():
            file = folder / "bin" / name
            file.write_text(f"#!/bin/sh\n{line}\n")
            file.chmod(0o755)
        (port, _) = lasting_ports(2)
        self._environ = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "EXAMPLE": str(EXAMPLE),
            "RUN": str(folder / "run"),
            "PORT": str(port),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS": "4",
            "SLURMD_NODENAME": "127.0.0.1",
        }

    def start(self, steps: int, log: Path) -> "subprocess.Popen[bytes]":
        opened = self._stack.enter_context(log.open("wb"))
        job = subprocess.Popen(  # noqa: S603 - our own
            ["/bin/bash", str(JOB)],
            stdout=opened,
            stderr=opened,
            env=self._environ | {"STEPS": str(steps)},
            start_new_session=True,
        )
        self._stack.callback(end, job)
        return job

    def requeued(self) -> list[str]:
        file = self.folder / "requeued"
        return file.read_text().splitlines() if file.exists() else []


def end(job: "subprocess.Popen[bytes]") -> None:
    """End all processes of a job, whose session is its own."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


@pytest.fixture
def queue(tmp_path: Path) -> Generator[Queue]:
    with ExitStack() as stack:
        yield Queue(stack, tmp_path)


def test_a_job_at_its_time_limit_is_requeued_and_goes_on(queue: Queue, tmp_path: Path) -> None:
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    job = queue.start(10**9, first)
    # Workers are with the publisher until their relay answers.
    through = [rf"rank-{rank} applied [^;]* through node-{rank // 2}\b" for rank in range(4)]

    def behind_relays() -> bool:
        line = first.read_text().rpartition("\nstep ")[2]
        return all(re.search(each, line) for each in through) or job.poll() is not None

    wait_for(behind_relays, "all workers are behind the relay of their node", SECONDS)
    job.send_signal(signal.SIGTERM)  # to the script alone, as `--signal=B:TERM@120` has it
    assert job.wait(SECONDS) == 1, first.read_text()
    text = first.read_text()
    assert "begins after step 0\n" in text
    assert queue.requeued() == [f"requeue {os.getpid()}"]
    done = int(re.findall(r"^step (\d+): ", text, re.MULTILINE)[-1])

    job = queue.start(done + 5, second)
    assert job.wait(SECONDS) == 0, second.read_text()
    text = second.read_text()
    assert f"begins after step {done}\n" in text
    for rank in range(4):
        assert f"rank-{rank} runs step {done + 5}: {done + 5}\n" in text
    assert len(queue.requeued()) == 1, "all steps are done"


def test_a_job_whose_trainer_fails_is_not_requeued(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").write_text("no folder")
    log = tmp_path / "log"
    assert queue.start(1, log).wait(SECONDS) == 1
    assert "StateFolderError" in log.read_text()
    assert queue.requeued() == []


def test_the_script_is_good_bash() -> None:
    checks = [["/bin/bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
    for check in checks:
        done = subprocess.run([*check, str(JOB)], capture_output=True, text=True, check=False)  # noqa: S603
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
