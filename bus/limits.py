"""Every bound of the protocol, in one place, each with its reason.

A peer may send anything. What it can make this side remember or allocate is bounded here, and
`docs/PROTOCOL.md` repeats the numbers; `tests/protocol/test_limits.py` holds the relations between
them.
"""

from ..codecs import metadata
from ..codecs.checksum import CHUNK_BYTES_MAX
from ..codecs.layout import HEADER_BYTES_MAX as LAYOUT_BYTES_MAX
from .token_bucket import Rate

DESCRIPTORS_RESERVED = 32  # kept from connections: for the process itself, and while others close
CROWDED_SECONDS = 60.0  # for which it is said that connections were turned away for want of them
INTEGER_MAX = 2**53 - 1  # the largest integer that every JSON library carries exactly
HEADER_BYTES_MAX = 64 * 1024  # a header holds names and numbers; bulk travels in payload frames
MESSAGE_BYTES_MAX = max(CHUNK_BYTES_MAX, LAYOUT_BYTES_MAX) + HEADER_BYTES_MAX  # ZMQ_MAXMSGSIZE
CHUNKS_MAX = 2**20  # chunks in a version: what a worker keeps a checksum for
FETCH_CHUNKS_MAX = 64  # chunks in one fetch: what one small message may make a publisher send
MODELS_MAX = 64  # models of one worker, so that a hello with the longest names fits a header
WORKERS_MAX = 10_000  # workers of one publisher: its roster is memory that peers can claim
KEYS_MAX = WORKERS_MAX  # public keys that a publisher allows: one for each worker
TICKET_SECONDS = 30  # for which a ticket is good: a host is looked up and dialled in some ten
STRANGER_SECONDS = 1.5  # for which a data connection may be there without one
EPOCH_CLOCK_MAX = 2**43  # the year 2248 in milliseconds: no later epoch is taken over from anybody
# How far past its own start, by its clock, a publisher takes an epoch on the word of a worker:
# a year covers time zones, suspended machines, and a date that somebody set wrong by a year.
EPOCH_LEAP_MAX_MS = 366 * 86_400_000
# Up to how many times `lost_after` a publisher waits until it takes yet another epoch; it begins
# with once, and each time waits twice as long, since for workers it is a restart of the publisher.
RENEWAL_PAUSES = 64
ROSTER_MODELS_MAX = 4 * WORKERS_MAX  # of all of them: a name and a digest take up to 0.6 kB
PATCHES_MAX = 8  # of one version: each is on another base, and most workers run one of two
# Times that nothing new comes, until all of a version is fetched in place of a patch, or what was
# announced is doubted. It is half a minute: links may be slow, and all of a version takes longer.
TRIES_MAX = 5
GROUP_KEYS_MAX = 2  # group keys of a session: one, and the one before while it changes
FEATURES_MAX = 64  # features that one side can name
METADATA_MAX = metadata.ENTRIES_MAX  # of what is said of one version, as of all that follow
METADATA_NAME_MAX = metadata.NAME_MAX
METADATA_BYTES_MAX = metadata.BYTES_MAX
LABEL_MAX = 256  # characters of a client's description or a host, which reasons may repeat
TEXT_MAX = 4096  # characters of a reason or an address
TOPIC_BYTES_MAX = 128 + len("/ctl")  # of the longest model id's: nobody has more to ask for
TOPICS_MAX = 4 * MODELS_MAX  # of one subscriber: more than a worker of all models asks for
STAGING_BYTES_MAX = 64 * 2**30  # bytes of one version that a worker takes unless told otherwise

# What peers may do, in how many at once and how many a second. Beyond that it is a flood, which
# must cost the others nothing: a few microseconds each, about a tenth of a core in all.
# A worker of all models subscribes to 128 topics at once: of each it takes chunks or patches. One
# that cannot keep up leaves a topic and joins it again for each version that it fetches.
SUBSCRIPTIONS = Rate(TOPICS_MAX, 1024)  # frames from one subscriber, its answers to pings included
# Commands of ZMTP on one connection, and on a control connection messages without a byte: a
# publisher pings every few seconds, a worker never. More of them keep a thread busy with answers.
COMMANDS = Rate(64, 16)
UNREAD_BYTES_MAX = 2**16  # of these answers, for a publisher that reads none
# Bytes that a publisher may have sent on a control connection, and that are in no message yet,
# beside what its worker has asked for: announcements, and whatever else comes unasked while the
# worker has no time.
UNASKED_BYTES_MAX = 2**22
# Units from one connection; a second is a ping interval if that is shorter. A worker sends at most
# four hellos a second, of four units each, and a ping.
CONTROL_RATE = Rate(64, 32)
# Messages of all connections that have not joined: each may be a worker.
UNKNOWN_PEER_RATE = Rate(1024, 256)
CONTROL_BYTES_MAX = 2 * HEADER_BYTES_MAX  # of one message to a publisher
PARTIAL_BYTES_MAX = 2**24  # of unfinished messages of all control connections
# Control connections that have sent no message: some 3 kB each, and never more than a quarter of
# the descriptors. Beyond that a newcomer takes the place of the oldest of the host that has most.
UNPROVEN_MAX = 512
HANDSHAKE_SECONDS = 5  # four ways there and back, and what the network loses of them
COPIES_BYTES_MAX = 2**25  # copied for peers that do not take what is half sent to them, of all
# Of one host: control connections that have sent no message; others are closed at once.
CONNECT_RATE = Rate(16, 8)
HOSTS_MAX = 1024  # from which newcomers are taken within a moment
ACCEPTS = Rate(512, 200)  # connections for pushed chunks; whoever waits for one fetches meanwhile

# Bytes of a layout that a worker takes in any case, with some 10,000 tensors. A larger one must not
# be larger than its data by more than this, nor than a share of `bytes_max`: to understand and
# store a layout takes many times its bytes.
LAYOUT_BYTES_FREE = 2**20
LAYOUT_MEMORY = 16
# Of a model whose names its worker does not know before: two seconds of work, in which it is
# silent. The largest models, with a tensor for each expert, have half as many.
TENSORS_UNKNOWN_MAX = 2**18
WINDOW_CHUNKS = 16  # chunks that a worker asks for before an answer
PUSH_CHUNKS = 64  # chunks that a push runs ahead of what some worker has reported
WHOLE_BYTES_MAX = 2**18  # of a version that travels with its announcement, to all who hear that
PROGRESS_CHUNKS = 16  # chunks between two reports of progress: a quarter of what may be ahead
EPOCHS_KEPT = 8  # epochs of which a worker remembers how old the publisher is
ABSENT_MAX = 64  # workers that left or are refused, and are remembered: as many as a person reads
ABSENT_SECONDS = 60.0  # until one that is refused again and again is spoken of again
OBSERVERS_MAX = 16  # that look on at once: people and dashboards; each costs a search of the roster
OBSERVER_SECONDS = 10.0  # without a question after which an observer is one no more
LOOKED_SECONDS = 60.0  # without a question after which nobody takes note of what is news to any
# Rows that all observers together are told: all workers at once, then under a twentieth of a core.
ROWS = Rate(16_384, 4096)
PAGES_MAX = 2  # in answer to one question: some ten milliseconds of the publisher's thread
PAGE_ROWS_MAX = 1024  # of either kind in one page; a header has no room for so many
CHECK_NAMES_MAX = 4096  # tensors in one answer of a worker that is verified: a header has no more
CHECK_BYTES = 2**27  # of weights, after which an answer goes on to no further tensor: some 10 ms
CHECKS = Rate(8, 4)  # such answers of a worker: under a tenth of a core, but for larger tensors
DIFFERENCES_TOLD = 64  # tensors that are named: as many as a person reads
UNLIKE_KEPT = MODELS_MAX  # wrong digests of one worker that are told once: one of each model
EVENTS_TOLD = 64  # to observers: the last ones, as many as a person reads
VERSIONS_TOLD = 24  # of a model, with their ages: the last ones, and ever fewer of those before
VERSIONS_TIMED = 4096  # of a model: how far back it is known when a version was published
ERROR_MAX = 512  # characters of an error as observers are told it, of which a roster may hold many
EVENTS_MAX = 10_000  # that wait for one callback: all workers at once, once
CALLS_MAX = 256  # publishes of one model that are open: every acknowledgement looks at each
SNAPSHOTS_MAX = 3  # copies of a model that a publisher holds at most while old ones are in use
APPLIES_MAX = 3  # in a row that fail half-way, before a version is tried no more
APPLY_SECONDS = 60  # that the user's part of applying may take, unless told otherwise
APPLY_SECONDS_MAX = 86_400  # that it may be told: a day
HINT_SECONDS = 3.0  # at most: what is found is told within 5 s, however long links may be silent
BUFFERS_MAX = 2  # staging buffers of a worker: one complete, one arriving


class Timing:
    """How long each side waits, in seconds. Tests and slow links pass their own.

    Args:
        ping: Between two signs of life; 0.001 to 3,600.
        lost_after: Silence after which the other side is lost; at least twice `ping`, and at most
            36,000. The other times follow from these two (section 11 of the protocol).

    Raises:
        ValueError: A time is out of bounds, or a worker would have no two chances to be heard.
    """

    PING_MAX = 3_600  # seconds, which a welcome tells in milliseconds
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
        self.ping = ping  # between two pings, beacons, or repetitions of a report
        self.lost_after = lost_after  # silence after which the other side is lost
        self.gone_after = 2 * ping  # a worker without connection: it dials again, and pings on that
        self.deaf_after = 6 * lost_after  # silence of control alone: a chunk may take long
        self.stuck_after = lost_after  # life without progress after which a worker is stuck
        self.hello_retry = min(ping, 0.25)  # between two hellos while nobody answers
        self.quiet = min(ping, 0.25)  # silence after which a worker stops waiting for a push
        self.report = 0.4 * self.quiet  # between two reports of progress where chunks come slowly
        self.patience = ping  # silence after which a fetch is repeated; doubles each time
        self.patience_max = 16 * ping

    @property
    def hint_after(self) -> float:
        """Seconds in which nothing happens, until users are told what is probably wrong.

        They look for it by then; it is no part of the protocol.
        """
        return min(HINT_SECONDS, 0.6 * self.lost_after)
