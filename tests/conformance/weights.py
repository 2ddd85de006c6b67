"""Models to publish: of noise, of one byte, of every shape and dtype that numpy has."""

import random
from typing import Any

import numpy as np

from weightbus.codecs.dtypes import DTYPES, name_of_numpy, numpy_dtype
from weightbus.tests.conformance.ledger import Weights

Spec = dict[str, dict[str, Any]]  # what `--in-place` is told of one model

DTYPES_OF_NUMPY = [row.name for row in DTYPES.values() if row.numpy]


def noise(chance: random.Random, nbytes: int, tensors: int = 3) -> Weights:
    """Return float32 tensors of about this many bytes in all, of any bits."""
    generator = np.random.default_rng(chance.getrandbits(32))
    each = nbytes // 4 // tensors
    return {
        f"layer{index}.weight": generator.integers(0, 2**32, each, np.uint32).view(np.float32)
        for index in range(tensors)
    }


def stepped(chance: random.Random, weights: Weights, share: float) -> Weights:
    """Return what a step of training makes of a model: the last bits of some elements differ."""
    generator = np.random.default_rng(chance.getrandbits(32))
    after: Weights = {}
    for name, array in weights.items():
        after[name] = array.copy()
        elements = after[name].reshape(-1).view(np.uint8).reshape(-1, array.itemsize)
        elements[generator.random(len(elements)) < share, 0] ^= 1
    return after


def uniform(spec: Spec, byte: int) -> Weights:
    """Return tensors of which every byte is the same."""
    weights: Weights = {}
    for name, tensor in spec.items():
        array = np.empty(tensor["shape"], numpy_dtype(tensor["dtype"]))
        array.reshape(-1).view(np.uint8)[:] = byte
        weights[name] = array
    return weights


def spec(**tensors: tuple[str, list[int]]) -> Spec:
    """Return a specification, of dtypes and shapes by name."""
    return {n: {"dtype": dtype, "shape": shape} for n, (dtype, shape) in tensors.items()}


def every_dtype(chance: random.Random) -> Weights:
    """Return a tensor of each dtype, some of them empty or scalar, with names of all kinds."""
    generator = np.random.default_rng(chance.getrandbits(32))
    weights: Weights = {"empty": np.zeros((0, 3), np.float32), "last.empty": np.zeros(0, np.bool_)}
    for dtype in DTYPES_OF_NUMPY:
        kind = numpy_dtype(dtype)
        top = 2 if dtype == "BOOL" else 256
        raw = generator.integers(0, top, 6 * kind.itemsize).astype(np.uint8)
        weights[f"block.{dtype}"] = raw.view(kind).reshape(2, 3)
        weights[f"scalar {dtype}"] = raw[: kind.itemsize].view(kind).reshape(())
        assert name_of_numpy(kind) == dtype
    weights["gr\u00f6\u00dfe/\u91cd\u307f \U0001f69a"] = np.arange(5, dtype=np.int16)
    weights['quote " and \\ backslash'] = np.arange(7, dtype=np.uint8)
    weights["x" * 500] = np.ones(3, np.float64)
    weights["deep"] = np.arange(16, dtype=np.uint8).reshape([1, 2] * 4)
    return weights
