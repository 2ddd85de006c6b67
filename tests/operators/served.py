"""What both kinds of what operators see are tried on."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from weightbus import Publisher, Subscriber

SECONDS = 60.0


def arrays(size: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.zeros(size, np.float32)}


@contextmanager
def served() -> Generator[Publisher]:
    """Have a publisher with a worker that is well, and one whose model is another."""
    with (
        Publisher(dashboard="127.0.0.1:0", metrics="127.0.0.1:0") as publisher,
        Subscriber(publisher.address, {"m": arrays(10)}, name="good") as good,
        Subscriber(publisher.address, {"m": arrays(3)}, name="narrow") as narrow,
    ):
        good.start()
        narrow.start()
        publisher.wait_for_workers(2, SECONDS)
        yield publisher
