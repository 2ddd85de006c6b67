"""A generation worker: writes answers with the newest weights for as long as somebody listens.

It is a process of its own, without torch, as that of CartPole is. Weights come over the bus, in the
background; a batch is written with a copy that is taken inside `reading()`, so it is of one version
from its first letter to its last. `node_client/examples/generation_worker.ts` is the same.
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
# What a letter takes beside the few microseconds of this model: about as a small one on a device.
LETTER_SECONDS = 0.004


def write(
    weights: Weights, bus: Subscriber, luck: np.random.Generator, told: int
) -> tuple[Answers, int]:
    """Write a batch; with it goes the version that it is of. `told` is the last one of these."""
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
