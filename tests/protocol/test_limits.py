"""The bounds fit together: each is a promise that another one relies on."""

import pytest
from msgspec.structs import replace

from weightbus.bus.errors import ProtocolError
from weightbus.bus.headers import control_topic, data_topic, encode, from_publisher
from weightbus.bus.limits import (
    BUFFERS_MAX,
    SNAPSHOTS_MAX,
    STAGING_BYTES_MAX,
    SUBSCRIPTIONS,
    TOPIC_BYTES_MAX,
    TOPICS_MAX,
    WORKERS_MAX,
    Timing,
)
from weightbus.bus.messages import (
    Announce,
    Failed,
    Hello,
    Patch,
    Pong,
    Refuse,
    Running,
    Shared,
    Welcome,
)
from weightbus.bus.net import control as sockets
from weightbus.bus.net import peer, publisher_sockets
from weightbus.bus.protocol_limits import (
    FETCH_CHUNKS_MAX,
    HEADER_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    MODELS_MAX,
    PATCHES_MAX,
    PROGRESS_CHUNKS,
    PUSH_CHUNKS,
    TEXT_MAX,
    WINDOW_CHUNKS,
)
from weightbus.bus.publisher.push import BURST_BYTES
from weightbus.bus.structs import Message
from weightbus.bus.token_bucket import Rate, TokenBucket
from weightbus.codecs.checksum import CHUNK_BYTES_DEFAULT
from weightbus.codecs.protocol_limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNKS_MAX,
    INTEGER_MAX,
    LAYOUT_BYTES_MAX,
    METADATA_BYTES_MAX,
)

NAMES = [f"{i:0128d}" for i in range(MODELS_MAX)]  # the longest there are
# What takes most bytes of JSON for a character of text.
WORST = "\x01" * TEXT_MAX

LARGEST: list[Message] = [
    Hello(
        name=NAMES[0],
        instance="f" * 32,
        models={n: Running(INTEGER_MAX, INTEGER_MAX, "f" * 64) for n in NAMES},
        epoch=INTEGER_MAX,
        features=NAMES,
        client=WORST[:256],
        host=WORST[:256],
        pid=INTEGER_MAX,
    ),
    Welcome(
        epoch=INTEGER_MAX,
        data=WORST,
        ping_ms=3_600_000,
        lost_ms=36_000_000,
        models=dict.fromkeys(NAMES, INTEGER_MAX),
        features=NAMES,
    ),
    Pong(token=INTEGER_MAX, epoch=INTEGER_MAX, models=dict.fromkeys(NAMES, INTEGER_MAX)),
    Failed(model=NAMES[0], epoch=INTEGER_MAX, version=INTEGER_MAX, code=NAMES[0], text=WORST),
    Refuse(code=NAMES[0], text=WORST, model=NAMES[0], version=INTEGER_MAX),
    Announce(
        model=NAMES[0],
        epoch=INTEGER_MAX,
        version=INTEGER_MAX,
        layout="f" * 64,
        layout_bytes=LAYOUT_BYTES_MAX,
        nbytes=INTEGER_MAX,
        chunk_bytes=CHUNK_BYTES_MAX,
        commit="together",
        acknowledge="applied",
        encoding=NAMES[0],
        encryption=NAMES[0],
        shared=Shared(WORST, "f" * 32),
        patches=[Patch(NAMES[0], INTEGER_MAX, INTEGER_MAX, "f" * 64, INTEGER_MAX)] * PATCHES_MAX,
        metadata={"": WORST[:METADATA_BYTES_MAX]},
    ),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda m: type(m).__name__)
def test_the_largest_headers_fit(message: Message) -> None:
    assert len(encode(message)) <= HEADER_BYTES_MAX


def test_a_message_holds_any_payload_and_its_header() -> None:
    assert MESSAGE_BYTES_MAX >= HEADER_BYTES_MAX + LAYOUT_BYTES_MAX
    assert MESSAGE_BYTES_MAX >= HEADER_BYTES_MAX + CHUNK_BYTES_MAX
    assert CHUNK_BYTES_MIN <= CHUNK_BYTES_DEFAULT <= CHUNK_BYTES_MAX


def test_the_largest_version_can_be_cut_and_counted() -> None:
    assert CHUNKS_MAX * CHUNK_BYTES_DEFAULT >= STAGING_BYTES_MAX
    assert CHUNKS_MAX * CHUNK_BYTES_MAX <= INTEGER_MAX


def test_windows_nest() -> None:
    assert WINDOW_CHUNKS <= FETCH_CHUNKS_MAX, "a window can be asked for at once"
    assert 2 * PROGRESS_CHUNKS <= PUSH_CHUNKS, "progress is reported before a push must wait"
    assert 2 * Timing().report <= Timing().quiet, "a slow push is not taken for a stalled one"
    assert BURST_BYTES // CHUNK_BYTES_DEFAULT <= PUSH_CHUNKS
    # PUB's queue counts messages: a window of chunks, one more that a report has let out, and the
    # announcement, end and beacons of the models.
    assert 2 * PUSH_CHUNKS + MODELS_MAX // 2 <= publisher_sockets.PUB_QUEUE
    assert WINDOW_CHUNKS <= sockets.DEALER_QUEUE
    assert FETCH_CHUNKS_MAX <= peer.QUEUE


def test_a_worker_of_all_models_may_subscribe_at_once() -> None:
    topics = [data_topic(name) for name in NAMES] + [control_topic(name) for name in NAMES]
    assert max(map(len, topics)) == TOPIC_BYTES_MAX
    assert 2 * len(topics) <= TOPICS_MAX <= SUBSCRIPTIONS.burst


def test_a_token_bucket_is_emptied_and_refills() -> None:
    mine = TokenBucket(Rate(3, 10), 5.0)
    assert [mine.take(1, 5.0) for _ in range(4)] == [True, True, True, False]
    assert not mine.is_full(5.29)
    assert mine.take(2, 5.2)
    assert not mine.take(2, 5.2)
    assert mine.is_full(5.51), "what was refused is not held against it for longer"
    assert mine.take(3, 100.0)
    assert not mine.take(1, 100.0), "more than all does not come back"


def test_one_is_complete_while_another_arrives() -> None:
    assert BUFFERS_MAX == 2
    assert SNAPSHOTS_MAX > BUFFERS_MAX
    assert WORKERS_MAX > 0


@pytest.mark.parametrize("ping", [0.01, 1.0, 60.0])
def test_timing_is_ordered(ping: float) -> None:
    timing = Timing(ping=ping, lost_after=2 * ping)
    assert timing.quiet <= timing.ping < timing.lost_after
    assert timing.hello_retry <= timing.ping
    assert timing.patience <= timing.patience_max
    assert timing.quiet <= timing.patience
    assert timing.stuck_after == timing.lost_after


def test_a_welcome_carries_every_interval_of_pings_and_none_beyond() -> None:
    welcome = Welcome(
        epoch=1,
        data="",
        ping_ms=1000 * Timing.PING_MAX,
        lost_ms=1000 * Timing.LOST_MAX,
        models={},
    )
    assert from_publisher([encode(welcome)])[0] == replace(welcome, wbp=1)
    for beyond in ({"ping_ms": welcome.ping_ms + 1}, {"lost_ms": welcome.lost_ms + 1}):
        with pytest.raises(ProtocolError, match="Expected `int`"):
            from_publisher([encode(replace(welcome, **beyond))])


@pytest.mark.parametrize(("ping", "lost_after"), [(0, 1), (-1, 1), (1, 1.9), (1, 0)])
def test_timing_without_two_chances_is_refused(ping: float, lost_after: float) -> None:
    with pytest.raises(ValueError, match="two chances to be heard"):
        Timing(ping=ping, lost_after=lost_after)


def test_a_chunk_on_a_slow_link_is_waited_for() -> None:
    assert sockets.UNSENT_MS * 40 >= CHUNK_BYTES_DEFAULT  # 40 bytes per ms
    silence = sockets.KEEPALIVE_SECONDS * (1 + sockets.KEEPALIVE_PROBES)
    assert 1000 * silence == sockets.UNSENT_MS, "who is gone is found out alike, heard or not"
