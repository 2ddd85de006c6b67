"""Publishes from Stable-Baselines3 (`pip install 'weightbus[training]'`).

PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=PublishWeights("tcp://127.0.0.1:5555"))
"""

from typing import Any, NoReturn

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from ...codecs.errors import StateError
from .publishing import StepCallback


class PublishWeights(StepCallback, BaseCallback):
    """Publishes the policy before every Nth rollout, after the gradient steps of the previous one.

    If a `VecNormalize` normalises the observations, each version includes its current statistics,
    which the policy needs. With and without `VecNormalize`, the target of a worker is
    `target(algorithm)`.

    Args:
        publisher: A publisher, which stays open, or the address of a new publisher, which closes
            when the training is over.
        model: The policy's id on the bus.
        every: Rollouts between two versions.
        **options: Keywords of `Publisher.publish`, such as `timeout` in seconds.
    """

    _rollouts = 0  # the number of rollouts that have ended

    def _on_training_start(self) -> None:
        self._steps.begin(self._rollouts, _weights(self.model))

    def _on_rollout_start(self) -> None:
        self._steps.step(self._rollouts, _weights(self.model))

    def _on_rollout_end(self) -> None:
        self._rollouts += 1

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._steps.end(self._rollouts, _weights(self.model))


def target(algorithm: BaseAlgorithm) -> object:
    """Return the target of a worker for versions of `PublishWeights`.

    The target is the policy of the algorithm. If a `VecNormalize` of the algorithm's environment
    normalises observations, the target also has the statistics, `clip_obs` and `epsilon` of that
    `VecNormalize`, whose values then come from the trainer.

    Raises:
        StateError: The `VecNormalize` has `training=True`, so it would change its statistics.
    """
    normalize = _normalize(algorithm)
    if normalize is not None:
        if normalize.training:
            raise StateError(
                "VecNormalize has training=True here, so it would change the trainer's statistics; "
                "make it with training=False in a worker"
            )
        for _, statistics in _statistics(normalize):
            statistics.mean, statistics.var = np.array(statistics.mean), np.array(statistics.var)
            statistics.__class__ = _Received
        # Make the numbers 0-d arrays, which can be written in place and used like numbers.
        vars(normalize).update(
            clip_obs=np.array(normalize.clip_obs), epsilon=np.array(normalize.epsilon)
        )
    return _weights(algorithm)


class _Received(RunningMeanStd):
    """Statistics from the trainer, which the worker must not update itself."""

    def update_from_moments(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "these statistics are the trainer's, and come with its policy; set training=False on "
            "this worker's VecNormalize"
        )


def _normalize(algorithm: BaseAlgorithm) -> VecNormalize | None:
    """Return the `VecNormalize` that normalises an algorithm's observations, if any."""
    normalize = algorithm.get_vec_normalize_env()
    return normalize if normalize is not None and normalize.norm_obs else None


def _statistics(normalize: VecNormalize) -> list[tuple[str, RunningMeanStd]]:
    """Return the statistics of each part of an observation, with their names."""
    found = normalize.obs_rms
    if isinstance(found, dict):
        return [(f"obs_rms.{key}", statistics) for key, statistics in found.items()]
    return [("obs_rms", found)]


def _weights(algorithm: BaseAlgorithm) -> object:
    """Return all weights that determine actions: the policy's, and those of a `VecNormalize`."""
    normalize = _normalize(algorithm)
    if normalize is None:
        return algorithm.policy
    numbers: dict[str, object] = {"clip_obs": normalize.clip_obs, "epsilon": normalize.epsilon}
    for name, statistics in _statistics(normalize):
        numbers |= {f"{name}.mean": statistics.mean, f"{name}.var": statistics.var}
    # Convert arrays to tensors: a state with only one kind of tensor is recognised faster.
    arrays = {
        f"vec_normalize.{name}": torch.as_tensor(np.asarray(number, np.float64))
        for name, number in numbers.items()
    }
    return algorithm.policy.state_dict() | arrays
