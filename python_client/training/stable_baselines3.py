"""Publishing from Stable-Baselines3 (`pip install 'weightbus[training]'`).

PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=PublishWeights("tcp://127.0.0.1:5555"))
"""

from stable_baselines3.common.callbacks import BaseCallback

from .publishing import StepCallback


class PublishWeights(StepCallback, BaseCallback):
    """Publishes the policy before every Nth rollout, so after the gradient steps before that.

    Args:
        publisher: A publisher, which stays open; or an address to bind one to, until the training
            is over.
        model: What the policy is called on the bus.
        every: Rollouts between two versions.
        **options: Keywords of `Publisher.publish`, such as `timeout` in seconds.
    """

    _rollouts = 0  # that are done

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
