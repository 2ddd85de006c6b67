"""Simulate a trainer, which computes between publishes on more memory than the caches hold."""

import time

import numpy as np

COMPUTED_BYTES = 128 * 2**20  # several times the size of the last-level cache
STEP = 2**18  # values at a time (1 MiB), so that other threads can run, as with torch


class Trainer:
    """Computes in the publisher's process, so that the next publish starts with cold caches.

    If it slept instead, caches would stay warm, and a publish would have to wake up a processor.

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
