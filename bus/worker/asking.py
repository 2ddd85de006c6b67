"""When a worker asks for the latest version of a model, of which it has heard. (W4)

A version that found no room is left alone for ever longer pauses, and fetched anew.
"""

import math

from ..effects import Effect, Send
from ..limits import Timing
from ..messages import Fetch
from .holdings import Holdings, Key
from .layouts import Acceptance


class Asking:
    """What was asked for, and when.

    Args:
        model: The model's name.
        holds: Its versions that are here.
        acceptance: Its layouts that are known.
        timing: How long to wait.
    """

    def __init__(self, model: str, holds: Holdings, acceptance: Acceptance, timing: Timing) -> None:
        self._model, self._holds, self._acceptance = model, holds, acceptance
        self._timing = timing
        self.asked_at = -math.inf  # when the latest announcement was asked for
        self._later, self._until, self._pause = (0, 0), 0.0, 0.0  # what is put off

    def hear_of(self, epoch: int, version: int, now: float) -> list[Effect]:
        """A beacon, a welcome or a stray chunk speaks of a version: ask if it is news."""
        arriving, key = self._holds.at("arriving"), (epoch, version)
        if version == 0 or key <= self._holds.newest or key in self._holds.rejected:
            return []
        if arriving is not None and (key <= arriving.key or self._holds.mode == "catching-up"):
            return []
        if key == self._later and now < self._until:
            return []
        return self.latest(epoch, now)

    def latest(self, epoch: int, now: float) -> list[Effect]:
        """Ask for the latest version, but not all the time."""
        if now - self.asked_at < self._timing.quiet:
            return []
        self.asked_at = now
        waiting = self._holds.at("announced")
        layout = waiting is not None and self._acceptance.layout(waiting.announce) is None
        return [Send(Fetch(model=self._model, epoch=epoch, version=0, layout=layout))]

    def layout(self, key: Key, now: float) -> list[Effect]:
        """Ask for the layout of a version that was announced. (W7)"""
        self.asked_at = now
        epoch, version = key
        return [Send(Fetch(model=self._model, epoch=epoch, version=version, layout=True))]

    def put_off(self, key: Key, now: float) -> None:
        """Leave a version alone for a while, for twice as long as the last time."""
        longer = min(2 * self._pause, self._timing.patience_max)
        self._pause = longer if key == self._later else self._timing.patience
        self._later, self._until = key, now + self._pause
