"""Rate limits on the control connections of a publisher.

The reports and fetches of a worker are not limited: they advance a version, and may come as fast as
the worker can send. Every other message, such as a hello or ping, costs its connection units of a
token bucket. A connection whose bucket has too few units is closed. Connections without a known
worker also share one bucket, since a peer can replace a closed connection with a new one. The
publisher sends no error message then, since an answer to each message would help a flood.
"""

from ..limits import CONTROL_RATE, UNKNOWN_PEER_RATE, Timing
from ..messages import Bye, Checked, Hello, Observe, Ping, Pong, Verify
from ..structs import Message
from ..token_bucket import Rate, TokenBucket

COST_LOW, COST_HIGH = 1, 4  # units for a message with at most one effect, and with more effects
BYTES_PER_COST = 2**14  # a message costs its units once more for each so many bytes


class RateLimits:
    """The token buckets of all connections to one publisher."""

    def __init__(self, timing: Timing) -> None:
        # Workers ping at the interval that the publisher's welcome contains.
        per_second = CONTROL_RATE.per_second * max(1.0, 1 / timing.ping)
        self._control = Rate(CONTROL_RATE.burst, per_second)
        self._unknown = TokenBucket(UNKNOWN_PEER_RATE, 0.0)
        self._buckets: dict[bytes, TokenBucket] = {}

    def allow_unknown(self, now: float) -> bool:
        """True if one more message of a connection without a known worker may be parsed."""
        return self._unknown.take(1, now)

    def allow(self, identity: bytes, cost: int, nbytes: int, now: float) -> bool:
        """Charge a connection for a message; return False if the connection must be closed."""
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
    """Return the units that a message costs its connection; 0 for a worker's report or fetch.

    A report with a wrong digest is charged after it was handled.
    """
    if isinstance(message, Hello | Observe | Verify):
        return COST_HIGH
    # A connection without a known worker gets a refusal for each report. A worker that the
    # publisher does not know any more sends many reports before the first refusal reaches it.
    return COST_LOW if not known or isinstance(message, Ping | Pong | Bye | Checked) else 0
