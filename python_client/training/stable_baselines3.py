"""Publishing from Stable-Baselines3 (`pip install 'weightbus[training]'`).

PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=PublishWeights("tcp://127.0.0.1:5555"))
"""

from typing import Unpack

from stable_baselines3.common.callbacks import BaseCallback

from ..options import PublishOptions
from ..publisher import Publisher
from .publishing import StepPublisher


class PublishWeights(BaseCallback):
    """Publishes the policy before every Nth rollout, so after the gradient steps before that.

    Args:
        publisher: A publisher, which stays open; or an address to bind one to, until the training
            is over.
        model: What the policy is called on the bus.
        every: Rollouts between two versions.
        **options: Keywords of `Publisher.publish`, such as `timeout` in seconds.
    """

    def __init__(
        self,
        publisher: Publisher | str,
        model: str = "policy",
        *,
        every: int = 1,
        **options: Unpack[PublishOptions],
    ) -> None:
        super().__init__()
        self._steps = StepPublisher(publisher, model, every=every, **options)
        self._rollouts = 0

    @property
    def publisher(self) -> Publisher | None:
        """The publisher, once the training has begun."""
        return self._steps.publisher

    def _on_training_start(self) -> None:
        self._steps.begin(self._rollouts, self.model.policy)

    def _on_rollout_start(self) -> None:
        self._steps.step(self._rollouts, self.model.policy)

    def _on_rollout_end(self) -> None:
        self._rollouts += 1

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._steps.end(self._rollouts, self.model.policy)
