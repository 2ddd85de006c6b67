"""What happened in a round, in order, for whoever looks for the cause of a failure."""

import threading
import time


class Story:
    """Lines with times. Any thread may tell."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, str]] = []
        self._lock, self._begun = threading.Lock(), time.monotonic()

    def tell(self, text: str) -> None:
        """Something has happened."""
        with self._lock:
            self._lines.append((time.monotonic() - self._begun, text))

    def lines(self) -> list[str]:
        """Return all of it."""
        with self._lock:
            return [f"{at:8.3f} {text}" for at, text in self._lines]
