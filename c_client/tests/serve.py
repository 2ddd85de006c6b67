"""A real publisher for a program in C: serve.py PROGRAM [ARGUMENT...]

The program gets the publisher's address as its last argument, and an empty folder for temporary
files (`TMPDIR`). Each request is a line on its standard output, and gets a line as its answer:

    publish MODEL SHAPE BYTE    publishes, waits for no worker; the metadata has "fill": BYTE
    running NAME                the version of "line" that worker NAME runs; 0 for none
    client NAME IT              1 if worker NAME reports the client IT, in any release; otherwise 0
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from weightbus import Publisher, Settings
from weightbus.types import Receipt

SECONDS = 60.0


def weights(words: str, byte: str) -> dict[str, NDArray[np.float32]]:
    """Return two tensors of which every byte is the same."""
    shape = [int(size) for size in words.split("x")]
    filled = np.frombuffer(bytes([int(byte)]) * (4 * int(np.prod(shape))), np.float32)
    return {"w": filled.reshape(shape), "b": filled[:1].reshape(())}


def main(command: list[str]) -> int:
    """Serve a program until it ends; return its status."""
    told: list[Future[Receipt]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Publisher("tcp://127.0.0.1:0", settings=Settings(ping=0.2, lost_after=5.0)) as publisher,
    ):
        program = subprocess.Popen(  # noqa: S603 - a test of ours
            [*command, publisher.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        )
        for line in program.stdout:
            match line.split():
                case ["publish", model, shape, byte]:
                    sent = weights(shape, byte)
                    said = {"fill": byte}
                    told.append(
                        publisher.publish_async(
                            model, sent, timeout=SECONDS, require=0, metadata=said
                        )
                    )
                    answer = "published"
                case ["running", name]:
                    status = publisher.workers().get(name)
                    answer = str(status.running.get("line", (0, 0))[1] if status else 0)
                case ["client", name, it]:
                    status = publisher.workers().get(name)
                    answer = str(int(bool(status and status.client.startswith(f"{it}/"))))
                case _:
                    sys.stdout.write(line)
                    continue
            program.stdin.write(answer + "\n")
            program.stdin.flush()
        return program.wait(SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
