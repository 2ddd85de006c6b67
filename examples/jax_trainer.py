"""A trainer in JAX: fits a line to noisy data, and publishes JAX arrays directly.

pip install jax; python examples/jax_trainer.py tcp://127.0.0.1:5555 --steps 200
"""

import argparse
import json
import sys

import jax
import jax.numpy as jnp

import weightbus

TRUTH = jnp.array([2.0, -1.0, 0.5])
Weights = dict[str, jax.Array]  # or a tree of nested dictionaries, as Flax has: "dense.kernel"


def loss(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error."""
    return jnp.square(x @ weights["slope"] + weights["offset"] - y).mean()


@jax.jit
def step(weights: Weights, key: jax.Array) -> tuple[Weights, jax.Array]:
    """Return better weights, in new arrays, and the error before the step."""
    x = jax.random.normal(key, (64, 3))
    error, slopes = jax.value_and_grad(loss)(weights, x, x @ TRUTH + 3.0)
    return {name: weights[name] - 0.05 * slope for name, slope in slopes.items()}, error


def main() -> None:
    """Train, and publish every 50 steps."""
    parser = argparse.ArgumentParser(description="Fit a line in JAX and publish it.")
    parser.add_argument("address")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    weights: Weights = {"slope": jnp.zeros(3), "offset": jnp.zeros(())}
    with weightbus.Publisher(options.address) as publisher:
        print(f"publishing at {publisher.address}", file=sys.stderr, flush=True)
        publisher.wait_for_workers(1, timeout=60)
        for number in range(1, options.steps + 1):
            weights, error = step(weights, jax.random.key(number))
            if number % 50 == 0:  # publish() waits for what JAX still computes
                receipt = publisher.publish("line", weights, require=0, timeout=10)
                row = {"version": receipt.version, "loss": round(float(error), 5)}
                print(json.dumps(row | {"digest": receipt.digest}), flush=True)


if __name__ == "__main__":
    main()
