"""How bad a simulated network is, how large models are on it, and how long everything takes."""

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weightbus.bus.headers import Buffer

TICK = 0.1  # seconds of virtual time between two ticks of a machine
CHAOS = 12.0  # seconds of faults
HEALING = 90.0  # seconds after them in which everybody must catch up
APART = 3.0  # seconds between two starts that are told apart, whatever delays the network has
REKEYS = 0.2  # a second, of a publisher that seals
SETTLED = 3.0  # seconds without faults after which catching up is checked
EVENTS_MAX = 100_000  # in one run; a sound one takes a few thousand
CHUNK = 16  # bytes
SIZES = (0, 1, 40, 40, 640, 640, 1600)  # bytes of a model
PATCHED = (*[640] * 12, 1600, 16)  # where there are patches: of one layout, mostly

T = TypeVar("T")

Steps = Generator[None, None, T]  # what takes long
Link = tuple[str, str]  # from, to
Frames = Sequence[Buffer]


@dataclass(frozen=True)
class Faults:
    """How bad a network is, as probabilities per message or per second."""

    loss: float
    double: float
    damage: float
    delay: float  # mean seconds
    cut: float  # partitions, per worker and second
    death: float  # kills, per process and second
    apply: float  # failures of users, per version
    reorder: bool
    queue: int  # messages on their way to one subscriber before PUB drops more
    rates: tuple[float, ...]  # bytes per second to a worker, each worker draws one
    impostor: bool  # a second process takes the name of the first worker
    successor: bool  # a second publisher starts somewhere while the first one lives
    skew: float  # how many seconds wall clocks are off, either way
    hurry: float  # of trainers: how probable another publish is, every quarter of a second
    sizes: tuple[int, ...]  # bytes of models; of one size, memory is used again
    whims: float  # of users who want one version and no other
    stops: float  # of threads that copy, per step: they are stopped, and hold their locks

    @staticmethod
    def draw(rng: random.Random) -> "Faults":
        """Draw one network."""
        return Faults(
            loss=rng.choice([0.0, 0.02, 0.1, 0.4]),
            double=rng.choice([0.0, 0.05, 0.2]),
            damage=rng.choice([0.0, 0.0, 0.02, 0.1]),
            delay=rng.choice([0.001, 0.01, 0.1]),
            cut=rng.choice([0.0, 0.05, 0.2]),
            death=rng.choice([0.0, 0.05, 0.15]),
            apply=rng.choice([0.0, 0.02, 0.02, 0.5]),
            reorder=rng.random() < 0.5,
            queue=rng.choice([2, 8, 64, 64]),
            rates=rng.choice([(math.inf,), (math.inf, 10_000.0, 3_000.0), (20_000.0,)]),
            impostor=rng.random() < 0.2,
            successor=rng.random() < 0.3,
            skew=rng.choice([0.0, 0.0, 20.0]),
            hurry=rng.choice([0.3, 0.3, 0.9]),
            sizes=rng.choice([SIZES, SIZES, (640,)]),
            whims=rng.choice([0.0, 0.0, 0.3]),
            stops=rng.choice([0.0, 0.03, 0.2]),
        )
