"""When a worker asks for the latest version of a model, of which it has heard. (W4)

A version that has failed, and is to be tried again, is left alone for ever longer pauses. Where the
user wants one version and no other, that one is asked for, by its number, once there is such a
version.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from ..effects import Effect, Rejected, Send, Whole
from ..limits import Timing
from ..messages import Fetch
from .version_store import Key, VersionStore


class _Exact(Struct, frozen=True):
    """A version that is wanted, and no other: whether it is gone, and when it was asked for."""

    key: Key
    gone: bool = False
    asked_at: float = -math.inf


class _Backoff(Struct, frozen=True):
    """A version that is left alone until then, which was the pause."""

    key: Key
    until: float
    pause: float


class FetchPlanner:
    """What was asked for, and when.

    Args:
        model: The model's name.
        holds: Its versions that are here.
        timing: How long to wait.
    """

    def __init__(self, model: str, versions: VersionStore, timing: Timing) -> None:
        self._model, self._versions, self._timing = model, versions, timing
        self.only: Key | None = None  # what the user wants, and nothing else
        self._exact = _Exact((0, 0))  # what that is, or was last: who polls wants it again soon
        self._latest_at = -math.inf  # when the latest announcement was asked for
        self._answered = -math.inf  # when the last ping was sent that was answered
        self._backoff = _Backoff((0, 0), 0.0, 0.0)

    def reconnected(self) -> None:
        """A session begins."""
        self._latest_at = -math.inf

    def hear_of(self, epoch: int, version: int, now: float) -> list[Effect]:
        """A beacon, a welcome or a stray chunk speaks of a version: ask if it is news."""
        arriving, key = self._versions.at["arriving"], (epoch, version)
        news = self._versions.hear(key)
        if self.only is not None:
            return self.exact(now)
        if version == 0 or not news:
            return []
        if arriving is not None and (key <= arriving.key or self._versions.mode == "catching-up"):
            return []
        if key <= self._backoff.key and now < self._backoff.until:  # W36
            return []
        waiting = self._versions.at["announced"]
        if waiting is not None and key <= waiting.key and waiting.lacks == "layout":
            return []  # W7
        return self.latest(epoch, now)

    def latest(self, epoch: int, now: float, *, at_once: bool = False) -> list[Effect]:
        """Ask for the latest version, but not all the time."""
        if self.only is not None:
            return self.exact(now)
        if now - self._latest_at < self._timing.quiet and not at_once:
            return []
        self._latest_at = now
        waiting = self._versions.at["announced"]
        layout = waiting is not None and waiting.lacks == "layout"
        return [Send(Fetch(model=self._model, epoch=epoch, version=0, layout=layout))]

    def layout(self, key: Key, now: float) -> list[Effect]:
        """Ask for the layout of a version that was announced. (W7)"""
        self._latest_at = now
        epoch, version = key
        return [Send(Fetch(model=self._model, epoch=epoch, version=version, layout=True))]

    def answered(self, sent_at: float) -> None:
        """A ping that was sent then was answered, and whatever was asked before it. (W12)"""
        self._answered = sent_at
        arriving = self._versions.at["arriving"]
        if arriving is not None:
            arriving.transfer.answered(sent_at)

    def due(self, now: float) -> bool:
        """Return whether to ask again for a layout, which may be on its way. (W7)"""
        passed = self._answered > self._latest_at
        patience = self._timing.patience if passed else self._timing.patience_max
        return now - self._latest_at >= patience

    # Of one version, where the user wants no other. (W8)

    def want(self, key: Key | None, now: float) -> list[Effect]:
        """One version is wanted, and no other until further word; or the latest again."""
        self.only = key
        if key is None:
            for late in self._versions.all("announced", "arriving"):
                if self.outdated(late.key):  # it was wanted though a newer one is here
                    self._versions.move(late, "newer")
            return self.hear_of(*self._versions.heard, now)
        if key != self._exact.key:
            self._exact = _Exact(key)
        if self._exact.gone:
            return self.gone(*key)
        if key in self._versions.rejected:
            return self.forgo("it could not be applied before")
        for other in self._versions.all("announced", "arriving"):
            if other.key != key:
                self._versions.move(other, "newer")
        here = self._versions.find(key, "staged")
        if here is not None:
            return [Whole(here.staged)]
        return self.exact(now)

    def exact(self, now: float) -> list[Effect]:
        """Ask for the only version that is wanted, if there is one and it is not here."""
        only, versions, running = self.only, self._versions, self._versions.at["running"]
        if only is None:
            return []
        if running is not None and running.key > only:
            return self.forgo(f"version {running.key[1]} of epoch {running.key[0]} runs here")
        if versions.heard[0] > only[0]:
            return self.forgo(f"the publisher is of epoch {versions.heard[0]} now")
        if versions.heard < only or only in versions.rejected or versions.has(only):
            return []
        if only == self._backoff.key and now < self._backoff.until:  # W36
            return []
        if now - self._exact.asked_at < self._timing.quiet:
            return []
        self._exact = replace(self._exact, asked_at=now)
        return [Send(Fetch(model=self._model, epoch=only[0], version=only[1], layout=True))]

    def gone(self, epoch: int, version: int) -> list[Effect]:
        """The publisher no longer has a version; whoever polls for it is told the next time."""
        key = (epoch or self._exact.key[0], version)
        if key != self._exact.key or self._versions.has(key):
            return []
        self._exact = replace(self._exact, gone=True)
        return self.forgo("the publisher has it no more")

    def overtaken(self, key: Key) -> list[Effect]:
        """A version was committed, to which all workers go on, whatever one of them wants."""
        overtaken = self.only is not None and self.only < key
        return self.forgo("all workers go on to a newer one") if overtaken else []

    def forgo(self, why: str) -> list[Effect]:
        """The only version that is wanted is not to be had any more: tell the user."""
        only, self.only = self.only, None
        if only is None:
            return []
        text = f"it was asked for alone, and is not to be had any more: {why}; ask for a newer one"
        return [Rejected(self._model, *only, "gone", text)]

    def is_wanted(self, key: Key) -> bool:
        """Return whether a version is the only one that is wanted, and may yet be had."""
        return key == self.only and key not in self._versions.rejected and not self.outdated(key)

    def outdated(self, key: Key) -> bool:
        """Return whether a version is here, or newer ones are; of the only one wanted, applied."""
        if key != self.only:
            return key <= self._versions.newest
        given = [entry.key for entry in self._versions.all("staged", "ready")]
        begun = [entry.key for entry in self._versions.all("applying", "running")]
        return key in given or key <= max(begun, default=(0, 0))

    # What has failed, and is to be tried again. (W36)

    def put_off(self, key: Key, now: float) -> None:
        """Leave a version alone for a while, for twice as long as the last time."""
        longer = min(2 * self._backoff.pause, self._timing.patience_max)
        pause = longer if key == self._backoff.key else self._timing.patience
        self._backoff = _Backoff(key, now + pause, pause)

    def put_off_no_longer(self, key: Key) -> None:
        """A version is not to be had any more: what was before it may be what there is."""
        if key == self._backoff.key:
            self._backoff = replace(self._backoff, until=-math.inf)
