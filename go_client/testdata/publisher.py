"""A publisher in the hands of a test: commands come as lines of JSON, and so do answers."""

import json
import sys

import numpy as np

import weightbus
from weightbus.tests.client.settling import settled


def tensors(spec: dict) -> dict:
    """Make arrays of {name: [dtype, shape, value of every element]}."""
    return {name: np.full(shape, value, dtype) for name, (dtype, shape, value) in spec.items()}


def main() -> None:
    options = json.loads(sys.argv[1])
    address = options.pop("address", "tcp://127.0.0.1:0")
    options |= options.pop("timing", {})
    with weightbus.Publisher(address, **settled(options)) as publisher:
        print(json.dumps({"address": publisher.address, "epoch": publisher.epoch}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if "wait_for_workers" in command:
                publisher.wait_for_workers(command["wait_for_workers"], 30)
                answer = {"workers": sorted(publisher.workers())}
            else:
                weights = tensors(command.pop("weights"))
                pending = publisher.publish_async(
                    command.pop("model"), weights, **settled(command.pop("how"))
                )
                answer = {"version": 0}
                if command.pop("wait", True):
                    receipt = pending.result(60)
                    came = {name: worker.encoding for name, worker in receipt.workers.items()}
                    answer = {"version": receipt.version, "encodings": came}
            print(json.dumps(answer), flush=True)


main()
