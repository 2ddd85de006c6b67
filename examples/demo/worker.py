"""A rollout worker: plays CartPole with the newest weights until the trainer ends.

It is a process of its own, without torch. Weights arrive over the bus in the background; each
forward pass is inside `reading()`, so that it never sees half a version. The worker writes each
episode as a line to stdout. It ends when its stdin ends or its stdout is closed, so that no worker
survives the trainer.
"""

import random
import time
from typing import Any

import gymnasium
import numpy as np

from weightbus import Subscriber

from .episode import Episode, to_line
from .policy import MODEL, Weights, log_odds, log_probability, numpy_weights
from .process import follow, started

# Pause of each simulated step, which otherwise takes a few microseconds. With it, the demo is about
# as fast as a small physics engine, so that one can watch the learning.
STEP_SECONDS = 0.0005


def play(
    env: gymnasium.Env[Any, Any], weights: Weights, bus: Subscriber, luck: random.Random
) -> Episode:
    """Play one episode."""
    seen, done, likelihood = list[Any](), bytearray(), list[float]()
    observation, _ = env.reset(seed=luck.getrandbits(31))
    seen.append(observation)
    version = bus.version(MODEL)
    fell = over = False
    while not (fell or over):
        with bus.reading():
            odds = log_odds(weights, observation)
        action = int(luck.random() < np.exp(log_probability(odds, 1)))
        observation, _, fell, over, _ = env.step(action)
        time.sleep(STEP_SECONDS)
        seen.append(observation)
        done.append(action)
        likelihood.append(log_probability(odds, action))
    return Episode(
        worker=bus.name,
        version=version,
        fell=bool(fell),
        observations=np.asarray(seen, np.float32).tobytes(),
        actions=bytes(done),
        log_probabilities=np.asarray(likelihood, np.float32).tobytes(),
    )


def run(address: str, name: str, seed: int) -> None:
    """Play until stdin ends."""
    luck, weights = random.Random(seed), numpy_weights()
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    follow(address, name, weights, lambda bus: to_line(play(env, weights, bus, luck)))


if __name__ == "__main__":
    started(run, __doc__)
