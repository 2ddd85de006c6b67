"""A worker in a Slurm job: `python worker.py RELAY PUBLISHER`, with its keys in WEIGHTBUS_KEYS."""

import os
import signal
import sys

import numpy as np

import weightbus

relay, publisher = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(0))  # closes the subscriber

files = [f"{os.environ['WEIGHTBUS_KEYS']}/workers/{of}" for of in ("rank-+@node-+", "rank-+")]
weights = {"w": np.zeros(1000, np.float32)}
with weightbus.Subscriber(
    [relay, publisher],  # the node's relay, or the publisher while the relay does not answer
    {"policy": weights},
    name=f"rank-{os.environ['SLURM_PROCID']}",
    keys=[f"{file}.json" for file in files],
) as bus:
    while (update := bus.receive(timeout=600)) is not None:
        print(f"{bus.name} runs step {update.metadata['step']}: {weights['w'][0]:g}", flush=True)
