"""The CartPole policy: a torch module in the trainer, numpy arrays in the workers.

A worker needs no torch: the bus fills any mapping of names to numpy arrays. The names and shapes
are those of the trainer's `nn.Sequential`, so one layout fits both.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

MODEL = "policy"  # its id on the bus
OBSERVATION, HIDDEN, ACTIONS = 4, 64, 2
RETURN_MAX = 500  # steps, after which CartPole ends an episode

Weights = dict[str, NDArray[np.float32]]


def torch_network(outputs: int) -> "nn.Sequential":
    """Return a new network from observations to a number of outputs."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(OBSERVATION, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, outputs),
    )


def numpy_weights() -> Weights:
    """Return memory for the weights of `torch_network(ACTIONS)`, by the same names."""
    shapes = {
        "0.weight": (HIDDEN, OBSERVATION),
        "0.bias": (HIDDEN,),
        "2.weight": (HIDDEN, HIDDEN),
        "2.bias": (HIDDEN,),
        "4.weight": (ACTIONS, HIDDEN),
        "4.bias": (ACTIONS,),
    }
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def log_odds(weights: Weights, observation: NDArray[np.float32]) -> float:
    """Return the log odds of action 1: the difference of the two actions' logits."""
    hidden = np.tanh(weights["0.weight"] @ observation + weights["0.bias"])
    hidden = np.tanh(weights["2.weight"] @ hidden + weights["2.bias"])
    left, right = weights["4.weight"] @ hidden + weights["4.bias"]
    return float(right - left)


def log_probability(odds: float, action: int) -> float:
    """Return the logarithm of the probability of an action, from the log odds of action 1."""
    signed = odds if action else -odds
    return min(signed, 0.0) - math.log1p(math.exp(-abs(odds)))
