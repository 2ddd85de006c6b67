"""A publisher for tests: told what to do by lines of JSON, it answers with lines."""

import json
import sys
from pathlib import Path

import numpy as np

import weightbus
from weightbus.bus.trust.keys import generate
from weightbus.tests.client.settling import settled
from weightbus.tests.net.ports import lasting_address


def weights(command: dict[str, object]) -> dict[str, np.ndarray]:
    """Return tensors whose every element is the same, but for those that steps have changed."""
    shapes, value, dtype = command["shapes"], command["value"], command.get("dtype", "float32")
    made = {name: np.full(shape, value, dtype) for name, shape in shapes.items()}
    for step in range(command.get("steps", 0)):  # one element in a hundred changes, by one place
        for array in made.values():
            array.view(np.uint16)[step::100] ^= 1
    return made


def main() -> None:
    """Serve until the input ends."""
    options = {"ping": 0.2, "lost_after": 2.0}
    options |= json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    if names := options.pop("names", []):
        generate(Path(options["keys"]), dict.fromkeys(names, "worker"))
    address = lasting_address() if sys.argv[1] == "lasting" else sys.argv[1]
    with weightbus.Publisher(address, **settled(options)) as publisher:
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
    receipt = publisher.publish(command["model"], weights(command), **settled(command["how"]))
    states = {name: worker.state for name, worker in receipt.workers.items()}
    encodings = {name: worker.encoding for name, worker in receipt.workers.items()}
    return {"version": receipt.version, "workers": states, "encodings": encodings}


if __name__ == "__main__":
    main()
