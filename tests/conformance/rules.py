"""What the proxy does to messages: rules that lose, damage, double, delay, hold up and change them.

A rule is given one message and says what becomes of it; None: that is no concern of this rule.
Chance is an argument, so that a seed decides everything that the network does.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Channel = Literal["control", "data"]
Frames = tuple[bytes, ...]
Header = dict[str, Any]
How = Literal["damaged", "doubled", "skipped"]


@dataclass(frozen=True, slots=True)
class Passing:
    """A message on its way.

    Attributes:
        channel, up: Where it travels; up is from a worker to the publisher.
        worker: The name that the worker gave in its hello, on the control channel.
        frames: All of it; on the data channel the topic is the first.
        header: The decoded header; empty for subscriptions.
    """

    channel: Channel
    up: bool
    worker: str
    frames: Frames
    header: Header

    @property
    def type(self) -> str:
        """The type of the message; a chunk is one where it is sealed, too."""
        return str(self.header.get("type", "")).replace("sealed_chunk", "chunk")

    @property
    def header_at(self) -> int:
        """Which frame is the header."""
        return 0 if self.channel == "control" else 1

    def with_header(self, header: bytes) -> Frames:
        """Return the frames with another header."""
        at = self.header_at
        return (*self.frames[:at], header, *self.frames[at + 1 :])


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a message.

    Attributes:
        copies: What arrives of it, and after how many seconds: what comes behind it overtakes it.
        hold: Seconds for which it and everything behind it waits.
        cut: Cut the connection in its stead.
        pace: In pieces of so many bytes, and so many seconds apart. Put nothing else in meanwhile.
        together: To a worker, in one piece with the beginning of what comes behind it.
    """

    copies: tuple[tuple[float, Frames], ...] = ()
    hold: float = 0.0
    cut: bool = False
    pace: tuple[int, float] | None = None
    together: bool = False


Rule = Callable[[Passing], Fate | None]
LOST = Fate()


@dataclass(eq=False)
class Spoil:
    """One byte of a connection that does not arrive as it was sent.

    Attributes:
        channel, up: On which connection, and which way.
        at: How many bytes pass before it.
        how: Another one comes in its place, it comes twice, or not at all.
    """

    channel: Channel
    up: bool
    at: int
    how: How

    def __str__(self) -> str:
        return f"{self.channel}-{'up' if self.up else 'down'}-{self.at}-{self.how}"

    def pass_on(self, data: bytes) -> bytes:
        """Return what arrives of some bytes among which it is."""
        byte = data[self.at]
        there = {"damaged": bytes([byte ^ 0x55]), "doubled": bytes([byte, byte]), "skipped": b""}
        return data[: self.at] + there[self.how] + data[self.at + 1 :]


@dataclass
class Which:
    """Which messages a rule is about.

    Attributes:
        types: Of these types; none: of any type that has a header.
        channel, up, worker: Only those; None: all.
        share: Of these, by chance, so many.
        most: Not more than so many.
        skip: But not the first ones.
        when: And only if it says so.
    """

    types: Sequence[str] = ()
    channel: Channel | None = None
    up: bool | None = None
    worker: str | None = None
    share: float = 1.0
    most: int | None = None
    skip: int = 0
    when: Callable[[Passing], bool] = lambda _: True
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    count: int = 0  # messages that it was about, so far

    def __call__(self, passing: Passing) -> bool:
        """Return whether the rule is about this one."""
        if not passing.header or (self.types and passing.type not in self.types):
            return False
        if self.channel not in (None, passing.channel) or self.up not in (None, passing.up):
            return False
        if self.worker not in (None, passing.worker) or not self.when(passing):
            return False
        if self.most is not None and self.count >= self.most:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.chance.random() >= self.share:
            return False
        self.count += 1
        return True


def lose(which: Which) -> Rule:
    """Lose messages."""
    return lambda passing: LOST if which(passing) else None


def cut(which: Which) -> Rule:
    """Cut the connection where a message would have passed."""
    return lambda passing: Fate(cut=True) if which(passing) else None


def hold(which: Which, seconds: float) -> Rule:
    """Hold up a connection at each of the messages: a slow link."""
    return lambda p: Fate(copies=((0.0, p.frames),), hold=seconds) if which(p) else None


def trickle(which: Which, nbytes: int, seconds: float) -> Rule:
    """Let messages through in pieces: a slow link, as those see it who wait for whole ones."""
    return lambda p: Fate(((0.0, p.frames),), pace=(nbytes, seconds)) if which(p) else None


def join(which: Which) -> Rule:
    """Have messages arrive together with the beginning of the next."""
    return lambda p: Fate(((0.0, p.frames),), together=True) if which(p) else None


def delay(which: Which, seconds: float) -> Rule:
    """Let messages come late by up to so much; others overtake them."""

    def rule(passing: Passing) -> Fate | None:
        if not which(passing):
            return None
        return Fate(copies=((which.chance.uniform(0.0, seconds), passing.frames),))

    return rule


def double(which: Which, seconds: float) -> Rule:
    """Let messages come twice, the second time late by up to so much."""

    def rule(passing: Passing) -> Fate | None:
        if not which(passing):
            return None
        later = which.chance.uniform(0.0, seconds)
        return Fate(copies=((0.0, passing.frames), (later, passing.frames)))

    return rule


def damage_payload(which: Which) -> Rule:
    """Change one byte of a payload, or its length."""

    def rule(passing: Passing) -> Fate | None:
        if len(passing.frames) <= passing.header_at + 1 or not which(passing):
            return None
        *front, payload = passing.frames
        return Fate(copies=((0.0, (*front, _damaged(payload, which.chance))),))

    return rule


def add_frame(which: Which) -> Rule:
    """Put another frame behind the last."""

    def rule(passing: Passing) -> Fate | None:
        return Fate(copies=((0.0, (*passing.frames, b"x")),)) if which(passing) else None

    return rule


def _damaged(payload: bytes, chance: random.Random) -> bytes:
    match chance.randrange(4):
        case 0:
            return payload[:-1]
        case 1:
            return payload + b"\0"
        case _:
            changed = bytearray(payload)
            if changed:
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            return bytes(changed)


def damage_header(which: Which) -> Rule:
    """Put another byte in some place of a header."""

    def rule(passing: Passing) -> Fate | None:
        if not which(passing):
            return None
        changed = bytearray(passing.frames[passing.header_at])
        changed[which.chance.randrange(len(changed))] = which.chance.choice(b'0123456789abcdef"{,x')
        return Fate(copies=((0.0, passing.with_header(bytes(changed))),))

    return rule


def rewrite(which: Which, other: Callable[[Passing], Frames]) -> Rule:
    """Let something else arrive in the place of messages."""
    return lambda p: Fate(copies=((0.0, other(p)),)) if which(p) else None


def change(which: Which, **fields: object) -> Rule:
    """Give fields of the header other values."""
    return rewrite(which, lambda p: p.with_header(json.dumps({**p.header, **fields}).encode()))
