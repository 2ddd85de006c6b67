"""A trainer without torch: searches for a policy that balances CartPole, and publishes each guess.

python examples/cartpole_trainer.py tcp://127.0.0.1:5555

Cross-entropy search: try 64 policies around the guess; the mean of the ten best policies is the
next guess. Names and shapes are those of torch's Sequential(Linear(4, 8), Tanh(), Linear(8, 2)).
"""

import argparse
import sys

import numpy as np
from numpy.typing import NDArray

import weightbus

Floats = NDArray[np.float32]

SHAPES = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
STEPS, TRIED, BEST = 500, 64, 10


def split(flat: Floats) -> dict[str, Floats]:
    """Return the tensors of policies; the last dimension of `flat` has the numbers of a policy."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])
    parts = np.split(flat, ends[:-1], axis=-1)
    named = zip(SHAPES.items(), parts, strict=True)
    return {name: part.reshape(*flat.shape[:-1], *shape) for (name, shape), part in named}


def play(policies: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """Play one game with each policy; return for how many steps each pole stood."""
    tensors = split(policies)
    x, speed, angle, turn = rng.uniform(-0.05, 0.05, (4, len(policies))).astype(np.float32)
    steps, stands = np.zeros(len(policies), np.int64), np.ones(len(policies), bool)
    for _ in range(STEPS):
        state = np.stack([x, speed, angle, turn], axis=-1)[..., None]
        hidden = np.tanh(tensors["0.weight"] @ state + tensors["0.bias"][..., None])
        scores = (tensors["2.weight"] @ hidden)[..., 0] + tensors["2.bias"]
        force = np.where(scores[:, 1] > scores[:, 0], 10.0, -10.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        pushed = (force + 0.05 * turn**2 * sine) / 1.1
        swing = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        x, speed = x + 0.02 * speed, speed + 0.02 * (pushed - 0.05 * swing * cosine / 1.1)
        angle, turn = angle + 0.02 * turn, turn + 0.02 * swing
        stands &= (abs(x) < 2.4) & (abs(angle) < 0.2095)
        steps += stands
    return steps


def main() -> None:
    """Search until the pole stands, with the guess as policy, to the end of every game."""
    parser = argparse.ArgumentParser(description="Learn CartPole and publish the policy.")
    parser.add_argument("address")
    parser.add_argument("--workers", type=int, default=1, help="wait for so many before starting")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    mean, spread = np.zeros(size, np.float32), np.ones(size, np.float32)
    with weightbus.Publisher(options.address) as publisher:
        print(f"publishing at {publisher.address}", file=sys.stderr, flush=True)  # of port 0, too
        publisher.wait_for_workers(options.workers, timeout=60)
        steps = 0.0
        while steps < STEPS:
            tried = (mean + spread * rng.normal(size=(TRIED, size))).astype(np.float32)
            best = tried[np.argsort(-play(tried, rng), kind="stable")[:BEST]]
            mean, spread = best.mean(axis=0), best.std(axis=0) + np.float32(0.1)
            steps = play(np.tile(mean, (TRIED, 1)), rng).mean()
            receipt = publisher.publish("policy", split(mean), require=0, timeout=10)
            print(f"version {receipt.version}: stands for {steps:.0f} steps", flush=True)


if __name__ == "__main__":
    main()
