"""A worker for JAX: copies every new version into JAX arrays, for a function that stays compiled.

pip install jax; python examples/jax_worker.py tcp://localhost:5555 --name w0
"""

import argparse
import json
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import weightbus


@jax.jit
def predict(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return the line's value at x."""
    return x @ weights["slope"] + weights["offset"]


def main() -> None:
    """Apply every version that arrives, until none has arrived for `--patience` seconds."""
    parser = argparse.ArgumentParser(description="Predict with the newest weights, in JAX.")
    parser.add_argument("address")
    parser.add_argument("--name")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds without a version")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))  # closes the subscriber
    arrived = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
    x = jnp.array([1.0, 2.0, 3.0])
    with weightbus.Subscriber(options.address, {"line": arrived}, name=options.name) as subscriber:
        while (update := subscriber.receive(timeout=options.patience)) is not None:
            # jnp.array copies. jnp.asarray and device_put may share the memory on a CPU: then the
            # next version would be written into arrays that JAX assumes to be immutable.
            weights = jax.tree.map(jnp.array, arrived)
            y = float(predict(weights, x))  # about 4.5 when the fit is good
            row = {"worker": subscriber.name, "version": update.version, "prediction": round(y, 4)}
            print(json.dumps(row | {"digest": update.digest}), flush=True)


if __name__ == "__main__":
    main()
