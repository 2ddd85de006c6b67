"""A generation worker: writes answers with the newest weights until the trainer ends.

It is a process of its own, without torch, like CartPole's worker. Weights arrive over the bus in
the background. Each batch is written with a copy of the weights that is made inside `reading()`, so
all its letters are of one version. `node_client/examples/generation_worker.ts` does the same.
"""

import time

import numpy as np

from weightbus import Subscriber

from ..policy import MODEL
from ..process import follow, started
from .answers import Answers, to_line
from .transformer import (
    ASKED,
    LENGTH,
    LETTERS,
    Transformer,
    Weights,
    decode,
    greedy,
    numpy_weights,
    sampling,
)

BATCH = 32  # answers in a line
# Pause of each letter, so that this model is about as slow as a small model on a device.
LETTER_SECONDS = 0.004


def write(
    weights: Weights, bus: Subscriber, luck: np.random.Generator, told: int
) -> tuple[Answers, int]:
    """Return a batch and its version. `told` is the version of the previous batch."""
    with bus.reading():
        version, model = bus.version(MODEL), Transformer(weights)
    questions = decode(luck.integers(len(LETTERS), size=(BATCH, LENGTH)))
    answers = model.answers(questions, sampling(luck))
    fixed = model.answers(ASKED, greedy) if version != told else []
    return Answers(bus.name, version, questions, answers, fixed), version


def run(address: str, name: str, seed: int) -> None:
    """Write until stdin ends."""
    luck, weights, told = np.random.default_rng(seed), numpy_weights(), 0

    def line(bus: Subscriber) -> bytes:
        nonlocal told
        answers, told = write(weights, bus, luck, told)
        time.sleep(LENGTH * LETTER_SECONDS)
        return to_line(answers)

    follow(address, name, weights, line)


if __name__ == "__main__":
    started(run, __doc__)
