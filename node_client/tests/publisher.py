"""A publisher for tests: told what to do by lines of JSON, it answers with lines."""

import json
import sys

import numpy as np

import weightbus


def weights(command: dict[str, object]) -> dict[str, np.ndarray]:
    """Return tensors whose every element is the same."""
    shapes, value = command["shapes"], command["value"]
    return {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}


def main() -> None:
    """Serve until the input ends."""
    timing = weightbus.Timing(ping=0.2, lost_after=2.0)
    epoch = int(sys.argv[2]) if len(sys.argv) > 2 else None
    with weightbus.Publisher(sys.argv[1], timing=timing, epoch=epoch) as publisher:
        print(json.dumps({"address": publisher.address, "epoch": publisher.epoch}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                print(json.dumps(done(publisher, command)), flush=True)
            except Exception as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


def done(publisher: weightbus.Publisher, command: dict[str, object]) -> dict[str, object]:
    """Do what a line says."""
    if command["do"] == "wait":
        publisher.wait_for_workers(command["count"], timeout=30)
        return {}
    if command["do"] == "workers":
        return {name: status.state for name, status in publisher.workers().items()}
    receipt = publisher.publish(command["model"], weights(command), **command["how"])
    return {"version": receipt.version, "workers": {n: w.state for n, w in receipt.workers.items()}}


if __name__ == "__main__":
    main()
