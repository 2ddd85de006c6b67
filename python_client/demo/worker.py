"""A rollout worker: plays CartPole with the newest weights for as long as somebody listens.

It is a process of its own, without torch. Weights come over the bus, in the background; each
forward pass is inside `reading()`, so it never sees half a version. Episodes go out on stdout, a
line each. The process ends when its stdin does, or when nobody reads its stdout: whatever becomes
of the trainer, no worker stays behind.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np

from ..subscriber import Subscriber
from .episode import Episode, to_line
from .policy import MODEL, Weights, log_odds, log_probability, numpy_weights

# What a step of the simulator takes beside CartPole's few microseconds. It makes the demo's world
# about as fast as a small physics engine, so that learning can be watched and not only be over.
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


def _stdin_ended() -> threading.Event:
    """Return an event that is set when stdin ends: the trainer closed it, or is gone."""
    ended = threading.Event()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        ended.set()

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    return ended


def run(address: str, name: str, seed: int) -> None:
    """Play until stdin ends."""
    ended, luck, weights = _stdin_ended(), random.Random(seed), numpy_weights()  # noqa: S311
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    with (
        contextlib.suppress(BrokenPipeError),
        # Over TCP, as from another host: shared memory would have nothing to show here.
        Subscriber(address, {MODEL: weights}, name=name, shared_memory=False).start() as bus,
    ):
        while not ended.is_set():
            if bus.error is not None:
                raise bus.error  # the trainer will repeat it to the user
            if bus.wait_for_version(MODEL, timeout=0.1) is not None:
                sys.stdout.buffer.write(to_line(play(env, weights, bus, luck)))
                sys.stdout.buffer.flush()


def main() -> None:
    """Run one worker from the command line (the demo starts them itself)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="the publisher's address")
    parser.add_argument("--name", required=True, help="what this worker is called")
    parser.add_argument("--seed", type=int, default=0, help="of its episodes and actions")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then ends us
    run(given.address, given.name, given.seed)
    # Stdout may be a broken pipe; the interpreter would complain of it when it flushes.
    os._exit(0)


if __name__ == "__main__":
    main()
