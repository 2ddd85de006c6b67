"""What is published in a round: every byte follows from a serial number, the model and the tensor.

So whatever a worker holds can be read back: all of its tensors must be those of one serial.
"""

from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from weightbus.tests.conformance.ledger import Bytes
from weightbus.tests.conformance.weights import Spec, spec, uniform

SMALL, LARGE = "small", "large"  # travels with its announcement, and in chunks
CHUNK_BYTES = 2**15
SPECS: dict[str, Spec] = {
    SMALL: spec(w=("F32", [40, 30]), b=("F32", [77]), step=("I64", [])),
    LARGE: spec(**{"0.weight": ("F32", [300, 300])}, bias=("F16", [333]), table=("U8", [97_001])),
}
MODELS = tuple(SPECS)
BYTES = 251  # a prime: no pattern repeats where a tensor or a chunk begins
FEW = 61  # of so many bytes one differs from serial to serial, where patches are to be small
Kind = Literal["even", "mixed", "trained"]
Weights = dict[str, NDArray[Any]]


def weights(model: str, serial: int, kind: Kind) -> Weights:
    """Return what is published under a serial number.

    `even`: every byte of it is the same; `trained`: few differ from one serial to the next.
    """
    made = uniform(SPECS[model], (7 * serial) % BYTES)
    for index, array in enumerate(() if kind == "even" else made.values()):
        raw = array.reshape(-1).view(np.uint8)
        begin = 0 if kind == "trained" else 7 * serial
        raw[:] = np.resize(_pattern(begin + 31 * index + len(model)), raw.size)
        if kind == "trained":
            raw[serial % FEW :: FEW] ^= 255
            raw[:4] = np.frombuffer(serial.to_bytes(4, "little"), np.uint8)
    return made


def _pattern(begin: int) -> NDArray[np.uint8]:
    return ((np.arange(BYTES) + begin) % BYTES).astype(np.uint8)


@cache
def expected(model: str, serial: int, kind: Kind) -> Bytes:
    """Return what workers must find in it."""
    return Bytes.of(weights(model, serial, kind), CHUNK_BYTES, {})
