"""Selects the control address that a worker uses, and decides when to change to another. (W37)

A worker has one session at a time. If its address fails, the worker changes to the next address;
after the last address comes the first. While the worker uses a later address, it probes the first
address from time to time, and returns to it once a publisher answers there.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..limits import Timing

# Seconds between two probes of the first address: `lost_after`, but at least the minimum. Each
# failed return doubles them, up to the maximum.
RETURN_SECONDS_MIN, RETURN_SECONDS_MAX = 1.0, 60.0


class Fault(NamedTuple):
    """Why a worker left an address; `code` is the code of the refusal, empty if there was none."""

    code: str
    text: str


class Addresses:
    """The addresses of a worker, in order of preference.

    Args:
        names: The addresses.
        timing: The worker's timeouts and intervals.

    Attributes:
        names: The addresses.
        index: The index of the address that the worker uses.
    """

    def __init__(self, names: Sequence[str], timing: Timing) -> None:
        self.names, self.index = tuple(names), 0
        self._timing = timing
        self._failures = 0  # consecutive addresses without a session of at least `hello_retry`
        self._faults: dict[int, Fault] = {}  # by index of the address, since the last welcome
        self._hellos: dict[int, float] = {}  # by index, when the last hello was sent
        self._entered_at = 0.0  # when the worker changed to this address
        self._welcomed = False  # whether a session has begun at this address since then
        self._joined_at = 0.0  # when the first of these sessions began
        self._returned = False  # whether the worker came to this address by `go_back`
        self._pause = self._pause_min  # seconds until the next probe
        self._probe_at = math.inf
        self._probing = False

    @property
    def several(self) -> bool:
        """True if there is another address to change over to."""
        return len(self.names) > 1

    @property
    def _pause_min(self) -> float:
        """Seconds between two probes, unless a return has failed."""
        return max(RETURN_SECONDS_MIN, self._timing.lost_after)

    @property
    def name(self) -> str:
        """The address that the worker uses."""
        return self.names[self.index]

    @property
    def hello_at(self) -> float:
        """When the last hello was sent to this address; -inf: never."""
        return self._hellos.get(self.index, -math.inf)

    @property
    def in_first_round(self) -> bool:
        """True if fewer addresses in a row have failed than there are addresses."""
        return self._failures < len(self.names)

    def leave(self, fault: Fault, hello_at: float, now: float) -> float:
        """Change to the next address; return the seconds to wait before dialling that address."""
        if self.index == 0:
            self._set_pause(now)
        # A short session counts as a failure. Otherwise publishers that welcome a worker and hang
        # up would be dialled without a pause.
        lasted = self._welcomed and now - self._joined_at >= self._timing.hello_retry
        self._failures = 0 if lasted else self._failures + 1
        self._faults[self.index] = fault
        self._change_to((self.index + 1) % len(self.names), hello_at, now)
        round_over = self._failures > 0 and self._failures % len(self.names) == 0
        return self._timing.hello_retry if round_over else 0.0

    def _set_pause(self, now: float) -> None:
        # The worker leaves the first address: set how long to wait before the next probe of it.
        if self._welcomed and now - self._entered_at > self._pause_min:
            self._pause = self._pause_min
        elif self._returned:
            self._pause = min(2 * self._pause, max(RETURN_SECONDS_MAX, self._pause_min))

    def _change_to(self, index: int, hello_at: float, now: float) -> None:
        self._hellos[self.index] = hello_at
        self.index, self._entered_at = index, now
        self._welcomed = self._returned = False
        self._probe_at = math.inf

    def welcomed(self, now: float) -> None:
        """Record that a session has begun at this address."""
        if not self._welcomed:
            self._welcomed, self._joined_at = True, now
        self._faults.clear()
        self._probe_at = now + self._pause if self.index else math.inf

    def refusal(self) -> Fault | None:
        """Return one fault for all failed addresses; None if no publisher refused the worker."""
        codes = [self._faults[index].code for index in sorted(self._faults)]
        code = next((code for code in codes if code), "")
        texts = [f"{name}: {self._faults[index].text}" for index, name in self._failed()]
        return Fault(code, "; ".join(texts)) if code else None

    def _failed(self) -> list[tuple[int, str]]:
        return [(i, name) for i, name in enumerate(self.names) if i in self._faults]

    def probe_due(self, now: float) -> bool:
        """Return whether to probe the first address now. If so, the probe counts as begun."""
        due = now >= self._probe_at and not self._probing
        if due:
            self._probing = True
        return due

    def probed(self, now: float, *, reached: bool) -> bool:
        """Record a probe's result; return whether to go back to the first address."""
        self._probing = False
        self._probe_at = now + self._pause if self._probe_at < math.inf else math.inf
        return reached and self.index > 0

    def go_back(self, hello_at: float, now: float) -> None:
        """Change back to the first address."""
        self._change_to(0, hello_at, now)
        self._returned, self._failures = True, 0
