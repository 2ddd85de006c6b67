"""A model whose weights are sharded over two ranks: each rank loads its own shards."""

import subprocess
import sys
from pathlib import Path

import pytest
from vllm.distributed.weight_transfer.base import ModuleSource

import weightbus
from weightbus.tests.serving.real.test_architectures import (
    NEAR,
    _publisher,
    answered,
    apart,
    expected,
    served,
    trained,
    trainer_of,
)

__all__ = ["_publisher"]  # the fixture

RANKS = 2
STALE = "weightbus.tests.serving.real.stale"
STALE_SECONDS = 400.0


@pytest.fixture(name="unbound", autouse=True)
def _unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both ranks run on any core: vLLM would bind each rank to a NUMA node of its own."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen3", "llama-tied", "qwen3-moe"])
def test_two_ranks_answer_as_transformers_does(
    name: str, tmp_path: Path, publisher: weightbus.Publisher, capfd: pytest.CaptureFixture[str]
) -> None:
    old = trained(name, 1)
    llm = served(tmp_path / "model", old, tensor_parallel_size=RANKS)
    assert "it is not proved" not in "".join(capfd.readouterr())
    assert apart(answered(llm), expected(old)) < NEAR
    new = trained(name, 2)
    trainer = trainer_of(llm, publisher, ModuleSource(new), RANKS)
    for seed in (2, 3):
        new.load_state_dict(trained(name, seed).state_dict())
        trainer.send_weights()
        assert trainer.receipt.in_state("applied") == ["vllm-dp0-rank0", "vllm-dp0-rank1"]
        assert apart(answered(llm), expected(new)) < NEAR, f"after the version of seed {seed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_head_that_is_stale_on_one_rank_alone_is_refused_by_its_rank(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joined logits change with the other rank's half, so they would hide it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("STALE_RANK", str(rank))
    done = subprocess.run(  # noqa: S603 - of ours
        [sys.executable, "-m", STALE, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=STALE_SECONDS,
        check=True,
    )
    words = done.stdout + done.stderr
    assert "initialization failed" in words, words[-5000:]
    refused = "these parts of it still compute with old weights: its head"
    assert f"rank {rank} of {RANKS}, {refused}" in words
    assert f"rank {1 - rank} of {RANKS}, " not in words
