"""A trainer in a Slurm job: `python trainer.py ADDRESS FOLDER STEPS WORKERS`.

The weights are in the state folder, so a requeued job continues from the last version. The exit
code is 0 if all steps are done, and 1 if SIGTERM came first.
"""

import os
import signal
import sys

import numpy as np

import weightbus

address, folder, steps, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
signals = list[int]()
signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

weights = {"w": np.zeros(1000, np.float32)}
saved = weightbus.load(folder, "policy", into=weights) if os.path.isdir(folder) else None
done = int(saved.metadata["step"]) if saved else 0
print(f"begins after step {done}", flush=True)
with weightbus.Publisher(address, state=folder, expect=workers) as publisher:
    publisher.wait_for_workers(workers, timeout=120)
    while done < steps and not signals:
        weights["w"] += 1  # a step of training
        done += 1
        metadata = {"step": str(done)}
        receipt = publisher.publish("policy", weights, timeout=60, metadata=metadata)
        print(f"step {done}: {receipt}", flush=True)
sys.exit(done < steps)
