"""Publish one version of a model to a program: publish.py MODEL PROGRAM [ARGUMENT...]

The program gets the publisher's address as its last argument, and ends by itself.
"""

import subprocess
import sys

import numpy as np

from weightbus import Publisher

SECONDS = 60.0
MODELS = {
    "line": {"slope": np.array([2, -1, 0.5], np.float32), "offset": np.array(3, np.float32)},
    "policy": {
        "0.weight": np.arange(12, dtype=np.float32).reshape(4, 3) / 10 - 0.5,
        "0.bias": np.linspace(-1, 1, 4, dtype=np.float32),
        "2.weight": np.arange(8, dtype=np.float32).reshape(2, 4) - 3,
        "2.bias": np.array([0.5, -0.5], np.float32),
    },
}


def main(model: str, command: list[str]) -> int:
    """Publish, run the program, and return its status."""
    with Publisher("tcp://127.0.0.1:0") as publisher:
        publisher.publish(model, MODELS[model], require=0)  # who joins late gets it at once
        return subprocess.run([*command, publisher.address], timeout=SECONDS).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
