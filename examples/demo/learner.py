"""Improves the policy from whole episodes, with the clipped objective of PPO.

Episodes may have been played with older versions than the current one. The ratio of probabilities
accounts for that, because each action is sent with the probability that it had.
"""

# torch leaves some of its signatures unannotated.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .episode import Episode
from .policy import ACTIONS, torch_network

DISCOUNT = 0.99
CLIP = 0.2  # how far one update may move the probability of an action, as a ratio
PASSES = 2  # passes over the episodes of an update; each episode is in several updates
MINIBATCH_STEPS = 256
LEARNING_RATE = 1.5e-3
ENTROPY_BONUS = 0.005
GRADIENT_NORM_MAX = 0.5


class Learner:
    """Improves a policy and a critic.

    Attributes:
        policy: The policy, which is published.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.set_num_threads(1)  # the networks are tiny, and the workers want the other cores
        torch.manual_seed(seed)
        self.policy = torch_network(ACTIONS)
        self._critic = torch_network(1)
        parameters = [*self.policy.parameters(), *self._critic.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
        self._parameters = parameters

    def improve(self, episodes: Sequence[Episode], progress: float) -> None:
        """Update the policy and the critic from episodes.

        Args:
            episodes: At least one episode.
            progress: From 0 at the start of the run to 1 at its end; updates get smaller towards
                the end, so that the policy does not get worse again.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.05, 1.0 - progress)
        seen = _tensor([e.seen()[:-1] for e in episodes])
        done = _tensor([e.done() for e in episodes]).long().unsqueeze(1)
        likelihood = _tensor([e.likelihood() for e in episodes])
        returns = self._returns(episodes)
        with torch.no_grad():
            advantage = returns - self._critic(seen).squeeze(1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        for _ in range(PASSES):
            for rows in torch.split(torch.randperm(len(seen)), MINIBATCH_STEPS):
                self._step(seen[rows], done[rows], likelihood[rows], advantage[rows], returns[rows])

    def _returns(self, episodes: Sequence[Episode]) -> Tensor:
        """Return the discounted future reward at every step.

        Every reward is 1, so this is a geometric series. If the time was up, the critic estimates
        the reward after the end.
        """
        last = torch.from_numpy(np.stack([e.seen()[-1] for e in episodes]))
        with torch.no_grad():
            after = self._critic(last).squeeze(1).numpy()
        parts: list[NDArray[np.float32]] = []
        for episode, beyond in zip(episodes, after, strict=True):
            fade = DISCOUNT ** np.arange(episode.steps, 0, -1, dtype=np.float32)
            tail = 0.0 if episode.fell else float(beyond)
            returns = (1.0 - fade) / (1.0 - DISCOUNT) + fade * tail
            parts.append(returns.astype(np.float32))
        return _tensor(parts)

    def _step(
        self, seen: Tensor, done: Tensor, likelihood: Tensor, advantage: Tensor, returns: Tensor
    ) -> None:
        scores = torch.log_softmax(self.policy(seen), dim=1)
        ratio = (scores.gather(1, done).squeeze(1) - likelihood).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        entropy = -(scores.exp() * scores).sum(1).mean()
        miss = nn.functional.smooth_l1_loss(self._critic(seen).squeeze(1), returns)
        self._optimizer.zero_grad()
        loss = 0.1 * miss - gain - ENTROPY_BONUS * entropy
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, GRADIENT_NORM_MAX)
        self._optimizer.step()


def _tensor(parts: Sequence[NDArray[np.float32]] | Sequence[NDArray[np.uint8]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
