"""Trainers that others wrote publish what they train, and workers run it."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from weightbus import ApplyError, Publisher, StateError, Subscriber
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


def train_transformer(callback: Any, steps: int, tmp_path: Any, **options: Any) -> Any:
    model = tiny()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )
    HuggingFaceTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, callbacks=[callback]
    ).train()
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


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_best_weights_that_a_trainer_loads_in_the_end_are_published(
    every: int, tmp_path: Any
) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    worst_is_best = {"greater_is_better": True, "eval_strategy": "steps", "save_strategy": "steps"}
    replica = tiny(1).eval()
    tokens = torch.arange(8).reshape(1, 8)
    with bus(replica) as (publisher, worker):
        model = train_transformer(
            huggingface.PublishWeights(publisher, every=every),
            4,
            tmp_path,
            **best,
            **worst_is_best,
            eval_steps=1,
            save_steps=1,
        )
        with worker.reading(), torch.no_grad():
            assert torch.equal(replica(tokens).logits, model.eval()(tokens).logits)
        last = worker.update("policy")
    assert last is not None
    assert last.metadata["step"] == "4"


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
        callbacks=callback if isinstance(callback, list) else [callback],
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
    assert update.version == 4  # steps 0, 2 and 4, each once, and the end
    assert flat(replica) == flat(module.actor)


class Doubled(Callback):
    """Changes the weights in a hook of the end, as callbacks that average do."""

    def __init__(self, hook: str) -> None:
        def double(_trainer: Any, module: Any) -> None:
            with torch.no_grad():
                module.actor.weight.mul_(2)

        setattr(self, hook, double)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "ends_with",
    [
        lambda: StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1),
        WeightAveraging,
        lambda: EMAWeightAveraging(decay=0.5),
        lambda: Doubled("on_train_end"),
        lambda: Doubled("on_fit_end"),
    ],
    ids=["swa", "averaging", "ema", "on_train_end", "on_fit_end"],
)
def test_what_other_callbacks_end_a_fit_with_is_published(
    ends_with: Any, every: int, first: bool
) -> None:
    module, replica = Regression(), torch.nn.Linear(4, 2)
    with bus(replica) as (publisher, worker):
        ours = lightning.PublishWeights(publisher, every=every, part=lambda m: m.actor)
        callbacks = [ours, ends_with()] if first else [ends_with(), ours]
        lightning_trainer(callbacks, -1, max_epochs=3).fit(module, loader(2))
        x = torch.ones(1, 4)
        with worker.reading(), torch.no_grad():
            assert torch.equal(replica(x), module.actor(x))
        last = worker.update("policy")
    assert last is not None
    assert last.metadata["step"] == "6"


class Alternating(Regression):
    """Two optimizers, of which the first batch steps one alone: the count of steps stays odd."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, *given: Any) -> Any:
        batch, index = given
        for optimizer in self.optimizers()[1 if index == 0 else 0 :]:  # type: ignore[index]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.actor, self.critic)]


def test_two_optimizers_that_count_by_twos() -> None:
    module, replica = Alternating(), torch.nn.Linear(4, 2)
    with bus(replica) as (publisher, worker):
        callback = lightning.PublishWeights(publisher, every=10, part=lambda m: m.actor)
        lightning_trainer(callback, -1, max_epochs=1).fit(module, loader(50))
        last = worker.update("policy")
    assert last is not None
    assert last.metadata["step"] == "99"
    assert last.version == 11  # step 0, nine multiples of ten that were passed, and the end


def test_a_fit_of_no_steps_publishes_nothing() -> None:
    with Publisher() as publisher:
        lightning_trainer(lightning.PublishWeights(publisher), 0).fit(Regression(), loader(1))
        assert publisher.publish("policy", torch.nn.Linear(1, 1), require=0).version == 1


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


class Pair(gymnasium.Env[Any, Any]):
    """Observations of two parts, one of them far from zero, for an action of two dimensions."""

    observation_space = gymnasium.spaces.Dict(
        {
            "far": gymnasium.spaces.Box(-1e6, 1e6, (3,), np.float32),
            "near": gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
    )
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _observed(self) -> Any:
        spread = self.np_random.normal(500.0, 200.0, 3)
        return {
            "far": spread.astype(np.float32),
            "near": self.np_random.uniform(-1, 1, 2).astype(np.float32),
        }

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        return self._observed(), float(action.sum()), bool(self.np_random.random() < 0.1), False, {}


NORMALISED: list[Any] = [
    pytest.param(lambda: gymnasium.make("CartPole-v1"), {}, "MlpPolicy", id="one array"),
    pytest.param(Pair, {"norm_obs_keys": ["far"]}, "MultiInputPolicy", id="a mapping"),
]


@pytest.mark.parametrize(("env", "options", "policy"), NORMALISED)
def test_a_worker_acts_as_the_trainer_does_that_normalises(
    env: Any, options: Any, policy: str
) -> None:
    """Each version has weights and statistics of one moment, and observations of any size count."""
    rollouts: Any = {"n_steps": 32, "batch_size": 16, "n_epochs": 1, "device": "cpu"}
    around = VecNormalize(DummyVecEnv([env]), clip_obs=2.0, epsilon=1e-4, **options)
    made = PPO(policy, around, seed=1, **rollouts)
    here = VecNormalize(DummyVecEnv([env]), training=False, **options)
    replica = PPO(policy, here, seed=2, **rollouts)
    seen = [here.observation_space.sample() for _ in range(64)]
    if isinstance(seen[0], np.ndarray):
        seen = [np.clip(each, -50, 50) for each in seen]
    acted: dict[str, list[Any]] = {}
    published: list[list[Any]] = []

    def actions(algorithm: Any, normalize: Any) -> list[Any]:
        return [
            algorithm.predict(normalize.normalize_obs(each), deterministic=True)[0].tolist()
            for each in seen
        ]

    class Recording(stable_baselines3.PublishWeights):
        def _on_rollout_start(self) -> None:
            super()._on_rollout_start()
            published.append(actions(self.model, around))
            assert worker.wait_for_version("policy", len(published), timeout=SECONDS)

    def act(update: Any) -> None:
        acted[update.metadata["step"]] = actions(replica, here)

    with bus(stable_baselines3.target(replica), on_commit=act) as (publisher, worker):
        made.learn(96, callback=Recording(publisher))
        last = worker.update("policy")
    assert last is not None
    assert last.metadata["step"] == "3"
    assert acted.pop("3") == actions(made, around)  # in all 64
    assert acted == {str(step): wanted for step, wanted in enumerate(published)}
    assert actions(replica, here) != [
        replica.predict(each, deterministic=True)[0].tolist() for each in seen
    ]


def test_a_worker_without_the_statistics_is_refused_by_name() -> None:
    around = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]))
    made = PPO("MlpPolicy", around, n_steps=32, batch_size=16, device="cpu")
    plain = PPO("MlpPolicy", "CartPole-v1", device="cpu")
    assert stable_baselines3.target(plain) is plain.policy
    with (
        Publisher() as publisher,
        Subscriber(publisher.address, {"policy": plain.policy}) as worker,
    ):
        publisher.wait_for_workers(1, SECONDS)
        callback = stable_baselines3.PublishWeights(publisher, timeout=SECONDS)
        callback.init_callback(made)
        callback.on_training_start({}, {})
        wanted = r"vec_normalize\.obs_rms\.mean: published as F64 \[4\], not in the target"
        with pytest.raises(ApplyError, match=wanted):
            worker.receive(SECONDS)


def test_rewards_that_are_normalised_are_no_part_of_a_policy() -> None:
    around = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]), norm_obs=False)
    made = PPO("MlpPolicy", around, device="cpu")
    assert stable_baselines3.target(made) is made.policy


def test_a_worker_keeps_the_trainers_statistics() -> None:
    here = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]))
    replica = PPO("MlpPolicy", here, device="cpu")
    with pytest.raises(StateError, match="training=False in a worker"):
        stable_baselines3.target(replica)
    here.training = False
    stable_baselines3.target(replica)
    here.reset()
    here.training = True  # in silence, what arrives would no longer be what it normalises with
    with pytest.raises(StateError, match="the trainer's, and come with its policy"):
        here.reset()


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


@pytest.mark.parametrize(
    ("counted", "every", "published"),
    [
        (range(0, 40_000, 2048), 10_000, [0, 10240, 20480, 30720]),  # environments step at once
        (range(0, 112_001, 8000), 50_000, [0, 56000, 104000]),
        (range(1, 250, 2), 100, [1, 101, 201]),
        (range(7, 23), 10, [7, 10, 20]),  # begun anew from a checkpoint
        (range(0, 101, 50), 10, [0, 50, 100]),
    ],
)
def test_steps_of_any_size_pass_multiples(counted: range, every: int, published: list[int]) -> None:
    assert steps_of(every, [*counted]) == [*published, counted[-1]]


def test_a_counter_that_goes_back_publishes_what_was_loaded() -> None:
    assert steps_of(10, [0, 9, 10, 25, 26, 12, 13, 14, 20]) == [0, 10, 25, 12, 20, 20]


def steps_of(every: int, counted: list[int]) -> list[int]:
    """Publish out of a loop with these counts; return those that its versions say."""
    said: list[int] = []

    class Recording(Publisher):
        def publish_async(self, model: str, weights: object, **options: Any) -> Any:
            said.append(int(options["metadata"]["step"]))
            return super().publish_async(model, weights, **options)

    with Recording() as publisher:
        steps = StepPublisher(publisher, "policy", every=every, require=0)
        steps.begin(counted[0], {"w": np.zeros(1)})
        for step in counted[1:]:
            steps.step(step, {"w": np.full(1, float(step))})
        steps.end(counted[-1], {"w": np.full(1, float(counted[-1]))})
    return said


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
