"""A publisher with two relays, for tests in other languages: commands come as lines of JSON.

    python -m weightbus.tests.relay.steered

Both relays have versions of one epoch. Each can be closed, and started again at its address.
"""

import contextlib
import json
import sys

import numpy as np

from weightbus import Publisher, Settings
from weightbus.python_client.relay import Relay
from weightbus.tests.net.ports import lasting_address

QUICK = Settings(ping=0.1, lost_after=1.0)
RELAYS = 2


def main() -> None:
    """Serve until the input ends."""
    addresses, relays = [lasting_address() for _ in range(RELAYS)], dict[int, Relay]()
    with Publisher(settings=QUICK) as publisher, contextlib.ExitStack() as stack:

        def start(index: int) -> None:
            name, address = f"relay-{index}", addresses[index]
            relay = Relay(publisher.address, address, ["m"], name=name, settings=QUICK)
            relays[index] = stack.enter_context(contextlib.closing(relay))

        for index in range(RELAYS):
            start(index)
        print(json.dumps({"address": ",".join(addresses), "epoch": publisher.epoch}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "start":
                start(command["relay"])
            elif command["do"] == "close":
                relays[command["relay"]].close()
            else:
                weights = {"w": np.full(command["size"], command["value"], np.float32)}
                publisher.publish_async("m", weights, require=0)
            print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()
