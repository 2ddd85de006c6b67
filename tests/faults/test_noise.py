"""Noise with pings of ZMTP's own in it ends no publisher: `make floods` makes as much as one likes.

python benchmarks/floods.py --only noise,data-noise --seconds 600
"""

import contextlib
import json
import threading

import pytest

from weightbus.benchmarks.flooded import Setup
from weightbus.benchmarks.process import Process
from weightbus.benchmarks.victim import ANSWER_SECONDS, Victim, keys_for_all

SECONDS = 8.0
BYTES_MIN = 100_000  # of noise that got through to somebody


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
def test_noise_ends_no_publisher(*, keyed: bool) -> None:
    with (
        keys_for_all() if keyed else contextlib.nullcontext(),
        Victim(Setup(shape="64KiB/4", workers=1)) as victim,
    ):
        with Process("noise", "attacks", "noise", json.dumps(victim.addresses)) as noise:
            threading.Event().wait(SECONDS)  # of noise, which is all that there is to it
            victim.publishes()
            told = noise.end(ANSWER_SECONDS)
        victim.check()
    assert told["dialled"] > 64, "connections were made, ended and made anew"
    assert told["sent"] > BYTES_MIN
