"""Sets the limits that each side may choose for itself, and the intervals and timeouts.

A peer may send anything. These limits, and those of `protocol_limits.py`, bound the memory and time
that a peer can cost. `docs/LIMITS.md` repeats the numbers. `tests/protocol/test_limits.py` checks
how they relate to each other.
"""

from .protocol_limits import MODELS_MAX
from .token_bucket import Rate

DESCRIPTORS_RESERVED = 32  # descriptors for other files and closing connections
REJECTIONS_SECONDS = 60.0  # seconds for which rejected connections are reported
WORKERS_MAX = 2**14  # workers of one publisher, including those behind relays
KEYS_MAX = WORKERS_MAX  # public keys that a publisher allows: one for each worker
STRANGER_SECONDS = 1.5  # seconds for which a data connection may exist without a ticket
ROSTER_MODELS_MAX = 40_000  # models of all workers: a name and a digest take up to 0.6 kB
TOPIC_BYTES_MAX = 128 + len("/ctl")  # the topic of the longest model id
TOPICS_MAX = 4 * MODELS_MAX  # topics of one subscriber: more than a worker with all models needs
STAGING_BYTES_MAX = 64 * 2**30  # bytes of the largest version that a worker accepts by default

# Rate limits of peers: a burst, and units per second. A flood above these rates must not slow down
# other peers: rejecting a message costs a few microseconds, a whole flood about a tenth of a core.
# A worker with `MODELS_MAX` models subscribes to 128 topics at once, two for each model. A worker
# that cannot keep up unsubscribes and subscribes again for each version that it fetches.
SUBSCRIPTIONS = Rate(TOPICS_MAX, 1024)  # frames from one subscriber, including answers to pings
# ZMTP commands on one connection, and empty messages on a control connection. A publisher sends a
# ZMTP ping every few seconds, and a worker sends none. More commands would keep a thread busy with
# answers.
COMMANDS = Rate(64, 16)
UNREAD_BYTES_MAX = 2**16  # bytes of queued answers to commands, for a peer that does not read
ACCEPT_SECONDS = 1.0  # seconds before another attempt to accept, if no descriptor was free
# Unread bytes on a worker's control connection, beyond the bytes that the worker has requested:
# announcements and other unrequested messages that arrive while the worker is busy.
UNASKED_BYTES_MAX = 2**22
# Units that one connection may use, per second or per ping interval, whichever is shorter. A worker
# sends at most four hellos a second, of four units each, and a ping.
CONTROL_RATE = Rate(64, 32)
# Messages of all connections without a known worker.
UNKNOWN_PEER_RATE = Rate(1024, 256)
PARTIAL_BYTES_MAX = 2**24  # bytes of unfinished messages of all control connections
# Control connections that have sent no message: some 3 kB each, and at most a quarter of the
# descriptors. A further one replaces the oldest one of the host that has the most of them.
UNPROVEN_MAX = 512
HANDSHAKE_SECONDS = 5  # seconds for four round trips, with retransmissions
COPIES_BYTES_MAX = 2**25  # bytes of all copies of half-sent messages, for peers that do not read
# New control connections of one host that send no message; further connections are closed at once.
CONNECT_RATE = Rate(16, 8)
HOSTS_MAX = 1024  # hosts with a bucket for new connections
ACCEPTS = Rate(512, 200)  # new data connections; a worker without one fetches meanwhile

# Bytes of a layout that a worker always accepts: some 10,000 tensors. A larger layout must exceed
# neither its data by more than this, nor `bytes_max` divided by `LAYOUT_MEMORY`, since parsing and
# storing a layout takes many times its bytes.
LAYOUT_BYTES_GUARANTEED = 2**20
LAYOUT_MEMORY = 16
# Tensors of a model of which the worker does not know the tensors' names in advance. So many take
# two seconds, in which the worker does not answer. The largest models, with a tensor for each
# expert, have half as many.
TENSORS_UNKNOWN_MAX = 2**18
EPOCHS_KEPT = 8  # epochs for which a worker remembers the publisher's age
ABSENT_MAX = 64  # remembered workers that left or are refused: as many as a person reads
ABSENT_SECONDS = 60.0  # seconds between two log lines about the same refused worker
OBSERVER_SECONDS = 3.0  # seconds without a request until an observer no longer counts
RECORDING_SECONDS = 60.0  # seconds without a request until changes are no longer recorded
# Rows sent to all observers: a burst with all workers, then less than a twentieth of a core.
ROWS = Rate(16_384, 4096)
PAGES_MAX = 2  # pages in one answer: some ten milliseconds of the publisher's thread
CHECK_BYTES = 2**27  # bytes of weights that one `checked` covers: some 10 ms
CHECKS = Rate(8, 4)  # `checked` messages of a worker: under a tenth of a core for most tensors
UNLIKE_KEPT = MODELS_MAX  # wrong digests of a worker that are remembered, to log each only once
VERSIONS_TIMED = 4096  # versions of a model whose publish time is kept
EVENTS_MAX = WORKERS_MAX  # events queued for one callback: one of each worker
CALLS_MAX = 256  # open calls of publish for a model; each acknowledgement visits them all
SNAPSHOTS_MAX = 3  # copies of a model at a publisher, while older versions are in use
APPLY_SECONDS = 60  # seconds for the user's code to apply a version, by default
APPLY_SECONDS_MAX = 86_400  # the greatest value that the user can set: a day
# the greatest `hint_after`, so that hints are logged within 5 s even if `lost_after` is large
HINT_SECONDS = 3.0
BUFFERS_MAX = 2  # staging buffers of a worker: one complete, one arriving


class Timing:
    """Intervals and timeouts of publishers and workers, in seconds.

    Args:
        ping: Seconds between two pings; 0.001 to 3,600.
        lost_after: Seconds without a message after which the other side is lost; at least twice
            `ping`, and at most 36,000. The other times follow from these two (Timers in
            `docs/protocol/index.md`).

    Raises:
        ValueError: A time is out of bounds, or `lost_after` is less than two pings.
    """

    PING_MAX = 3_600
    LOST_MAX = 36_000

    def __init__(self, *, ping: float = 1.0, lost_after: float = 5.0) -> None:
        given = f"ping={ping!r} and lost_after={lost_after!r}"
        try:
            right = bool not in (type(ping), type(lost_after))
            right &= 0.001 <= ping <= self.PING_MAX and ping * 2 <= lost_after <= self.LOST_MAX
        except TypeError:
            right = False
        if not right:
            raise ValueError(
                f"{given}: a worker needs two chances to be heard; choose lost_after of at least "
                f"twice ping and at most {self.LOST_MAX}, and ping of 0.001 to "
                f"{self.PING_MAX}, in seconds"
            )
        self.ping = ping  # seconds between two pings, beacons, or repetitions of a report
        self.lost_after = lost_after  # seconds without a message until the other side is lost
        self.gone_after = 2 * ping  # seconds for a worker to reconnect after a close
        # seconds without a control message until a worker reconnects
        self.deaf_after = 6 * lost_after
        self.stuck_after = lost_after  # time without progress, after which a live worker is stuck
        self.hello_retry = min(ping, 0.25)  # seconds between two hellos without an answer
        # seconds without data until a worker no longer waits for a push
        self.quiet = min(ping, 0.25)
        # seconds between reports of progress if chunks arrive slowly
        self.report = 0.4 * self.quiet
        self.patience = ping  # seconds until a fetch is repeated; doubles each time
        self.patience_max = 16 * ping

    @property
    def hint_after(self) -> float:
        """Seconds for which a likely mistake must last until a hint is logged.

        This time is not part of the protocol.
        """
        return min(HINT_SECONDS, 0.6 * self.lost_after)
