"""Noise with pings of ZMTP's own in it ends no publisher: `make floods` makes as much as one likes.

python benchmarks/floods.py --only noise,data-noise --seconds 600
"""

import contextlib
import time

import pytest

from weightbus.benchmarks.attacks import ATTACKS, Flood, Strangers
from weightbus.benchmarks.flooded import Setup
from weightbus.benchmarks.victim import Victim, keys_for_all

CONNECTIONS = 1000  # that make noise, one after another: enough to end what libzmq listens for
SECONDS = 60.0


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
def test_noise_ends_no_publisher(*, keyed: bool) -> None:
    noise = ATTACKS["noise"]
    assert isinstance(noise, Strangers)
    with (
        keys_for_all() if keyed else contextlib.nullcontext(),
        Victim(Setup(shape="64KiB/4", workers=1)) as victim,
        contextlib.closing(Flood(noise, victim.addresses["control"])) as flood,
    ):
        deadline = time.monotonic() + SECONDS
        while flood.dialled < CONNECTIONS:
            assert time.monotonic() < deadline, f"only {flood.dialled} connections"
            flood.turn()
        victim.publishes()
        victim.check()
