"""A worker without torch: predicts with the newest weights, and prints the version that it runs.

python examples/numpy_worker.py tcp://localhost:5555 --name w0
"""

import argparse
import json
import signal
import sys

import numpy as np

import weightbus


def main() -> None:
    """Apply every version that arrives, until none has arrived for `--patience` seconds."""
    parser = argparse.ArgumentParser(description="Predict with the newest weights.")
    parser.add_argument("address", help="or several, with commas, the preferred one first")
    parser.add_argument("--name")
    parser.add_argument("--keys", help="a file of weightbus keygen; for each address, with commas")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds without a version")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))  # closes the subscriber
    weights = {"slope": np.zeros(3, np.float32), "offset": np.zeros((), np.float32)}
    x = np.array([1.0, 2.0, 3.0], np.float32)
    addresses, keys = options.address.split(","), options.keys and options.keys.split(",")
    made = weightbus.Subscriber(addresses, {"line": weights}, name=options.name, keys=keys)
    with made as subscriber:
        while (update := subscriber.receive(timeout=options.patience)) is not None:
            y = float(x @ weights["slope"] + weights["offset"])  # about 4.5 when the fit is good
            row = {"worker": subscriber.name, "version": update.version, "prediction": round(y, 4)}
            print(json.dumps(row | {"digest": update.digest}), flush=True)


if __name__ == "__main__":
    main()
