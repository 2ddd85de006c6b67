"""PPO on CartPole in one file, in the style of CleanRL; ten lines publish the actor and play.

python examples/ppo_single_file.py --iterations 20     (the ten lines end with `# weightbus`)
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import weightbus  # weightbus

ENVS, STEPS, EPOCHS, MINIBATCHES = 4, 128, 4, 4
GAMMA, LAMBDA, CLIP, ENTROPY, RATE = 0.99, 0.95, 0.2, 0.01, 2.5e-3


def layers(inputs: int, outputs: int, scale: float) -> nn.Sequential:
    """Return a small network with orthogonal weights."""
    first, last = nn.Linear(inputs, 64), nn.Linear(64, outputs)
    for part, gain in ((first, np.sqrt(2)), (last, scale)):
        nn.init.orthogonal_(part.weight, gain)
        nn.init.zeros_(part.bias)
    return nn.Sequential(first, nn.Tanh(), last)


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = layers(4, 2, 0.01), layers(4, 1, 1.0)

    def act(self, seen: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return actions, their log-probabilities, the entropy and the value."""
        choice = Categorical(logits=self.actor(seen))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(seen).flatten()


def play(actor: nn.Module) -> float:
    """Play one episode with the most likely actions; return its reward."""
    env = gym.make("CartPole-v1")
    seen, total, over = env.reset(seed=1)[0], 0.0, False
    while not over:
        with torch.no_grad():
            action = int(actor(torch.as_tensor(seen)).argmax())
        seen, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


def rollout(
    agent: Agent, envs: gym.vector.VectorEnv[Any, Any, Any], seen: Tensor, done: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Act for `STEPS` steps; return [seen, actions, log-probabilities, returns, advantages]."""
    rows = []
    for _ in range(STEPS):
        with torch.no_grad():
            action, logprob, _, value = agent.act(seen)
        after, reward, terminated, truncated, _ = envs.step(action.numpy())
        rows.append((seen, action, logprob, value, done, torch.as_tensor(reward).float()))
        seen, done = torch.as_tensor(after), torch.as_tensor(terminated | truncated).float()
    seens, actions, logprobs, values, dones, rewards = map(torch.stack, zip(*rows, strict=True))
    with torch.no_grad():
        following, last, advantages = (
            agent.act(seen)[3],
            torch.zeros(ENVS),
            torch.zeros(STEPS, ENVS),
        )
    for t in reversed(range(STEPS)):
        going = 1 - (done if t == STEPS - 1 else dones[t + 1])
        delta = rewards[t] + GAMMA * following * going - values[t]
        advantages[t] = last = delta + GAMMA * LAMBDA * going * last
        following = values[t]
    parts = (seens, actions, logprobs, advantages + values, advantages)
    return [part.flatten(0, 1) for part in parts], seen, done


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    """Improve the agent on a rollout."""
    for _ in range(EPOCHS):
        for index in torch.randperm(ENVS * STEPS).chunk(MINIBATCHES):
            seen, action, logprob, returns, advantage = (part[index] for part in batch)
            _, new, entropy, value = agent.act(seen, action)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (new - logprob).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            loss = -gain.mean() - ENTROPY * entropy.mean() + 0.5 * (value - returns).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    iterations = parser.parse_args().iterations
    torch.manual_seed(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
    envs = gym.make_vec("CartPole-v1", ENVS)
    seen, done = torch.as_tensor(envs.reset(seed=1)[0]), torch.zeros(ENVS)
    publisher = weightbus.Publisher()  # weightbus
    player = layers(4, 2, 0.01)  # weightbus
    worker = weightbus.Subscriber(publisher.address, {"actor": player})  # weightbus
    publisher.wait_for_workers(1, timeout=60)  # weightbus
    for iteration in range(iterations):
        batch, seen, done = rollout(agent, envs, seen, done)
        update(agent, optimizer, batch)
        publisher.publish_async("actor", agent.actor)  # weightbus
        if applied := worker.receive(timeout=60):  # weightbus
            print(f"{iteration}: version {applied.version} gets {play(player)}")  # weightbus
    worker.close()  # weightbus
    publisher.close()  # weightbus


if __name__ == "__main__":
    main()
