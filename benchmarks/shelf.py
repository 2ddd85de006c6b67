"""A model's bytes in shared memory, for the limits of that transport."""

import mmap
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

FOLDER = "/dev/shm"  # noqa: S108 - this folder is memory, which a temporary one may not be

Bytes = NDArray[np.uint8]


@contextmanager
def shelf(nbytes: int) -> Generator[str]:
    """Create and touch shared memory; yield its name. Mappings stay valid after the end."""
    with tempfile.NamedTemporaryFile(dir=FOLDER, prefix="weightbus-bench-") as file:
        os.ftruncate(file.fileno(), nbytes)
        reach(file.name, nbytes)[:] = 0
        yield file.name


def reach(name: str, nbytes: int) -> Bytes:
    """Map shared memory that another process has created."""
    with open(name, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
