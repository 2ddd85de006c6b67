"""The network of a round: the proxy of the conformance suite, and what chaos does to it.

With keys the proxy cannot read what passes on the control channel; everything is done to it all
the same. Without, nothing tells a damaged greeting from another worker, nor the number of a version
that comes with its announcement from another number: those are damaged with keys only.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from weightbus.tests.conformance.proxy import Link, Proxy
from weightbus.tests.conformance.rules import Channel, Fate, How, Passing, Rule, Spoil

HOLD_SECONDS = 0.05  # for which a message of a slow link, and all behind it, waits
LATE_SECONDS = 0.3  # by which messages come late at most
NO_LINGER = struct.pack("ii", 1, 0)  # a connection that is closed so is reset
GREETINGS = ("hello", "welcome")
CHANNELS: dict[str, Sequence[Channel]] = {
    "control": ("control",),
    "data": ("data",),
    "both": ("control", "data"),
}


class Wire(Proxy):
    """The proxy of one round.

    Args:
        chance: Decides which messages and bytes.
        changed: Notified of each message.
        keyed: Whether there are keys.
    """

    def __init__(self, chance: random.Random, changed: threading.Condition, *, keyed: bool) -> None:
        super().__init__(changed=changed)
        self._chance, self._keyed = chance, keyed
        self.touched = 0  # messages of which something became

    def reset(self, channels: str) -> int:
        """Reset all connections; return how many there were."""
        return self._each(channels, _reset)

    def truncate(self, channels: str) -> int:
        """Cut each connection in the middle of what passes next."""
        up = self._chance.random() < 0.5

        def end(link: Link) -> None:
            link.spoils.append(Cut(link, up, self._at(), asyncio.get_running_loop()))

        return self._each(channels, end)

    def misspell(self, channels: str) -> int:
        """Have one byte of each connection damaged, doubled or skipped."""
        how: How = self._chance.choice(("damaged", "doubled", "skipped"))
        up = self._chance.random() < 0.5

        def one(link: Link) -> None:
            at = self._at() if self._keyed else self._chance.randrange(2)  # flags or length
            link.spoils.append(Spoil(link.channel, up, at, how))

        return self._each(channels, one)

    def heal(self) -> None:
        """Let everything pass as it is."""
        self.rules, self.reachable = [], {"control", "data"}
        self._each("both", lambda link: link.spoils.clear())

    def _at(self) -> int:
        return self._chance.choice((0, 1, 9, 10, 40, 300, 4000, 30_000))

    def _each(self, channels: str, what: Callable[[Link], None]) -> int:
        def chosen() -> int:
            links = [link for link in self._links if link.channel in CHANNELS[channels]]
            for link in links:
                what(link)
            return len(links)

        return self._soon(chosen)

    # Rules, which last for a while.

    def rule(self, kind: str, channels: str, share: float) -> Rule:
        """Return a rule that has this done to a share of the messages."""
        make = {
            "drop": lambda _: Fate(),
            "double": self._double,
            "delay": self._delay,
            "hold": lambda p: Fate(((0.0, p.frames),), hold=HOLD_SECONDS),
            "damage": self._damage,
        }[kind]

        def rule(passing: Passing) -> Fate | None:
            if passing.channel not in CHANNELS[channels] or self._chance.random() >= share:
                return None
            if passing.up and passing.channel == "data":
                return None  # subscriptions, which no network loses one by one
            fate = make(passing)
            self.touched += fate is not None
            return fate

        return rule

    def _double(self, passing: Passing) -> Fate:
        later = self._chance.uniform(0, LATE_SECONDS)
        return Fate(((0.0, passing.frames), (later, passing.frames)))

    def _delay(self, passing: Passing) -> Fate:
        return Fate(((self._chance.uniform(0, LATE_SECONDS), passing.frames),))

    def _damage(self, passing: Passing) -> Fate | None:
        frames = list(passing.frames)
        which = self._chance.randrange(len(frames))
        plain = not self._keyed and which <= passing.header_at
        tells = passing.type in GREETINGS or passing.header.get("whole") is not None
        if not frames[which] or (plain and tells):
            return None
        frames[which] = self._damaged(frames[which])
        return Fate(((0.0, tuple(frames)),))

    def _damaged(self, frame: bytes) -> bytes:
        at = self._chance.randrange(len(frame))
        match self._chance.randrange(3):
            case 0:
                return frame[:at]
            case 1:
                return frame + frame[at:]
            case _:
                other = frame[at] ^ 1 << self._chance.randrange(8)
                return frame[:at] + bytes([other]) + frame[at + 1 :]


class Cut(Spoil):
    """The byte at which a connection ends."""

    def __init__(self, link: Link, up: bool, at: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(link.channel, up, at, "skipped")
        self._link, self._loop = link, loop

    def pass_on(self, data: bytes) -> bytes:
        """Let pass what is before it."""
        self._loop.call_soon(self._link.cut)
        return data[: self.at]


def _reset(link: Link) -> None:
    for writer in (link.to_worker, link.to_publisher):
        own = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):  # it is closed already
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    link.cut()
