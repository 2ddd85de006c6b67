"""Tracks a worker's session with its publisher, and the control connection of that session.

The phase of a session is `outside`, `probing` or `inside` (`tables.SESSIONS`). The session's times
decide when the worker may send hello, when to ping, and when the publisher counts as lost.
"""

import math

import msgspec
from msgspec.structs import replace

from ..headers import token_of
from ..limits import Timing
from ..messages import PARTS, RELAY, UPSTREAM, Welcome
from .tables import SESSIONS, Change, SessionPhase


class Terms(msgspec.Struct, frozen=True):
    """The properties of a session, from its welcome and from later messages.

    Attributes:
        epoch: The publisher's epoch.
        data: The endpoint of the publisher's data socket.
        ping_every: Seconds between two pings.
        shared: The publisher is on this host, and its memory can be read.
        upstream: The session's token for reports on the data connection; empty if there is none.
        subscribed: A published message has arrived in this session.
        unheard_at: When to warn the user, unless a published message has arrived before.
        relay: The publisher accepts reports about the workers behind this relay.
        cut_off_at: The publisher is a relay that has had no publisher of its own since this time.
            None: it has one, or is not a relay.
        parts: The publisher sends parts of versions.
    """

    epoch: int
    data: str
    ping_every: float
    shared: bool = False
    upstream: str = ""
    subscribed: bool = False
    unheard_at: float = math.inf
    relay: bool = False
    cut_off_at: float | None = None
    parts: bool = False


class Session:
    """A session, or the attempts to begin one.

    Args:
        timing: The worker's timeouts and intervals.
        hello_at: When the last hello was sent to this address.

    Attributes:
        phase: The phase, as in `tables.SESSIONS`.
        terms: The terms of the session, or of the last session at this address.
        waiting: While probing: the welcome with which the session will begin.
        hello_at: When the last hello was sent to this address; -inf: never.
    """

    def __init__(self, timing: Timing, hello_at: float = -math.inf) -> None:
        self._timing = timing
        self.phase: SessionPhase = "outside"
        self.terms = Terms(0, "", timing.ping)
        self.waiting: Welcome | None = None
        self._heard_at = 0.0  # when the last message arrived
        self._answered_at = 0.0  # when the last control message arrived
        self.hello_at = hello_at
        # When hello was sent or the control connection changed; None: a control message has
        # arrived since then.
        self._unanswered_since: float | None = None
        self._pinged_at = 0.0
        self._redial_at: float | None = None  # when to redial after a handshake with a wrong key

    # Its phase and terms.

    def change(self, change: Change, waiting: Welcome | None = None) -> bool:
        """Apply an event to the phase; return whether the phase has a transition for it."""
        after = SESSIONS[self.phase].get(change)
        if after is not None:
            self.phase, self.waiting = after, waiting
            if after != "inside":
                self.terms = replace(self.terms, upstream="")  # valid only in its session (W34)
        return after is not None

    def begin(self, welcome: Welcome, now: float, *, shared: bool) -> None:
        """Begin the session with its welcome; `shared`: the publisher's memory can be read."""
        self.change("welcomed")
        self.terms = Terms(
            welcome.epoch,
            welcome.data,
            min(self._timing.ping, welcome.ping_ms / 1000),
            shared=shared,
            upstream=token_of(welcome, UPSTREAM),  # W34
            unheard_at=now + self._timing.lost_after,
            relay=RELAY in welcome.features,
            parts=PARTS in welcome.features,
        )

    def welcomed_again(self, welcome: Welcome) -> None:
        """Store the token of another welcome in the same session."""  # W34
        self.terms = replace(self.terms, upstream=token_of(welcome, UPSTREAM))

    def subscribed(self) -> None:
        """Record that a published message has arrived."""
        self.terms = replace(self.terms, subscribed=True)

    def cut_off(self, at: float | None) -> bool:
        """Record since when the relay has had no publisher; None: it has one.

        Return whether the relay lost its publisher, or has one again.
        """
        before = self.terms.cut_off_at
        if at != before:
            self.terms = replace(self.terms, cut_off_at=at)
        return (at is None) != (before is None)

    # Messages that are received and sent.

    def heard(self, now: float, *, pushed: bool) -> None:
        """Record a message that shows that the publisher is not lost."""
        self._heard_at = now
        if not pushed:
            self._answered_at, self._unanswered_since = now, None

    def answered(self, now: float) -> None:
        """Record that a control message of any kind arrived."""
        self._answered_at, self._unanswered_since = now, None

    def welcomed(self, now: float) -> None:
        """Record a welcome, which proves that the keys are right."""
        self._heard_at, self._redial_at = now, None

    def may_say_hello(self, now: float) -> bool:
        """True if enough time has passed since the last hello."""
        return now - self.hello_at >= self._timing.hello_retry  # W1

    def sent_hello(self, now: float) -> None:
        """Record that a hello was sent; an earlier unanswered hello still counts from its time."""
        self.hello_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now

    def ping_due(self, now: float) -> bool:
        """Return whether to send the regular ping now. If so, the ping counts as sent."""
        due = now - self._pinged_at >= self.terms.ping_every  # W17, W18
        if due:
            self._pinged_at = now
        return due

    def unheard(self, now: float) -> bool:
        """Return whether to report that no published message arrives: True once per session."""
        due = not self.terms.subscribed and now >= self.terms.unheard_at
        if due:
            self.terms = replace(self.terms, unheard_at=math.inf)
        return due

    # The connection.

    def changed(self, now: float) -> None:
        """Record that the control connection opened, closed, or tries to connect."""
        self._unanswered_since = now

    def handshake_failed(self, now: float) -> bool:
        """Plan to redial, as libzmq may have given up; return False if that was planned already."""
        if self._redial_at is not None:
            return False
        self._redial_at = now + self._timing.ping
        return True

    def redialled(self) -> None:
        """Record that the worker connects again."""
        self._unanswered_since = self._redial_at = None

    def redial_due(self, now: float) -> bool:
        """True if the publisher is silent for too long, or the control connection seems dead.

        TCP detects a dead connection late. Also, libzmq abandons a connection on which anything
        other than ZMTP arrives: the state of the connection then no longer changes, and no hello
        can be sent. While libzmq tries to connect, the state changes again and again, so a long
        time without a change means that libzmq has given up.
        """
        timing, since = self._timing, self._unanswered_since
        if since is not None and now - since >= timing.lost_after:
            return True
        # A frame with a damaged length swallows later messages until it has that length. (W19)
        deaf = now - self._answered_at >= timing.deaf_after
        if self.phase != "outside" and (deaf or now - self._heard_at >= timing.lost_after):
            return True
        return self._redial_at is not None and now >= self._redial_at
