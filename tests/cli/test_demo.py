"""The demo, in real processes: it learns, everybody gets the last version, nobody stays behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from weightbus.examples.demo.course import run_demo
from weightbus.examples.demo.policy import (
    ACTIONS,
    OBSERVATION,
    log_odds,
    log_probability,
    numpy_weights,
    torch_network,
)
from weightbus.python_client.cli.outcome import UsageError

PNG = b"\x89PNG\r\n\x1a\n"


@contextmanager
def demo(*arguments: object) -> Generator["subprocess.Popen[str]"]:
    """Run the demo in a process of its own, which is ended at the end of the block."""
    # Tests that a shell runs in the background ignore SIGINT, and so would the demo.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "weightbus", "demo", "--json", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C to it is not one to the tests
    )
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_learns_and_everybody_gets_the_last_version(tmp_path: Path) -> None:
    plot = tmp_path / "demo.png"
    with demo("--workers", 3, "--seconds", 10, "--plot", plot) as run:
        out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert (result["kind"], result["achieved"], result["faults"]) == ("demo", True, [])
    assert result["versions"] > 10
    assert result["last_return"] > result["first_return"]
    assert result["publish_ms"]["p50"] <= result["publish_ms"]["p95"] <= result["publish_ms"]["max"]
    assert set(result["workers"]) == {"w0", "w1", "w2"}
    for worker in result["workers"].values():
        assert (worker["state"], worker["version"], worker["lag"]) == (
            "live",
            result["versions"],
            0,
        )
        assert worker["episodes"] > 0
    assert result["accident"]["victim"] == "w1"
    assert result["accident"]["noticed_s"] > 0
    assert result["accident"]["back_s"] > 0
    assert result["workers"]["w1"]["applied"] < result["workers"]["w0"]["applied"]
    assert "w1 is killed" in err
    image = plot.read_bytes()
    assert image.startswith(PNG)
    assert len(image) > 10_000


def workers_of(run: "subprocess.Popen[str]", count: int) -> list[psutil.Process]:
    """Wait until the demo is at work, and return its workers."""
    assert run.stderr is not None
    for line in run.stderr:  # the first line of progress comes once episodes do
        if "version" in line:
            break
    children = psutil.Process(run.pid).children()
    assert len(children) == count
    return children


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_worker_outlives_the_demo(sent: signal.Signals, code: int) -> None:
    with demo("--workers", 2, "--seconds", 60) as run:
        workers = workers_of(run, 2)
        os.kill(run.pid, sent)
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
        assert run.wait(30) == code


@pytest.mark.slow
def test_a_worker_that_dies_by_itself_ends_the_demo() -> None:
    with demo("--workers", 2, "--seconds", 60) as run:
        first, other = workers_of(run, 2)
        first.terminate()
        _, err = run.communicate(timeout=60)
        assert run.returncode == 1
        assert f"(process {first.pid}) ended with code -15" in err
        assert not other.is_running()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": 0}, "at least 1"),
        ({"seconds": 0}, "more than 0"),
        ({"plot": Path("no such folder") / "demo.png"}, "there is no folder no such folder"),
    ],
)
def test_what_cannot_work_is_said_at_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_demo(**given)


def test_both_sides_compute_the_same_policy() -> None:
    torch.manual_seed(1)
    network, weights = torch_network(ACTIONS), numpy_weights()
    state = network.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        name: array.shape for name, array in weights.items()
    }
    for name, tensor in state.items():
        weights[name][...] = tensor.numpy()
    for observation in np.random.default_rng(2).normal(size=(20, OBSERVATION)).astype(np.float32):
        with torch.no_grad():
            expected = torch.log_softmax(network(torch.from_numpy(observation)), dim=0)
        odds = log_odds(weights, observation)
        assert log_probability(odds, 0) == pytest.approx(float(expected[0]), abs=1e-5)
        assert log_probability(odds, 1) == pytest.approx(float(expected[1]), abs=1e-5)
