"""A publisher in the hands of a test: commands come as lines of JSON, and so do answers."""

import json
import sys

import numpy as np

import weightbus


def tensors(spec: dict) -> dict:
    """Make arrays of {name: [dtype, shape, value of every element]}."""
    return {name: np.full(shape, value, dtype) for name, (dtype, shape, value) in spec.items()}


def main() -> None:
    options = json.loads(sys.argv[1])
    address = options.pop("address", "tcp://127.0.0.1:0")
    with weightbus.Publisher(address, **options) as publisher:
        print(json.dumps({"address": publisher.address, "epoch": publisher.epoch}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if "wait_for_workers" in command:
                publisher.wait_for_workers(command["wait_for_workers"], 30)
                answer = {"workers": sorted(publisher.workers())}
            else:
                weights = tensors(command.pop("weights"))
                pending = publisher.publish_async(
                    command.pop("model"), weights, **command.pop("how")
                )
                receipt = pending.result(60) if command.pop("wait", True) else None
                answer = {"version": receipt.version if receipt else 0}
            print(json.dumps(answer), flush=True)


main()
