"""TRL's own trainer, whose weights go over the bus: `make serving`, in an environment with TRL."""

import inspect
import os
import queue
import re
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AttentionInterface, LlamaForCausalLM
from trl.experimental.async_distillation import async_distillation_trainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import (
    RolloutWorkerProtocol,
    WeightTransferProtocol,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TREE_ATTENTION

import weightbus
from weightbus.examples.grpo_trainer import Rollouts, attention, make_model, samples
from weightbus.tests.cli.starting import python
from weightbus.tests.serving.ranks import PlainEngine
from weightbus.tests.serving.standin import Local, Server, Worker
from weightbus.trl import WeightTransfer
from weightbus.types import Pairs

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 60.0  # far more than anything here takes
SHORT_SECONDS = 0.5  # that a trainer waits for a worker whose batch ends later
RISES_SECONDS = 240  # for 30 steps, on a machine that is busy with other tests


class Written:
    """Rollouts that are written down: one batch more than steps, which TRL reads ahead."""

    def __init__(self, count: int) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.stopped = False
        for number in range(count):
            group = {
                "version": 1 + number // 2,
                "prompt": [1],
                "answers": [[2, 3], [4, 5]],
                "log_probs": [[-2.0, -2.0], [-2.0, -2.0]],
                "rewards": [0.0, 1.0],
            }
            for sample in samples(group, number):
                self.rollout_buffer.put(sample)

    def start(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError(f"no more rollouts are written down, for {stale_after_s} s")


def trainer_of(folder: Path, rollouts: Written, transfer: WeightTransfer) -> AsyncGRPOTrainer:
    make_model(str(folder))
    trainer = AsyncGRPOTrainer(
        model=str(folder),
        args=AsyncGRPOConfig(
            output_dir=f"{folder}/out",
            max_steps=4,
            per_device_train_batch_size=4,
            token_budget=0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["0"]}),
        rollout_worker=rollouts,
        weight_transfer=transfer,
    )
    AttentionInterface.register(TREE_ATTENTION, attention)
    return trainer


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (WeightTransferProtocol, WeightTransfer),
        (async_distillation_trainer.WeightTransferProtocol, WeightTransfer),
        (RolloutWorkerProtocol, Rollouts),
    ],
)
def test_the_protocols_are_those_that_we_know(theirs: type, ours: type) -> None:
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if not name.startswith("_"):
            taken = inspect.signature(getattr(ours, name)).parameters
            assert [*taken] == [*inspect.signature(method).parameters]


@pytest.mark.timeout(RISES_SECONDS + 30)
def test_the_reward_rises() -> None:
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    done = python(ROOT / "examples" / "grpo_trainer.py", timeout=RISES_SECONDS, env=threads)
    rewards = [float(r) for r in re.findall(r"^step \d+: reward ([\d.]+)$", done.stdout, re.M)]
    assert len(rewards) == 30
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert first < 0.6, rewards
    assert last > first + 0.2, rewards
    told = done.stdout.splitlines()[-1]
    assert re.search(r"weightbus/version_max=31 .*weightbus/workers=2 weightbus/lag_versions", told)


def test_all_that_is_trained_arrives_and_the_log_has_each_update(tmp_path: Path) -> None:
    with weightbus.Publisher() as publisher:
        rollouts, transfer = Written(10), WeightTransfer(publisher, timeout=SECONDS)
        trainer = trainer_of(tmp_path, rollouts, transfer)
        served = LlamaForCausalLM.from_pretrained(tmp_path)
        with weightbus.Subscriber(
            publisher.address, {"policy": served}, name="w"
        ).start() as worker:
            publisher.wait_for_workers(1, SECONDS)
            trainer.train()
            assert worker.wait_for_version("policy", 5, timeout=SECONDS) is not None
        for name, trained in trainer.model.named_parameters():
            assert torch.equal(served.get_parameter(name), trained), name
    logged = [e["weightbus/version_max"] for e in trainer.state.log_history if "loss" in e]
    assert logged == [2.0, 3.0, 4.0, 5.0]
    assert rollouts.stopped


class Engine(PlainEngine):
    """A rank of a model's own names, which may be told to fail to load."""

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__(number)
        served = LlamaForCausalLM.from_pretrained(folder).named_parameters()
        self.model = {name: np.zeros(value.shape, "<f4") for name, value in served}
        self.fails = False

    def loaded(self, n: int) -> None:
        if self.fails and n == 1:
            raise RuntimeError("told to fail")


@pytest.mark.parametrize("fails", [False, True])
def test_servers_run_what_is_trained_and_are_never_left_paused(tmp_path: Path, fails: bool) -> None:
    make_model(str(tmp_path))
    engines = [Engine(number, tmp_path) for number in range(2)]
    server, rollouts = Server([Local(Worker(engine)) for engine in engines]), Written(10)
    transfer = WeightTransfer("tcp://127.0.0.1:0", server=server.url, timeout=SECONDS)
    trainer = trainer_of(tmp_path, rollouts, transfer)
    engines[1].fails = fails
    if fails:
        with pytest.raises(weightbus.PublishError, match=r"rank1 .*told to fail"):
            trainer.train()
    else:
        trainer.train()
        for engine in engines:
            for name, trained in trainer.model.named_parameters():
                assert np.array_equal(engine.model[name], trained.detach().numpy()), name
        assert transfer.receipt is not None
        assert server.version == f"{transfer.receipt.epoch}.5"
        logged = [e for e in trainer.state.log_history if "weightbus/paused_s" in e]
        assert len(logged) == 4
    assert rollouts.stopped
    assert not server.paused
    for engine in engines:
        engine.shutdown()
    server.close()


def test_a_worker_that_fails_ends_the_training(tmp_path: Path) -> None:
    def load(pairs: Pairs) -> None:
        if pairs.version == 3:
            raise weightbus.UnchangedError("the engine is full")

    with weightbus.Publisher() as publisher:
        rollouts, transfer = Written(10), WeightTransfer(publisher, timeout=SECONDS)
        trainer = trainer_of(tmp_path, rollouts, transfer)
        with weightbus.Subscriber(publisher.address, {"policy": load}, name="w").start():
            publisher.wait_for_workers(1, SECONDS)
            with pytest.raises(weightbus.PublishError, match=r"w failed .*the engine is full"):
                trainer.train()
    assert rollouts.stopped


@pytest.mark.parametrize("waited", [True, False])
def test_the_training_waits_for_a_worker_that_is_at_a_batch_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, waited: bool
) -> None:
    """The worker applies the last update in both cases; the trainer knows it only if it waits."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    batch_is_over = threading.Event()

    class Transfer(WeightTransfer):
        def init_weight_transfer(self) -> None:
            super().init_weight_transfer()
            assert self.publisher is not None
            self.publisher.wait_for_workers(1, SECONDS)

        def destroy(self) -> None:
            if waited:
                batch_is_over.set()
            super().destroy()

    linger = SECONDS if waited else SHORT_SECONDS
    transfer = Transfer(address, timeout=SECONDS, linger=linger)
    trainer = trainer_of(tmp_path, Written(10), transfer)
    served = LlamaForCausalLM.from_pretrained(tmp_path)

    def equal() -> bool:
        return all(
            torch.equal(served.get_parameter(name), trained)
            for name, trained in trainer.model.named_parameters()
        )

    with weightbus.Subscriber(address, {"policy": served}, name="w") as worker:

        def generate() -> None:
            assert worker.receive(SECONDS) is not None
            assert batch_is_over.wait(RISES_SECONDS)
            while (update := worker.receive(SECONDS)) is not None and update.version < 5:
                pass

        generates = threading.Thread(target=generate, daemon=True)
        generates.start()
        trainer.train()
        assert transfer.publisher is None  # closed
        assert equal() == waited
        assert transfer.receipt is not None
        applied = transfer.receipt.version == 5 and transfer.receipt.in_state("applied") == ["w"]
        assert applied == waited
        assert ("w staged" in caplog.text and "of the end of training" in caplog.text) != waited
        batch_is_over.set()
        generates.join(SECONDS)
    assert equal()
