"""Publish one version of a model to a program: publish.py [--first] MODEL PROGRAM [ARGUMENT...]

The program gets the publisher's address as its last argument. It ends by itself. With --first, this
script ends it once it has printed a line.
"""

import subprocess
import sys
import threading

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


def first(command: list[str]) -> int:
    """Print the first line that a program prints, and end it; return whether none came."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:  # noqa: S603
        deadline = threading.Timer(SECONDS, program.kill)
        deadline.start()
        line = program.stdout.readline()
        program.terminate()
    deadline.cancel()
    sys.stdout.write(line)
    return int(not line)


def main(model: str, command: list[str], *, ends: bool) -> int:
    """Publish, run the program, and return its status."""
    with Publisher("tcp://127.0.0.1:0") as publisher:
        publisher.publish(model, MODELS[model], require=0)  # who joins late gets it at once
        command = [*command, publisher.address]
        return subprocess.run(command, timeout=SECONDS).returncode if ends else first(command)  # noqa: S603


if __name__ == "__main__":
    ends = sys.argv[1] != "--first"
    model, *command = sys.argv[1 if ends else 2 :]
    sys.exit(main(model, command, ends=ends))
