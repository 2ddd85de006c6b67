"""The demo's language model: it learns, and every worker writes the same with the same version."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from weightbus import Publisher
from weightbus.examples.demo.llm.answers import Answers, from_line, to_line
from weightbus.examples.demo.llm.learner import LanguageLearner, LanguageModel
from weightbus.examples.demo.llm.subject import TYPESCRIPT, AnswersTally
from weightbus.examples.demo.llm.transformer import (
    ASKED,
    LENGTH,
    MARK,
    Transformer,
    decode,
    encode,
    greedy,
    numpy_weights,
    reward,
    sampling,
)
from weightbus.examples.demo.policy import MODEL
from weightbus.tests.cli.starting import python

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60.0
# The answers of two workers differ where the best two letters are as near as what they compute
# differs, some 1e-14; nearer than this they were never seen to be.
GAP_MIN = 1e-9


def random_model(seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel()


def transformer_of(model: LanguageModel) -> Transformer:
    weights = numpy_weights()
    state = model.state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == {n: a.shape for n, a in weights.items()}
    for name, tensor in state.items():
        weights[name][...] = tensor.numpy()
    return Transformer(weights)


@pytest.fixture(scope="module")
def typescript() -> Path:
    if shutil.which("node") is None and not os.environ.get("CI"):
        pytest.skip("node is not installed")
    subprocess.run(  # noqa: S603
        ["make", "-C", ROOT / "node_client", "worker"],  # noqa: S607
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
    )
    return TYPESCRIPT


@contextmanager
def writing(program: list[str | Path], address: str, name: str) -> Generator[Iterator[Answers]]:
    """Run a worker; give what it writes, line by line."""
    with subprocess.Popen(  # noqa: S603
        [*program, address, "--name", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield map(from_line, interrupted(process))
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(SECONDS) == 0, "it ends with its trainer"
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield its lines; at each somebody presses Ctrl-C, which is for the trainer."""
    assert process.stdout is not None
    for line in process.stdout:
        process.send_signal(signal.SIGINT)
        yield line


def test_workers_compute_what_the_trainer_does() -> None:
    model = random_model(1)
    questions = decode(np.random.default_rng(2).integers(8, size=(50, LENGTH)))
    tokens = encode([question + MARK for question in questions])
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(tokens))[:, -1]
    logits = transformer_of(model.float()).logits(tokens)
    assert np.abs(logits - expected.numpy()).max() < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_the_two_best_letters_are_never_too_near_to_tell(seed: int) -> None:
    gaps: list[float] = []

    def watched(logits: Any) -> Any:
        best = np.sort(logits, axis=-1)
        gaps.extend(best[:, -1] - best[:, -2])
        return greedy(logits)

    for version in range(100):
        transformer_of(random_model(100 * seed + version)).answers(ASKED, watched)
    assert len(gaps) == 100 * len(ASKED) * LENGTH
    assert min(gaps) > GAP_MIN


def test_the_worker_in_typescript_writes_what_python_writes(typescript: Path) -> None:
    python = [sys.executable, "-m", "weightbus.examples.demo.llm.worker"]
    with (
        Publisher() as publisher,
        writing(list(python), publisher.address, "python") as in_python,
        writing([typescript], publisher.address, "typescript") as in_typescript,
    ):
        publisher.wait_for_workers(2, timeout=SECONDS, model=MODEL)
        for seed in range(10):
            model = random_model(seed)
            version = publisher.publish(MODEL, model, timeout=SECONDS).version
            written = [summary_of(version, lines) for lines in (in_python, in_typescript)]
            assert written[0].greedy == transformer_of(model).answers(ASKED, greedy)
            assert written[0].greedy == written[1].greedy
            assert {len(batch.questions) for batch in written} == {32}


def summary_of(version: int, lines: Iterator[Answers]) -> Answers:
    """Return the first batch that was written with a version."""
    return next(batch for batch in lines if batch.version == version)


def test_the_worker_in_typescript_fits_two_hundred_lines() -> None:
    source = ROOT / "node_client" / "examples" / "generation_worker.ts"
    assert len(source.read_text().splitlines()) <= 200


def test_the_base_model_mostly_repeats_and_learns_to_answer_backwards() -> None:
    learner, luck = LanguageLearner(seed=0), np.random.default_rng(0)

    def batch() -> Answers:
        questions = decode(luck.integers(8, size=(256, LENGTH)))
        answers = transformer_of(learner.policy).answers(questions, sampling(luck))
        return Answers("w", 1, questions, answers, [])

    base = batch().reward
    assert 0.15 < base < 0.5, "a fifth of its text is backwards, and letters agree by chance"
    for step in range(40):
        learner.improve([batch()], step / 40)
    assert batch().reward > base + 0.2


def test_a_batch_survives_its_line_and_bad_ones_are_no_batches() -> None:
    sent = Answers("w0", 3, ["abcdef"], ["fedcba"], list(ASKED))
    assert from_line(to_line(sent)) == sent
    assert (sent.steps, sent.reward) == (1, 1.0)
    for bad in (b"{}", to_line(sent).replace(b'"fedcba"', b'"fed"'), b'{"worker":1}'):
        with pytest.raises(msgspec.DecodeError):
            from_line(bad)


def test_a_reward_is_the_part_that_is_backwards() -> None:
    assert reward("abcdef", "fedcba") == 1.0
    assert reward("abcdef", "fedxyz") == 0.5
    assert reward("aaaaab", "aaaaaa") == pytest.approx(5 / 6)


def test_workers_that_answer_differently_are_a_fault() -> None:
    tally = AnswersTally(["w0", "w1"])
    for worker, said in (("w0", "fedcba"), ("w1", "fedcbb")):
        tally.played(Answers(worker, 1, ["abcdef"], ["fedcba"], [said]), 0.0)
        tally.played(Answers(worker, 2, ["abcdef"], ["fedcba"], ["fedcba"]), 0.0)
    assert tally.agreed() == {"w0": 1, "w1": 1}
    (fault,) = tally.faults()
    assert "version 1 is answered differently" in fault


@pytest.mark.timeout(240)
def test_the_demo_raises_the_reward(typescript: Path, tmp_path: Path) -> None:
    assert typescript.exists()
    plot = tmp_path / "llm.png"
    words = ("-m", "weightbus", "demo", "--model", "llm", "--seconds", "20")
    done = python(*words, "--plot", plot, "--json", timeout=200)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["last_return"] > result["first_return"] + 0.1
    assert set(result["agreed"]) == {"w0", "w1", "w2"}
    assert min(result["agreed"].values()) > 3, "all of them were compared, again and again"
    assert plot.stat().st_size > 10_000
