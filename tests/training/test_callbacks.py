"""Trainers that others wrote publish what they train, and workers run it."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from stable_baselines3 import DQN, PPO
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from weightbus import Publisher, StateError, Subscriber
from weightbus.python_client.training import huggingface, lightning, stable_baselines3
from weightbus.python_client.training.generation import GenerationWorker
from weightbus.python_client.training.publishing import StepPublisher
from weightbus.tests.client.settling import settled

SECONDS = 60.0


def tiny(seed: int = 0) -> Any:  # its type says more than type checkers can follow
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


def flat(model: Any) -> bytes:
    return b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())


@contextmanager
def bus(target: Any, **options: Any) -> Generator[tuple[Publisher, Subscriber]]:
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"policy": target}, name="w0", **settled(options)) as worker,
    ):
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        yield publisher, worker


# Hugging Face.


def train_transformer(callback: Any, steps: int, tmp_path: Any) -> Any:
    model = tiny()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    HuggingFaceTrainer(model=model, args=args, train_dataset=rows, callbacks=[callback]).train()
    return model


def test_a_hugging_face_trainer(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    replica = tiny(1)
    with bus(replica) as (publisher, worker), caplog.at_level(logging.INFO, "weightbus.training"):
        model = train_transformer(huggingface.PublishWeights(publisher, every=2), 5, tmp_path)
        update = worker.wait_for_version("policy", 4, timeout=SECONDS)
    assert update is not None
    assert update.version == 4  # before the first step, after 2 and 4, and in the end
    assert flat(replica) == flat(model)
    said = [line.split(": ")[0] for line in caplog.messages if "policy version" in line]
    assert said == ["step 0", "step 2", "step 4", "step 5"]
    assert all("w0 " in line for line in caplog.messages if line.startswith("step"))


def test_generation_goes_on_between_versions() -> None:
    trained, generating = tiny(1).eval(), tiny(2).eval()  # without dropout
    prompt = torch.zeros((1, 2), dtype=torch.long)
    dropped: list[int] = []
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    with (
        Publisher() as publisher,
        GenerationWorker(
            publisher.address, generating, on_commit=lambda update: dropped.append(update.version)
        ) as worker,
    ):
        assert worker.version == 0
        publisher.wait_for_workers(1, SECONDS)
        for version in (1, 2, 3):
            with torch.no_grad():
                trained.transformer.wte.weight.add_(torch.randn(32, 16))
            done = publisher.publish_async("policy", trained, timeout=SECONDS)
            assert worker.wait_for_version(SECONDS)
            done.result()
            found = worker.generate(prompt, **options)
            assert torch.equal(found, trained.generate(prompt, **options))
            assert worker.version == version
    assert dropped == [1, 2, 3]


# Lightning.


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)

    def training_step(self, *given: Any) -> torch.Tensor:
        (batch, _index) = given
        return self.actor(batch).square().mean() + self.critic(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batches: int) -> Any:
    rows: Any = torch.randn(4 * batches, 4)
    return torch.utils.data.DataLoader(rows, batch_size=4)


def lightning_trainer(callback: Any, steps: int, **options: Any) -> Trainer:
    return Trainer(
        max_steps=steps,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def test_a_lightning_trainer_publishes_a_part() -> None:
    module, replica = Regression(), torch.nn.Linear(4, 2)
    with bus(replica) as (publisher, worker):
        callback = lightning.PublishWeights(publisher, every=2, part=lambda m: m.actor)
        trainer = lightning_trainer(callback, 4, accumulate_grad_batches=2)
        trainer.fit(module, loader(16))
        update = worker.wait_for_version("policy", 3, timeout=SECONDS)
    assert update is not None
    assert update.version == 3  # steps 0, 2 and 4, each once
    assert flat(replica) == flat(module.actor)


def test_a_training_that_fails_closes_the_publisher_that_it_made() -> None:
    class Failing(Regression):
        def training_step(self, *_: Any) -> torch.Tensor:
            raise ArithmeticError("the loss is not finite")

    callback = lightning.PublishWeights("tcp://127.0.0.1:0")
    with pytest.raises(ArithmeticError):
        lightning_trainer(callback, 1).fit(Failing(), loader(1))
    assert callback.publisher is None


# Stable-Baselines3.


@pytest.mark.parametrize(
    ("algorithm", "options", "versions"),
    [
        (PPO, {"n_steps": 32, "batch_size": 16, "n_epochs": 1}, 4),  # three rollouts, and the end
        (DQN, {"learning_starts": 8, "train_freq": 32, "buffer_size": 100}, 4),
    ],
)
def test_stable_baselines(algorithm: Any, options: dict[str, int], versions: int) -> None:
    made = algorithm("MlpPolicy", "CartPole-v1", seed=1, device="cpu", **options)
    replica = algorithm("MlpPolicy", "CartPole-v1", seed=2, device="cpu", **options)
    with bus(replica.policy) as (publisher, worker):
        made.learn(96, callback=stable_baselines3.PublishWeights(publisher))
        update = worker.wait_for_version("policy", versions, timeout=SECONDS)
        assert update is not None
        assert update.version == versions
        with worker.reading():
            assert flat(replica.policy) == flat(made.policy)
            observation = np.zeros(4, np.float32)
            ours, theirs = (m.predict(observation, deterministic=True)[0] for m in (replica, made))
            assert ours == theirs


# What all of them share.


def test_shards_are_refused_before_a_process_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callback = huggingface.PublishWeights("tcp://127.0.0.1:0")
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=0)
    control: Any = None
    args: Any = SimpleNamespace(fsdp=True)
    with pytest.raises(StateError, match="FSDP leaves no process with all of the weights"):
        callback.on_train_begin(args, state, control, model=tiny())
    args.fsdp = None
    monkeypatch.setattr(huggingface, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(StateError, match="ZeRO 3 leaves no process"):
        callback.on_train_begin(args, state, control, model=tiny())
    assert callback.publisher is None


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy])
def test_lightnings_shards_are_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = object.__new__(kind)  # to make one takes accelerators, or DeepSpeed itself
    monkeypatch.setattr(DeepSpeedStrategy, "zero_stage_3", True)
    trainer: Any = SimpleNamespace(strategy=strategy, is_global_zero=True, global_step=0)
    callback = lightning.PublishWeights("tcp://127.0.0.1:0")
    with pytest.raises(StateError, match=f"{kind.__name__} leaves no process"):
        callback.on_train_start(trainer, Regression())
    assert callback.publisher is None


def test_a_worker_that_fails_is_logged_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_update: object) -> None:
        raise ValueError("out of memory on the accelerator")

    replica = torch.nn.Linear(2, 2)
    with bus(replica, on_commit=refuse) as (publisher, _worker):
        steps = StepPublisher(publisher, "policy", every=1, timeout=SECONDS)
        steps.begin(0, torch.nn.Linear(2, 2))
        steps.end(1, torch.nn.Linear(2, 2))
    told = [line for line in caplog.messages if line.startswith("step 1: ")]
    assert "out of memory on the accelerator" in told[0]


def test_what_cannot_travel_ends_the_training_at_once() -> None:
    with Publisher() as publisher:
        steps = StepPublisher(publisher, "policy", every=1)
        with pytest.raises(StateError, match="on the meta device"):
            steps.begin(0, torch.nn.Linear(2, 2, device="meta"))


def test_a_publisher_of_its_own_is_bound_and_closed() -> None:
    steps = StepPublisher("tcp://127.0.0.1:0", "policy", every=3)
    assert steps.publisher is None
    steps.begin(0, {"a": np.zeros(3)})
    made = steps.publisher
    assert made is not None
    replica = {"a": np.ones(3)}
    with Subscriber(made.address, {"policy": replica}) as worker:
        worker.start()
        assert worker.wait_for_version("policy", 1, timeout=SECONDS)
        for step in (1, 2, 3, 3, 4):
            steps.step(step, {"a": np.full(3, float(step))})
        steps.end(4, {"a": np.full(3, 4.0)})
        update = worker.update("policy")
        assert update is not None
        assert update.version == 3
        assert replica["a"].tolist() == [4.0] * 3
    assert steps.publisher is None


def test_each_version_says_its_step() -> None:
    weights = {"w": torch.zeros(3)}
    with Publisher() as publisher, Subscriber(publisher.address, {"policy": weights}) as worker:
        worker.start()
        publisher.wait_for_workers(1, SECONDS)
        steps = StepPublisher(publisher, "policy", every=2, metadata={"git": "abc"})
        steps.begin(0, weights)
        for step in range(1, 6):
            steps.step(step, weights)
        steps.end(5, weights)
        last = worker.wait_for_version("policy", 4, timeout=SECONDS)
    assert last is not None
    assert last.metadata == {"step": "5", "git": "abc"}
