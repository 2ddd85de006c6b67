"""Measure, during a flood, how long pongs take, and whether workers with allowed keys can join."""

import threading
import time
from typing import Self

import numpy as np

from weightbus import Subscriber, WeightBusError
from weightbus.bus.messages import Ping, Pong

from .dealer import Dealer

MODEL = "probe"  # a model that is never published, so that no publish waits for a probe
PING_SECONDS = 0.05
SILENT_SECONDS = 2.0  # after this silence it joins again, since its connection may be lost


class Pongs:
    """A worker that pings, and records how long the answers take.

    Attributes:
        longest: The longest time in seconds; an unanswered ping counts from its sending.
    """

    def __init__(self, address: str) -> None:
        self._address, self._over = address, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.longest = 0.0

    def _run(self) -> None:
        while not self._over.is_set():
            dealer = Dealer(self._address, "probe")
            try:
                dealer.join(MODEL, SILENT_SECONDS)
                token = 0
                while not self._over.is_set() and self._ping(dealer, token := token + 1):
                    self._over.wait(PING_SECONDS)
            except TimeoutError:
                self.longest = max(self.longest, SILENT_SECONDS)
            finally:
                dealer.close()

    def _ping(self, dealer: Dealer, token: int) -> bool:
        """Ping once; return whether an answer arrived."""
        said = time.monotonic()
        dealer.say(Ping(token=token))
        while (left := said + SILENT_SECONDS - time.monotonic()) > 0:
            heard = dealer.hear(min(left, PING_SECONDS))
            passed = time.monotonic() - said
            if isinstance(heard, Pong) and heard.token == token:
                self.longest = max(self.longest, passed)
                return True
            if self._over.is_set():
                break
        self.longest = max(self.longest, time.monotonic() - said)
        return False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def joins(address: str, name: str, seconds: float) -> bool:
    """Make a worker join; return whether it has joined within `seconds`."""
    target = {"w": np.zeros(4, np.float32)}
    try:
        with Subscriber(address, {MODEL: target}, name=name) as subscriber:
            return subscriber.wait_joined(seconds)
    except (WeightBusError, OSError):
        return False
