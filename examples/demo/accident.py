"""The accident: midway, one worker is killed (SIGKILL) and later started again.

It shows how the bus handles a crash. The other workers do not wait for the dead worker, and get
every version. The publisher detects that the worker is lost. When the worker is back, it gets the
latest version at once, without the versions that it missed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weightbus.types import WorkerStatus

from .fleet import Fleet
from .tally import version_of

Phase = Literal["ahead", "killed", "lost", "starting", "over"]

SHOW_LOST_SECONDS = 1.0  # how long the screen shows the loss before the worker is started again


@dataclass(slots=True)
class Accident:
    """One worker's accident and recovery.

    Attributes:
        victim: The worker.
        at: When the worker is killed, in seconds from the start of the run.
        phase: The current phase of the accident.
        noticed_s: How long the publisher took to detect that the worker was lost.
        back_s: Time from the start of the new process until it ran the latest version.
        missed: How many versions the worker missed.
        versions: The latest versions when the worker was killed, and when it was back.
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
        """Take the next step if it is due; return a text about the step, or None.

        Args:
            fleet: The workers' processes.
            status: The publisher's status of each worker.
            version: The newest version.
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
        """Whether the worker was killed and is not back yet."""
        return self.phase not in ("ahead", "over")
