"""Whatever others send leads to documented errors at most: a few cases of what `fuzz.py` runs."""

import random

import pytest

from weightbus.tests.fuzzing import fuzz
from weightbus.tests.fuzzing.fuzzing import TARGETS, seeds

CASES = 150


def test_every_target_is_fuzzed() -> None:
    assert set(fuzz.SHARES) == set(TARGETS)
    assert sum(fuzz.SHARES.values()) == 100


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_is_near_them(name: str) -> None:
    """Every seed, and some with a few bytes changed, cut out or put in."""
    rng, target, begin = random.Random(name), TARGETS[name], seeds(name)
    for seed in begin:
        target(seed)
    for _ in range(CASES):
        case = bytearray(rng.choice(begin)[: fuzz.BYTES])
        for _ in range(rng.randint(1, 4)):
            at, end = sorted(rng.choices(range(len(case) + 1), k=2))
            match rng.randrange(3):
                case 0 if at < len(case):
                    case[at] ^= 1 << rng.randrange(8)
                case 1:
                    del case[at : min(end, at + 8)]
                case _:
                    case[at:at] = rng.randbytes(rng.randint(1, 8))
        target(bytes(case))
