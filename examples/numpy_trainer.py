"""A trainer without torch: fits a line to noisy data, and publishes the line once a second.

python examples/numpy_trainer.py tcp://127.0.0.1:5555 --seconds 60
"""

import argparse
import json
import signal
import sys
import time

import numpy as np

import weightbus

TRUTH = np.array([2.0, -1.0, 0.5], np.float32)


def step(weights: dict[str, np.ndarray], rng: np.random.Generator) -> float:
    """Improve the weights in place with new data; return the mean squared error before the step."""
    x = rng.normal(size=(64, 3)).astype(np.float32)
    y = x @ TRUTH + 3.0 + rng.normal(scale=0.01, size=64).astype(np.float32)
    error = x @ weights["slope"] + weights["offset"] - y
    weights["slope"] -= 0.1 * (x.T @ error / len(x))
    weights["offset"] -= 0.1 * error.mean()
    return float((error**2).mean())


def main() -> None:
    """Train and publish until the time is over."""
    parser = argparse.ArgumentParser(description="Fit a line and publish it.")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=60.0, help="inf: until it is stopped")
    parser.add_argument("--workers", type=int, default=1, help="wait for so many before starting")
    parser.add_argument("--keys", help="a folder of weightbus keygen: who may have the weights")
    parser.add_argument("--insecure", action="store_true", help="other hosts, and without keys")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))  # closes the bus
    weights = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
    rng, end = np.random.default_rng(), time.monotonic() + options.seconds
    made = weightbus.Publisher(options.address, keys=options.keys, insecure=options.insecure)
    with made as publisher:
        print(f"publishing at {publisher.address}", file=sys.stderr, flush=True)  # of port 0, too
        publisher.wait_for_workers(options.workers, timeout=60)
        while time.monotonic() < end:
            loss = min(step(weights, rng) for _ in range(5))
            receipt = publisher.publish("line", weights, require=0, timeout=10)
            row = {
                "epoch": receipt.epoch,
                "version": receipt.version,
                "loss": round(loss, 5),
                "workers": {w.name: w.state for w in receipt.workers.values()},
                "through": {w.name: w.through for w in receipt.workers.values() if w.through},
                "lost": sorted(w.name for w in publisher.workers().values() if w.state == "lost"),
                "digest": receipt.digest,
            }
            print(json.dumps(row), flush=True)
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))


if __name__ == "__main__":
    main()
