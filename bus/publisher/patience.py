"""What a publisher puts up with: how much talk each connection may make that moves nothing along.

A worker says hello a few times and pings once in a while; what it reports and fetches is work, and
may come as fast as it can. Talk beyond that is a flood, and each message of it costs the others
time. So every connection has an allowance, and whoever overdraws it is hung up on. Connections that
no worker is known by share one more: whoever is hung up on comes back as one of them, at the price
of a look at its messages. Nobody is told: a message more for each would be what a flood wants.
"""

from ..allowance import Allowance, Rate
from ..limits import STRANGERS, TALK, Timing
from ..messages import Bye, Hello, Message, Ping, Pong
from ..observed import Checked, Observe, Verify

CHEAP, DEAR = 1, 4  # what a message costs: one that is answered at most, one that leads to more
DEAR_BYTES = 2**14  # so many more of a message cost as much again; few hellos have a tenth of it


class Patience:
    """The allowances of all connections to one publisher."""

    def __init__(self, timing: Timing) -> None:
        # Workers ping as often as the publisher's welcome says.
        self._talk = Rate(TALK.burst, TALK.per_second * max(1.0, 1 / timing.ping))
        self._strangers = Allowance(STRANGERS, 0.0)
        self._each: dict[bytes, Allowance] = {}

    def has_time(self, now: float) -> bool:
        """Return whether another message of a stranger may be looked at."""
        return self._strangers.take(1, now)

    def bears(self, identity: bytes, cost: int, nbytes: int, now: float) -> bool:
        """Take note of talk, of so many bytes; return False if it is to be hung up on."""
        if not cost:
            return True
        cost *= 1 + nbytes // DEAR_BYTES
        allowance = self._each.get(identity)
        if allowance is None:
            allowance = self._each[identity] = Allowance(self._talk, now)
        if allowance.take(cost, now):
            return True
        del self._each[identity]
        return False

    def tick(self, now: float) -> None:
        """Forget who has been quiet for a while."""
        self._each = {who: each for who, each in self._each.items() if not each.rested(now)}


def cost_of(message: Message, *, known: bool) -> int:
    """Return what a message costs its sender: nothing if it is work.

    A report is work; one with a wrong digest is talk, which is known once the report was heeded.
    """
    if isinstance(message, Hello | Observe | Verify):
        return DEAR
    # The work of others is talk of a stranger, which is told so with each of it. A worker that
    # comes back after a restart says a good deal before it hears that it is not known.
    return CHEAP if not known or isinstance(message, Ping | Pong | Bye | Checked) else 0
