"""Rate limits on the control connections of a publisher.

A worker sends a few hellos and a ping now and then. Its reports and fetches move a version along,
and may come as fast as the worker can send. Anything else costs its connection units of a token
bucket; a connection that takes more than its bucket has is closed. Connections without a known
worker share one further bucket, since a closed connection can come back as a new one. The
publisher sends no error: one more message for each would help a flood.
"""

from ..limits import CONTROL_RATE, UNKNOWN_PEER_RATE, Timing
from ..messages import Bye, Hello, Message, Ping, Pong
from ..observed import Checked, Observe, Verify
from ..token_bucket import Rate, TokenBucket

COST_LOW, COST_HIGH = 1, 4  # units of a message: one with at most one answer; one with more effects
BYTES_PER_COST = 2**14  # of a message, which cost as much again; few hellos have a tenth of them


class RateLimits:
    """The token buckets of all connections to one publisher."""

    def __init__(self, timing: Timing) -> None:
        # Workers ping as often as the publisher's welcome says.
        per_second = CONTROL_RATE.per_second * max(1.0, 1 / timing.ping)
        self._control = Rate(CONTROL_RATE.burst, per_second)
        self._unknown = TokenBucket(UNKNOWN_PEER_RATE, 0.0)
        self._buckets: dict[bytes, TokenBucket] = {}

    def allow_unknown(self, now: float) -> bool:
        """Return whether to parse one more message of a connection without a known worker."""
        return self._unknown.take(1, now)

    def allow(self, identity: bytes, cost: int, nbytes: int, now: float) -> bool:
        """Charge a connection for a message of `nbytes` bytes; return False to have it closed."""
        if not cost:
            return True
        cost *= 1 + nbytes // BYTES_PER_COST
        bucket = self._buckets.get(identity)
        if bucket is None:
            bucket = self._buckets[identity] = TokenBucket(self._control, now)
        if bucket.take(cost, now):
            return True
        del self._buckets[identity]
        return False

    def tick(self, now: float) -> None:
        """Drop the buckets that are full again."""
        self._buckets = {i: each for i, each in self._buckets.items() if not each.is_full(now)}


def cost_of(message: Message, *, known: bool) -> int:
    """Return the units that a message costs its connection; 0 if it moves a version along.

    A report costs nothing; a report with a wrong digest does, which is known once it was handled.
    """
    if isinstance(message, Hello | Observe | Verify):
        return COST_HIGH
    # A connection without a known worker gets a refusal for each report. A worker that comes back
    # after a restart sends a good many before the first refusal reaches it.
    return COST_LOW if not known or isinstance(message, Ping | Pong | Bye | Checked) else 0
