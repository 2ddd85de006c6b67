"""A relay in a process of its own: `passing.py '{"upstream": "tcp://...", ...}'`, see `Passed`.

It writes one line, `{"event": "ready", ...}`, and ends with its standard input.
"""

import json
import logging
import os
import sys
from contextlib import closing
from dataclasses import dataclass

from weightbus import Relay, Settings
from weightbus.tests.chaos.content import MODELS
from weightbus.tests.chaos.trainer import LOST_AFTER, PING, REKEY_SECONDS


@dataclass(frozen=True, slots=True)
class Passed:
    """What a relay is told.

    Attributes:
        name: Its name at the publisher above it.
        upstream: The address of the publisher, or of another relay.
        advertise: What workers are told to connect to.
        queue, shared: See `schedule.Plan`.
        keys: The folder of all keys, or empty.
    """

    name: str
    upstream: str
    advertise: str
    queue: int
    shared: bool
    keys: str


def run(told: Passed) -> None:
    """Pass on until standard input ends."""
    settings = Settings(
        ping=PING,
        lost_after=LOST_AFTER,
        advertise=told.advertise,
        queue=told.queue,
        shared_memory=told.shared,
        rekey=REKEY_SECONDS,
    )
    address, keys = "tcp://127.0.0.1:0", told.keys or None
    made = Relay(told.upstream, address, MODELS, name=told.name, keys=keys, settings=settings)
    with closing(made) as relay:
        where = {"address": relay.address, "data": relay.data_address}
        print(json.dumps({"event": "ready", "pid": os.getpid(), **where}), flush=True)
        while os.read(0, 2**16):
            pass


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    run(Passed(**json.loads(sys.argv[1])))
