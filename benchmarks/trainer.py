"""What a trainer does between two publishes: it computes, on more memory than the caches hold."""

import time

import numpy as np

COMPUTED_BYTES = 128 * 2**20  # several times the last cache that a core reaches
STEP = 2**18  # values at a time, a MiB: other threads run meanwhile, as beside torch


class Trainer:
    """Computes in the publisher's process, so that what the next publish needs is in no cache.

    A trainer that slept would leave them warm, and a publish would pay for waking up a processor.

    Args:
        pause: Seconds between two publishes; 0: it publishes only.
    """

    def __init__(self, pause: float) -> None:
        self._pause, self._at = pause, 0
        self._values = np.ones(COMPUTED_BYTES // 4 if pause else 0, np.float32)

    def compute(self) -> None:
        """Compute until the pause is over."""
        end = time.perf_counter() + self._pause
        while time.perf_counter() < end:
            self._values[self._at : self._at + STEP] += 1
            self._at = (self._at + STEP) % len(self._values)
