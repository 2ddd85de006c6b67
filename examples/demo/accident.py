"""The accident: midway, one worker is killed (SIGKILL) and later started again.

It shows what the bus is for. Nobody waits for the dead worker: the others get every version. The
publisher finds out by itself that it is lost, and when it comes back it gets the latest version at
once, not those that it missed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weightbus.types import WorkerStatus

from .fleet import Fleet
from .tally import version_of

Phase = Literal["ahead", "killed", "lost", "starting", "over"]

SHOW_LOST_SECONDS = 1.0  # for which the loss is left to be seen before the worker is started again


@dataclass(slots=True)
class Accident:
    """One worker's accident, and how it was mended.

    Attributes:
        victim: The worker.
        at: When it happens, in seconds from the start of the run.
        phase: How far it has come.
        noticed_s: How long the publisher took to find the worker lost.
        back_s: From its new start (a new process) until it ran the latest version.
        missed: Versions that it never saw.
        versions: Those published when it was killed, and when it was back.
    """

    victim: str
    at: float
    phase: Phase = "ahead"
    noticed_s: float | None = None
    back_s: float | None = None
    missed: int | None = None
    versions: tuple[int, ...] = ()
    _since: float = 0.0

    def step(
        self, fleet: Fleet, status: Mapping[str, WorkerStatus], version: int, now: float
    ) -> str | None:
        """Let happen what is due; return words about it if anything was.

        Args:
            fleet: Whose worker it is.
            status: Who is there, as the publisher sees it.
            version: The newest.
            now: Seconds from the start of the run.
        """
        victim = status.get(self.victim)
        lost = victim is None or victim.state == "lost"
        waited = now - self._since
        match self.phase:
            case "ahead" if now >= self.at:
                fleet.kill(self.victim)
                self.versions += (version,)
                return self._turn("killed", now, f"{self.victim} is killed (SIGKILL)")
            case "killed" if lost:
                self.noticed_s = waited
                text = f"{self.victim} is lost, the publisher says; the others went on"
                return self._turn("lost", now, text)
            case "lost" if waited >= SHOW_LOST_SECONDS:
                fleet.start(self.victim)
                return self._turn("starting", now, f"{self.victim} is started again")
            case "starting" if not lost and (runs := version_of(victim)) > 0:
                self.back_s, self.missed = waited, max(0, runs - self.versions[0] - 1)
                self.versions += (runs,)
                text = f"{self.victim} is back, {waited:.1f} s after its start: version {runs} "
                return self._turn("over", now, text + f"at once, past {self.missed} it missed")
            case _:
                return None

    def _turn(self, phase: Phase, now: float, text: str) -> str:
        self.phase, self._since = phase, now
        return text

    @property
    def open(self) -> bool:
        """Whether it has begun and is not mended yet."""
        return self.phase not in ("ahead", "over")
