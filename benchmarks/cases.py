"""The cases of the benchmark: the sizes of models, the numbers of workers, and the rounds."""

from .comparison import Plan
from .model import Shape

SIZES = ("256KiB/20", "16MiB/40", "200MiB/100")
FULL = ("512MiB/200",)
WORKERS = (1, 2, 4)
QUICK = (("256KiB/20", 2), ("200MiB/100", 1))
QUICK_ROUNDS = 5
QUICK_COSTS = "64MiB/40"
QUICK_PEERS = ("gloo_flat", "ray_put")  # for each transport, one peer that starts fast

COSTS = "200MiB/100"
COUNTED = 10 * 2**20  # bytes of the models that differ only in their number of tensors
COUNTS = tuple(f"10MiB/{count}" for count in (1, 10, 100, 1000, 10_000))
COUNT_ROUNDS = 7
# TorchRL's schemes have an open file for each tensor: more than most systems allow.
COUNT_PEERS = ("gloo_flat", "gloo_tensors", "zmq_pickle", "ray_put")

# Trainers compute between publishes. Small models suffer most from cold caches.
COLD, COLD_WORKERS, COLD_SECONDS = "256KiB/20", (1, 4), 0.03
COLD_ROUNDS, COLD_BURST = 30, 2

# By largest size in bytes: rounds, and publishes in each round. Small models' times vary more.
EFFORT = ((2**20, 30, 5), (2**26, 15, 2), (2**40, 9, 1))


def plan(shape: Shape, workers: int, rounds: int | None = None) -> Plan:
    """Return the plan for a size."""
    for nbytes, usual, burst in EFFORT:
        if shape.nbytes <= nbytes:
            return Plan(shape, workers, rounds or usual, burst)
    raise ValueError(f"{shape.text} is too large to be measured")


def quick(rounds: int | None) -> list[Plan]:
    """Return a few fast cases."""
    return [plan(Shape.parse(text), workers, rounds or QUICK_ROUNDS) for text, workers in QUICK]


def counts(rounds: int | None) -> list[Plan]:
    """Return cases with one worker and models of more and more tensors."""
    return [plan(Shape.parse(text), 1, rounds or COUNT_ROUNDS) for text in COUNTS]


def cold(rounds: int | None) -> list[Plan]:
    """Return cases with a small model, in which the trainer computes before each version."""
    shape, rounds = Shape.parse(COLD), rounds or COLD_ROUNDS
    return [Plan(shape, workers, rounds, COLD_BURST, COLD_SECONDS) for workers in COLD_WORKERS]
