"""Whoever floods a publisher's control socket is hung up on, and nobody else is."""

import contextlib
import itertools
import logging
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from weightbus.bus.effects import Notice, Send
from weightbus.bus.event_log import KIND_RATE, WORKER_BUCKETS_MAX, WORKER_RATE, EventLog
from weightbus.bus.headers import TOKEN_BYTES, encode
from weightbus.bus.limits import CONTROL_RATE, Timing
from weightbus.bus.messages import UPSTREAM, Applied, Fetch, Hello, Ping, Progress
from weightbus.bus.net import descriptors
from weightbus.bus.net.control import WorkerSockets
from weightbus.bus.net.publisher_sockets import PublisherSockets
from weightbus.bus.publisher import rate_limits
from weightbus.bus.publisher.effects import Effect, HangUp
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.rate_limits import COST_HIGH
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.structs import Message
from weightbus.tests.net.dealers import dialled, frame, joined, received, wait_until_closed

SECONDS = 30.0
MODEL = "m"


def hello(name: str, instance: int = 1, models: int = 0, features: Sequence[str] = ()) -> Hello:
    wanted = dict.fromkeys([MODEL, *(f"m{i}" for i in range(models - 1))])
    return Hello(name=name, instance=f"{instance:032x}", models=wanted, features=list(features))


class Bench:
    """A publisher, and connections that say things to it."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.machine = PublisherMachine(PublisherState(7, "tcp://d:1", timing or Timing()))
        self.now = 100.0

    def say(self, who: bytes, message: Message | bytes) -> list[Effect]:
        header = message if isinstance(message, bytes) else encode(message)
        return self.machine.receive(who, [header], self.now)

    def floods(self, who: bytes, messages: Callable[[int], Message | bytes], count: int) -> bool:
        """Say so many things at once; return whether that was too much."""
        return any(HangUp() in self.say(who, messages(n)) for n in range(count))


@pytest.mark.parametrize(
    "flood",
    [
        lambda n: hello("flood", n),
        lambda n: hello(f"flood-{n}"),
        lambda _: hello("known"),
        lambda _: Ping(),
        lambda _: b"{}",
        lambda n: encode(hello(f"large-{n}"))[:-1] + b',"x":"' + b"x" * 60_000 + b'"}',
        lambda _: Applied(model=MODEL, epoch=7, version=1, digest=""),
    ],
    ids=["instances", "names", "one hello", "pings", "malformed", "large", "says no hello"],
)
def test_a_flood_is_hung_up_on(
    flood: Callable[[int], Message | bytes],
) -> None:
    bench = Bench()
    bench.say(b"honest", hello("honest"))
    assert bench.floods(b"bad", flood, 2 * round(CONTROL_RATE.burst))
    assert bench.say(b"honest", Ping()), "others are heard"
    assert bench.say(b"back", hello("back")), "it may come back"


def test_a_worker_is_never_taken_for_a_flood() -> None:
    """It asks for its name, is asked for a sign of life, pings, and reports as fast as it can."""
    bench = Bench()
    for _ in range(100):  # nobody welcomes it: another has its name, for instance
        assert not bench.floods(b"w", lambda _: hello("w"), 1)
        bench.now += Timing().hello_retry
    for _ in range(10):
        assert not bench.floods(b"w", lambda _: Ping(), 1)
        reports = itertools.repeat(Progress(model=MODEL, epoch=7, version=1, chunks=1), 1000)
        assert not any(HangUp() in bench.say(b"w", report) for report in reports)
        bench.now += Timing().ping


def test_wrong_digests_of_many_versions_are_a_flood_and_each_fact_is_told_once() -> None:
    bench, told = Bench(), list[Notice]()
    for name in (b"bad", b"honest"):
        bench.say(name, hello(name.decode()))
    wrong = [
        Applied(model=MODEL, epoch=7, version=n // 2 + 1, digest="f" * 64)
        for n in range(2 * round(CONTROL_RATE.burst))
    ]
    for each in wrong:
        effects = bench.say(b"bad", each)
        told += [e for e in effects if isinstance(e, Notice)]
        if HangUp() in effects:
            break
    else:
        raise AssertionError("it was never hung up on")
    assert {each.kind for each in told} == {"wrong-digest"}
    assert len(told) == len({each.text for each in told}) <= CONTROL_RATE.burst / 2, (
        "hello costs, too"
    )
    [once] = bench.say(b"honest", wrong[0])
    assert isinstance(once, Notice), "of another worker it is another fact"
    for _ in range(100):  # it says the same with each ping
        assert not bench.floods(b"honest", lambda _: Ping(), 1)
        assert bench.say(b"honest", wrong[0]) == []
        bench.now += Timing().ping


def test_words_with_wrong_digests_cost_as_much_as_other_reports_of_them() -> None:
    bench = Bench()
    bench.machine.state.secret = lambda: "5" * TOKEN_BYTES
    bench.say(b"w", hello("w", features=[UPSTREAM]))
    word = Applied(model=MODEL, epoch=7, version=9, digest="f" * 64)
    token = b"5" * TOKEN_BYTES
    effects = bench.machine.receive_report(token + encode(word), bench.now)
    assert [type(each) for each in effects or ()] == [Notice]
    for _ in range(round(CONTROL_RATE.burst)):
        assert bench.machine.receive_report(token + encode(word), bench.now) == []
    right = replace(word, epoch=6)
    assert bench.machine.receive_report(token + encode(right), bench.now) == []
    assert HangUp() in bench.say(b"w", Ping())


def test_one_worker_leaves_room_in_the_log_for_others_and_one_kind_for_other_kinds() -> None:
    lines, log = list[str](), logging.Logger("events")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    events = EventLog(log)
    for n in range(10_000):  # ten seconds
        events.write(Notice("wrong-digest", f"bad {n}", "bad"), n / 1000)
    assert WORKER_RATE.burst <= len(lines) <= WORKER_RATE.burst + 15
    events.write(Notice("wrong-digest", "another's", "good"), 10.0)
    events.write(Notice("left", "bad has left", "bad"), 12.0)
    events.write(Notice("left", "good has left", "good"), 12.0)
    assert lines[-3:] == ["another's", "bad has left", "good has left"]
    for n in range(10_000):  # by any number of names
        events.write(Notice("joined", f"{n} joined", f"w{n}"), 20.0 + n / 1000)
    events.write(Notice("lost", "good is lost", "good", warning=True), 30.0)
    assert lines[-1] == "good is lost"
    assert len(lines) <= 3 * KIND_RATE.burst
    kept = vars(events)["_workers"]
    assert len(kept) <= WORKER_BUCKETS_MAX + 1


def test_what_a_worker_still_says_to_another_publisher_is_no_flood() -> None:
    """It had much to fetch, and hears only now that it is not known any more: seed 3728."""
    bench = Bench()
    fetches = itertools.chain(
        (Fetch(model=MODEL, epoch=6, version=9, first=3 * n, count=1) for n in range(40)),
        (Ping(), Progress(model=MODEL, epoch=6, version=9, chunks=40)),
    )
    told = [bench.say(b"w", fetch) for fetch in fetches]
    assert all(isinstance(effect, Send) for [effect] in told), "it is told with each"
    assert not bench.floods(b"w", lambda _: hello("w"), 1)


def test_quick_timing_allows_quick_talk() -> None:
    timing = Timing(ping=0.01, lost_after=0.1)
    bench = Bench(timing)
    for _ in range(300):
        assert not bench.floods(b"w", lambda _: hello("w"), 1)
        assert not bench.floods(b"w", lambda _: Ping(), 1)
        bench.now += timing.hello_retry


def test_what_is_kept_of_connections_is_bounded() -> None:
    timing = Timing()
    kept = rate_limits.RateLimits(timing)
    for n in range(10):
        while kept.allow(b"%d" % n, COST_HIGH, 0, 0.0):
            pass
    assert vars(kept)["_buckets"] == {}, "who is hung up on has nothing any more"
    kept.allow(b"quiet", COST_HIGH, 0, 0.0)
    kept.tick(1.0)
    assert vars(kept)["_buckets"] == {}


def test_talk_costs_more_the_larger_it_is() -> None:
    kept = rate_limits.RateLimits(Timing())

    def borne(nbytes: int) -> int:
        who, count = b"%d" % nbytes, 0
        while kept.allow(who, rate_limits.COST_LOW, nbytes, 0.0):
            count += 1
        return count

    large = rate_limits.BYTES_PER_COST
    most = round(CONTROL_RATE.burst)
    assert [borne(n) for n in (0, large - 1, large, 3 * large)] == [
        most,
        most,
        most // 2,
        most // 4,
    ]


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_connection_is_closed_and_no_other(scheme: str, tmp_path: Path) -> None:
    address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/control"
    sockets = PublisherSockets(address, None)
    with zmq.Context() as context:
        good, bad = (context.socket(zmq.DEALER) for _ in range(2))
        for dealer in (good, bad):
            dealer.linger = 0
            dealer.connect(sockets.address)
        identities = {}
        for dealer in (good, bad):
            dealer.send(b"hi")
            identities[dealer] = received(sockets)[0]
        sockets.hang_up()
        deadline = time.monotonic() + SECONDS
        while sockets.send(identities[bad], [b"lost"]):
            assert time.monotonic() < deadline, "it was not closed"
            sockets.poll(0.01)
        assert sockets.send(identities[good], [b"still"])
        assert good.poll(round(1000 * SECONDS))
        assert good.recv() == b"still"
        bad.send(b"back")
        again, frames = received(sockets)
        assert (again != identities[bad], [*map(bytes, frames)]) == (True, [b"back"])
        good.close()
        bad.close()
    sockets.close()


def test_zeromq_sends_no_pings_of_its_own() -> None:
    """They make libzmq 4.3.5 abort the process where a connection broke that it did not read on."""
    worker = WorkerSockets("tcp://127.0.0.1:1", lambda _frames, _size: None)
    control = vars(worker)["_control"]
    assert control.get(zmq.HEARTBEAT_IVL) == 0
    assert control.get(zmq.TCP_KEEPALIVE) == 1
    worker.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_the_last_descriptors_are_kept_from_connections(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/control"
    sockets = PublisherSockets(address, None)
    with contextlib.ExitStack() as stack:
        stack.callback(sockets.close)
        first = stack.enter_context(joined(sockets))
        first.sendall(frame(b"hi"))
        received(sockets)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        monkeypatch.setattr(descriptors, "DESCRIPTORS_RESERVED", limit)
        for where in (sockets.address, sockets.data_address):
            wait_until_closed(sockets, stack.enter_context(dialled(where)))
        assert "connections were turned away" in sockets.turned_away(time.monotonic())
        first.sendall(frame(b"still"))
        assert received(sockets)[1] == [b"still"], "a worker that was there before is left alone"
