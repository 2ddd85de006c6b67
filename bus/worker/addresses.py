"""Which of a worker's control addresses it is with, and when it changes over. (W37)

A worker has one session at a time. From an address that fails it changes over to the next one, and
from the last to the first. While it is with another address than the first, it probes the first
one from time to time, and returns when that answers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..limits import Timing

# Seconds between two probes of the first address: `lost_after`, but at least the one; doubled up to
# the other.
RETURN_SECONDS_MIN, RETURN_SECONDS_MAX = 1.0, 60.0


class Fault(NamedTuple):
    """Why a worker left an address; `code` is that of a refusal, or empty."""

    code: str
    text: str


class Addresses:
    """The addresses of a worker, in order of preference.

    Args:
        names: The addresses.
        timing: The worker's timeouts and intervals.

    Attributes:
        names: As given.
        at: The index of the address that the worker is with.
    """

    def __init__(self, names: Sequence[str], timing: Timing) -> None:
        self.names, self.at = tuple(names), 0
        self._timing = timing
        self._tries = 0  # addresses that were left soon, one after another
        self._faults: dict[int, Fault] = {}  # by address, since the last welcome
        self._hellos: dict[int, float] = {}  # by address, when the last hello was sent
        self._entered_at = 0.0  # when the worker changed over to this address
        self._welcomed = False  # whether a session has begun there since
        self._joined_at = 0.0  # when the first of these sessions began
        self._returned = False  # whether it was a return
        self._pause = self._least
        self._probe_at = math.inf
        self._probing = False

    @property
    def several(self) -> bool:
        """True if there is another address to change over to."""
        return len(self.names) > 1

    @property
    def _least(self) -> float:
        """Seconds between two probes, unless a return has failed."""
        return max(RETURN_SECONDS_MIN, self._timing.lost_after)

    @property
    def name(self) -> str:
        """The address that the worker is with."""
        return self.names[self.at]

    @property
    def hello_at(self) -> float:
        """When the last hello was sent to this address; -inf: never."""
        return self._hellos.get(self.at, -math.inf)

    @property
    def untried(self) -> bool:
        """True if an address is left that has not failed since the last welcome."""
        return self._tries < len(self.names)

    def leave(self, fault: Fault, hello_at: float, now: float) -> float:
        """Go on to the next address; return the seconds after which to dial it."""
        if self.at == 0:
            self._end_return(now)
        # Otherwise publishers that welcome a worker and hang up would be dialled without a pause.
        lasted = self._welcomed and now - self._joined_at >= self._timing.hello_retry
        self._tries = 0 if lasted else self._tries + 1
        self._faults[self.at] = fault
        self._go((self.at + 1) % len(self.names), hello_at, now)
        round_over = self._tries > 0 and self._tries % len(self.names) == 0
        return self._timing.hello_retry if round_over else 0.0

    def _end_return(self, now: float) -> None:
        # Decide, as the first address is left, how long to wait before another return.
        if self._welcomed and now - self._entered_at > self._least:
            self._pause = self._least
        elif self._returned:
            self._pause = min(2 * self._pause, max(RETURN_SECONDS_MAX, self._least))

    def _go(self, at: int, hello_at: float, now: float) -> None:
        self._hellos[self.at] = hello_at
        self.at, self._entered_at = at, now
        self._welcomed = self._returned = False
        self._probe_at = math.inf

    def welcomed(self, now: float) -> None:
        """Record that a session has begun at this address."""
        if not self._welcomed:
            self._welcomed, self._joined_at = True, now
        self._faults.clear()
        self._probe_at = now + self._pause if self.at else math.inf

    def refusal(self) -> Fault | None:
        """Return one fault that names all addresses; None if no publisher refuses the worker."""
        codes = [self._faults[at].code for at in sorted(self._faults)]
        code = next((code for code in codes if code), "")
        texts = [f"{name}: {self._faults[at].text}" for at, name in self._tried()]
        return Fault(code, "; ".join(texts)) if code else None

    def _tried(self) -> list[tuple[int, str]]:
        return [(at, name) for at, name in enumerate(self.names) if at in self._faults]

    def probe_due(self, now: float) -> bool:
        """True if it is time to probe the first address, which then counts as begun."""
        due = now >= self._probe_at and not self._probing
        if due:
            self._probing = True
        return due

    def probed(self, now: float, *, reached: bool) -> bool:
        """Take the result of a probe; return whether to return to the first address."""
        self._probing = False
        self._probe_at = now + self._pause if self._probe_at < math.inf else math.inf
        return reached and self.at > 0

    def go_back(self, hello_at: float, now: float) -> None:
        """Return to the first address."""
        self._go(0, hello_at, now)
        self._returned, self._tries = True, 0
