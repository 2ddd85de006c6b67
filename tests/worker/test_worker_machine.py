"""How a worker joins, which publisher it follows, and when it starts a new session."""

from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
import pytest
from msgspec import structs

from weightbus.bus.effects import (
    Connect,
    Effect,
    Joined,
    Notice,
    Open,
    Prefault,
    Ready,
    Redial,
    Refused,
    Send,
    Subscribe,
)
from weightbus.bus.headers import encode
from weightbus.bus.lease import Lease
from weightbus.bus.limits import Timing
from weightbus.bus.messages import (
    Announce,
    Applied,
    Beacon,
    Bye,
    Chunk,
    Commit,
    End,
    Fetch,
    Hello,
    Ping,
    Pong,
    Prepare,
    Refuse,
    Running,
    Shared,
    Welcome,
    Whole,
)
from weightbus.bus.publisher import offers
from weightbus.bus.staged import StagedVersion
from weightbus.bus.structs import Message
from weightbus.bus.worker.events import Flush, Opened, Outcome, Report
from weightbus.bus.worker.follower import Follower
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.bus.worker.version_store import RunningEntry, WholeEntry
from weightbus.codecs.checksum import digest
from weightbus.codecs.layout import Layout
from weightbus.codecs.native import crc32c
from weightbus.tests.simulation.performing import Opens, another_host, done
from weightbus.tests.simulation.virtual_shell import version_of

EPOCH = 7
M = TypeVar("M", bound=Message)
SILENT = Notice(
    "lost",
    "the publisher is silent: the weights stay in use, and this worker joins it again",
    warning=True,
)
LAYOUT, DATA = Layout.plan([("w", "U8", (4,))]), b"\1\2\3\4"


class Bench:
    """The machine of a worker with two models, and the messages to it."""

    def __init__(self, *, inside: bool = True, opens: Opens = another_host) -> None:
        self.machine = WorkerMachine(
            Hello(name="w", instance="a" * 32, models={}, client="client", host="host", pid=5),
            ["a", "b"],
            lambda _m, _l: "",
            100,
            Timing(),
        )
        self.opens, self.now = opens, 100.0
        if inside:
            self.machine.connected(self.now)
            self.tell(welcome())

    def done(self, effects: list[Effect]) -> list[Effect]:
        return done(self.machine, effects, self.now, self.opens)

    def report(self, key: tuple[int, int], what: Outcome) -> list[Effect]:
        return self.done(self.machine.happened(Report("a", key, what), self.now))

    def tell(self, message: Message) -> list[Effect]:
        return self.done(self.machine.receive([encode(message)], self.now))

    def publish(self, message: Message, *payload: bytes, topic: bytes = b"a/ctl") -> list[Effect]:
        frames = [topic, encode(message), *payload]
        return self.done(self.machine.receive_published(frames, self.now))


def welcome(epoch: int = EPOCH, data: str = "tcp://d:1", version: int = 0) -> Welcome:
    models = {"a": version} if version else {}
    return Welcome(epoch=epoch, data=data, ping_ms=1000, lost_ms=5000, models=models)


def announce(epoch: int = EPOCH) -> Announce:
    return offers.announcement(version_of(1, np.frombuffer(DATA, np.uint8), 4, epoch))


def sent(effects: list[Effect], kind: type[M]) -> list[M]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def run(follower: Follower, running: Running) -> None:
    """Have a version run that arrived some time ago."""
    named = {"model": follower.model, "epoch": running.epoch, "version": running.version}
    announced = structs.replace(announce(), **named)
    held = follower.versions.expect(announced, pushed=False)
    data = np.frombuffer(DATA, np.uint8)
    staged = StagedVersion(follower.model, held.key, LAYOUT, data, running.digest)
    whole = WholeEntry(held.key, announced, staged)
    assert follower.versions.move(held, "mapped", whole)
    assert follower.versions.move(whole, "taken")
    runs = RunningEntry(held.key, announced, staged, running=running)
    assert follower.versions.move(whole, "applied", runs)
    follower.report_running(runs, running)


def test_hello_says_who_and_what_it_runs() -> None:
    bench = Bench(inside=False)
    running = Running(3, 9, "f" * 64)
    run(bench.machine.followers["b"], running)
    [hello] = sent(bench.machine.connected(bench.now), Hello)
    assert hello == Hello(
        name="w",
        instance="a" * 32,
        models={"a": None, "b": running},
        epoch=3,
        client="client",
        host="host",
        pid=5,
    )


def test_a_welcome_connects_subscribes_and_asks_for_what_is_missing() -> None:
    bench = Bench(inside=False)
    effects = bench.tell(welcome(version=4))
    assert Joined(EPOCH) in effects
    assert Connect("tcp://d:1") in effects
    topics = {e.topic for e in effects if isinstance(e, Subscribe) and e.on}
    assert topics == {b"a/ctl", b"a/dat", b"b/ctl", b"b/dat"}
    assert sent(effects, Fetch) == [Fetch(model="a", epoch=EPOCH, version=0)]


def test_the_same_data_address_is_not_connected_to_twice() -> None:
    bench = Bench()
    assert not [e for e in bench.tell(welcome(EPOCH + 1)) if isinstance(e, Connect)]
    again = bench.tell(welcome(EPOCH + 2, "tcp://d:2"))
    assert Connect("tcp://d:2") in again


def test_a_second_welcome_of_one_session_only_tells_the_news() -> None:
    bench = Bench()
    effects = bench.tell(welcome(version=4))
    assert effects == [Send(Fetch(model="a", epoch=EPOCH, version=0))]


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_another_epoch_is_answered_with_hello_and_nothing_else(epoch: int) -> None:
    bench = Bench()
    bench.now += 1.0
    for message in (
        announce(epoch),
        Beacon(model="a", epoch=epoch, version=3),
        Commit(model="a", epoch=epoch, version=1, digest="0" * 64),
        Pong(epoch=epoch, models={"a": 3}),
    ):
        bench.now += 1.0
        assert [type(e.message) for e in bench.tell(message) if isinstance(e, Send)] == [Hello]
    assert bench.machine.followers["a"].versions.in_phase["arriving"] is None
    assert bench.machine.session.terms.epoch == EPOCH, "only a welcome settles it"


def test_a_publisher_of_an_earlier_epoch_than_what_runs_is_not_followed() -> None:
    bench = Bench(inside=False)
    run(bench.machine.followers["a"], Running(EPOCH + 1, 1, "f" * 64))
    [refused] = bench.tell(welcome(EPOCH))
    assert isinstance(refused, Refused)
    assert refused.code == "stale-epoch"
    assert not bench.machine.in_session
    assert Joined(EPOCH + 1) in bench.tell(welcome(EPOCH + 1)), "the same epoch is fine"


def test_what_was_applied_late_of_a_later_publisher_is_told_until_that_is_settled() -> None:
    bench = Bench()
    run(bench.machine.followers["a"], Running(EPOCH + 2, 1, "f" * 64))  # its apply has just ended
    for _ in range(3):  # the first hello may be lost
        bench.now += bench.machine.timing.hello_retry
        (hello,) = sent(bench.done(bench.machine.tick(bench.now)), Hello)
        assert hello.epoch == EPOCH + 2
    bench.tell(welcome(EPOCH + 3))
    bench.now += bench.machine.timing.hello_retry
    assert not sent(bench.done(bench.machine.tick(bench.now)), Hello)


@pytest.mark.parametrize("code", ["name-taken", "stale-epoch", "limit", "protocol-version"])
def test_a_refusal_ends_the_session_and_is_told(code: str) -> None:
    bench = Bench()
    assert Refused(code, "why") in bench.tell(Refuse(code=code, text="why"))
    assert not bench.machine.in_session
    bench.now += 1.0
    assert sent(bench.machine.connected(bench.now), Hello), "it goes on asking"


def test_a_refusal_that_is_not_known_is_for_the_operator() -> None:
    bench = Bench()
    assert bench.tell(Refuse(code="of-the-future", text="why")) == [
        Notice("of-the-future", "why", warning=True)
    ]
    assert bench.machine.in_session


def test_silence_is_loss() -> None:
    bench = Bench()
    bench.now = 104.0
    bench.tell(Pong(epoch=EPOCH))  # as any message
    bench.machine.tick(108.9)
    assert bench.machine.in_session
    assert bench.machine.tick(109.0) == [SILENT, Redial()]
    assert not bench.machine.in_session
    assert sent(bench.machine.connected(109.0), Hello), "it joins again"


def test_whoever_gets_no_answer_calls_again_on_new_connections() -> None:
    bench = Bench(inside=False)
    assert not bench.machine.tick(200.0), "nobody was there to say hello to"
    bench.machine.connected(200.0)
    assert not bench.machine.tick(204.9)
    assert bench.machine.tick(205.0) == [Redial()]
    assert not bench.machine.tick(211.0), "the new connection is not there yet"
    bench.machine.connected(212.0)
    bench.tell(Refuse(code="name-taken", text="why"))
    assert not bench.machine.tick(217.0), "it is refused, which is an answer"


def test_a_connection_that_was_given_up_is_made_anew_though_no_hello_could_be_said() -> None:
    bench = Bench(inside=False)
    machine = bench.machine
    assert not machine.tick(200.0), "a name is being looked up"
    machine.changed(200.0)
    machine.changed(203.0)
    assert not machine.tick(207.9), "ZeroMQ is trying"
    assert machine.tick(208.0) == [Redial()]
    assert not machine.tick(300.0), "the new connection has not been tried yet"
    machine.changed(300.0)
    assert machine.tick(305.0) == [Redial()]


def test_a_control_connection_that_broke_ends_the_session_if_nothing_comes_of_it() -> None:
    bench = Bench()
    bench.machine.changed(bench.now)
    bench.now += 1.0
    bench.tell(Pong(epoch=EPOCH))
    bench.machine.changed(bench.now)
    for _ in range(5):
        assert Redial() not in bench.machine.tick(bench.now)
        bench.now += 1.0
        bench.publish(Beacon(model="a", epoch=EPOCH, version=0))
    assert bench.machine.tick(bench.now) == [SILENT, Redial()]
    assert not bench.machine.in_session


def unheard(effects: list[Effect]) -> int:
    return len([e for e in effects if isinstance(e, Notice) and e.kind == "unheard" and e.warning])


def test_whoever_hears_nothing_published_is_told_once_in_a_session() -> None:
    bench = Bench()

    def live(seconds: int) -> int:
        """Return how often the user is warned while the control connection works."""
        told = 0
        for _ in range(seconds):
            bench.now += 1.0
            bench.tell(Pong(epoch=EPOCH))
            told += unheard(bench.machine.tick(bench.now))
        return told

    assert [live(4), live(1), live(20)] == [0, 1, 0]
    bench.tell(Refuse(code="unknown-worker", text="why"))
    bench.tell(welcome(data="tcp://d:2"))
    assert [live(4), live(1)] == [0, 1], "another session"
    bench.tell(Refuse(code="unknown-worker", text="why"))
    bench.tell(welcome())
    bench.publish(Beacon(model="a", epoch=EPOCH, version=0))
    assert live(10) == 0


def test_pings_go_out_and_reports_with_them() -> None:
    bench = Bench()
    run(bench.machine.followers["a"], Running(EPOCH, 1, "f" * 64))
    first = bench.machine.tick(100.0)
    assert sent(first, Ping) == [Ping(token=100_000)]
    assert sent(first, Applied)
    assert not bench.machine.tick(100.9)
    assert sent(bench.machine.tick(101.0), Ping)


def test_goodbye_is_said_even_before_the_welcome() -> None:
    """The hello may have arrived: the publisher would wait for a worker that has left."""
    bench = Bench(inside=False)
    bench.machine.connected(bench.now)
    assert bench.machine.close() == [Send(Bye())]


WHOLE = Whole(crc=crc32c(DATA), digest=digest(LAYOUT.id, 4, [crc32c(DATA)]))


def whole(version: int, said: Whole = WHOLE) -> Announce:
    return structs.replace(announce(), version=version, whole=said)


def applied(bench: Bench, effects: list[Effect]) -> list[Message]:
    """Apply the versions that are ready; return the `applied` reports."""
    reports: list[Message] = []
    for effect in effects:
        if isinstance(effect, Ready):
            key = effect.staged.key
            bench.report(key, "taken")
            reports += sent(bench.report(key, "applied"), Applied)
    return reports


class Memory:
    """A segment that must not be copied from yet."""

    data = np.zeros(4, np.uint8)
    note = b""

    def reading(
        self, model: str, epoch: int, version: int, **_: bool
    ) -> AbstractContextManager[None]:
        raise AssertionError(f"{model} {epoch}.{version} was not announced")


def test_memory_that_is_prepared_is_mapped_ahead_if_it_is_of_use() -> None:
    bench = Bench(inside=False, opens=lambda shared, _nbytes: PROBES.get(shared.path))

    def prepare(model: str, nbytes: int = 4, epoch: int = EPOCH) -> Prepare:
        return Prepare(model=model, epoch=epoch, nbytes=nbytes, shared=Shared(model, "0" * 32))

    bench.machine.connected(bench.now)
    bench.tell(welcome())
    assert not bench.tell(prepare("a")), "this worker is on another host"
    bench.tell(structs.replace(welcome(EPOCH + 1), shared=Shared("probe", "0" * 32)))
    for told in (
        prepare("a"),  # by another publisher
        prepare("a", 101, EPOCH + 1),  # larger than this worker takes
        prepare("other", epoch=EPOCH + 1),  # of a model without a subscription here
    ):
        assert not [e for e in bench.tell(told) if isinstance(e, Prefault)]
    assert bench.tell(prepare("a", epoch=EPOCH + 1)) == [Prefault(Shared("a", "0" * 32), 4)]


PROBES = {"probe": Memory()}


def probe(epoch: int = EPOCH + 1, token: str = "") -> Welcome:
    """Return a welcome whose publisher may be on this host."""
    features = [f"upstream.{token}"] if token else []
    return structs.replace(welcome(epoch), shared=Shared("probe", "0" * 32), features=features)


class Probing(Bench):
    """A worker that has not yet received the result of `Open` for the publisher's probe."""

    def __init__(self, *, inside: bool = False) -> None:
        super().__init__(inside=inside)
        assert self.hear(probe()) == [Open("", (EPOCH + 1, 0), Shared("probe", "0" * 32), 0)]

    def hear(self, message: Message) -> list[Effect]:
        return self.machine.receive([encode(message)], self.now)

    def opened(self, epoch: int = EPOCH + 1) -> list[Effect]:
        return self.machine.happened(Opened("", (epoch, 0), PROBES["probe"]), self.now)


@pytest.mark.parametrize("inside", [False, True])
def test_a_session_begins_once_the_publishers_memory_is_open(inside: bool) -> None:
    bench = Probing(inside=inside)
    assert not bench.machine.in_session
    assert Joined(EPOCH + 1) in bench.opened()
    assert bench.machine.in_session
    assert bench.machine.session.terms.shared
    assert bench.opened() == [], "it is opened twice if the welcome comes twice"


@pytest.mark.parametrize("left", ["unknown-worker", "name-taken", "keys", "silence"])
@pytest.mark.parametrize("inside", [False, True])
def test_what_comes_of_a_probe_that_was_left_changes_nothing(inside: bool, left: str) -> None:
    bench = Probing(inside=inside)
    if left == "silence":
        bench.now += bench.machine.timing.lost_after
        assert bench.machine.tick(bench.now) == [SILENT, Redial()], "it waits no longer"
    elif left == "keys":
        bench.machine.handshake_refused("no key", bench.now)
    else:
        bench.hear(Refuse(code=left, text=""))
    assert bench.machine.session.phase == "outside"
    assert bench.opened() == []
    assert not bench.machine.in_session


def test_another_welcome_takes_the_place_of_the_one_that_waits() -> None:
    bench = Probing()
    assert [type(effect) for effect in bench.hear(probe(EPOCH + 2))] == [Open]
    assert bench.machine.session.phase == "probing"
    assert bench.opened() == [], "that was another publisher"
    assert Joined(EPOCH + 2) in bench.opened(EPOCH + 2)
    bench = Probing()
    assert Joined(EPOCH + 2) in bench.hear(welcome(EPOCH + 2)), "it is of another host"
    assert bench.opened() == []
    assert not bench.machine.session.terms.shared


def test_whoever_probes_is_in_no_session_and_says_no_hello() -> None:
    bench, token = Bench(), "0" * 32
    machine = bench.machine
    bench.tell(structs.replace(welcome(EPOCH + 1), features=[f"upstream.{token}"]))
    run(machine.followers["a"], Running(EPOCH, 1, "f" * 64))
    bench.publish(announce(EPOCH + 1), LAYOUT.header)
    header = encode(Chunk(model="a", epoch=EPOCH + 1, version=1, index=0, crc=crc32c(DATA)))
    lease = machine.place([b"a/dat", header], len(DATA))
    assert lease is not None
    assert machine.session.terms.upstream == token
    machine.receive([encode(probe(EPOCH + 2))], bench.now)
    assert machine.place([b"a/dat", header], len(DATA)) is None
    machine.receive_published(lease, bench.now)
    assert not lease.live, "it was of the session that is over"
    bench.now += machine.timing.ping
    for effects in (
        bench.publish(announce(EPOCH + 1)),
        bench.tell(Pong(epoch=EPOCH + 2, models={"a": 3})),
        machine.tick(bench.now),
        machine.connected(bench.now),
        machine.without_ticket(bench.now),
        machine.happened(Flush(1), bench.now),
    ):
        assert effects == []
    assert bench.tell(Ping(token=3)) == [Send(Pong(token=3))]
    assert machine.close() == [Send(Bye())], "its token was of that session, too"


def test_what_comes_whole_is_not_fetched_over_shared_memory_either() -> None:
    bench = Bench()
    bench.publish(announce(), LAYOUT.header)
    applied(bench, bench.publish(whole(1), DATA))
    bench.machine.followers["a"].shared = True
    effects = bench.publish(whole(2), DATA)
    assert applied(bench, effects)
    assert not sent(effects, Fetch)


def test_the_data_of_a_whole_version_has_a_place_if_its_length_is_right() -> None:
    bench = Bench()
    header = encode(whole(2))
    assert bench.machine.place([b"a/ctl", header], len(DATA)) is not None
    assert bench.machine.place([b"a/ctl", header], len(LAYOUT.header)) is None


def received(bench: Bench, message: Announce, data: bytes) -> tuple[list[Effect], Lease]:
    """Have a version arrive in the place that the machine leases; return effects and lease."""
    lease = bench.machine.place([b"a/ctl", encode(message)], len(data))
    assert lease is not None
    lease.view[:] = data
    lease.received(len(data))
    return bench.done(bench.machine.receive_published(lease, bench.now)), lease


def test_what_comes_whole_stays_where_it_was_received_and_no_buffer_is_lost() -> None:
    bench = Bench()
    bench.publish(announce(), LAYOUT.header)
    applied(bench, bench.publish(whole(1), DATA))
    for number in range(2, 9):
        effects, lease = received(bench, whole(number), DATA)
        [staged] = [e.staged for e in effects if isinstance(e, Ready)]
        assert np.shares_memory(staged.data, np.asarray(lease.view)), "it was copied"
        assert applied(bench, effects)
        effects, lease = received(bench, whole(number), DATA)
        assert not effects, "it is known"
        assert not lease.live, "its buffer is free again"
        abandoned = bench.machine.place([b"a/ctl", encode(whole(number + 1))], len(DATA))
        assert abandoned is not None
        abandoned.cancel()


def test_what_comes_whole_and_damaged_is_fetched_to_where_it_was_received() -> None:
    bench = Bench()
    bench.publish(announce(), LAYOUT.header)
    applied(bench, bench.publish(whole(1), DATA))
    effects, lease = received(bench, whole(2), DATA[::-1])
    assert sent(effects, Fetch) == [Fetch(model="a", epoch=EPOCH, version=2, first=0, count=1)]
    chunk = Chunk(model="a", epoch=EPOCH, version=2, index=0, crc=crc32c(DATA))
    effects = bench.done(bench.machine.receive([encode(chunk), DATA], bench.now))
    assert bytes(lease.view) == DATA
    assert applied(bench, effects)


def test_a_version_that_is_being_received_keeps_its_buffer_from_others() -> None:
    bench = Bench()
    bench.publish(announce(), LAYOUT.header)
    applied(bench, bench.publish(whole(1), DATA))
    lease = bench.machine.place([b"a/ctl", encode(whole(2))], len(DATA))
    assert lease is not None
    lease.view[:] = bytes(4)
    effects = bench.publish(whole(3), DATA)  # as if another connection delivered it earlier
    [staged] = [e.staged for e in effects if isinstance(e, Ready)]
    assert not np.shares_memory(staged.data, np.asarray(lease.view))
    assert bytes(staged.data) == DATA


@pytest.mark.parametrize("end", ["outside", "cut off"])
def test_a_chunk_that_is_dropped_once_it_is_in_its_place_is_fetched(end: str) -> None:
    bench = Bench()
    bench.publish(announce(), LAYOUT.header)
    header = encode(Chunk(model="a", epoch=EPOCH, version=1, index=0, crc=crc32c(DATA)))
    lease = bench.machine.place([b"a/dat", header], len(DATA))
    assert lease is not None
    lease.view[lease.count :] = DATA
    lease.received(len(DATA))
    if end == "outside":
        bench.machine.session.phase = "outside"
        bench.machine.receive_published(lease, bench.now)
        bench.machine.session.phase = "inside"
    else:
        lease.cancel()
    assert not lease.live
    effects = bench.machine.tick(bench.now + Timing().quiet)
    assert Fetch(model="a", epoch=EPOCH, version=1, first=0, count=1) in sent(effects, Fetch)


def test_a_chunk_that_lies_in_its_place_enters_once() -> None:
    bench = Bench()
    bench.publish(announce(), LAYOUT.header)
    header = encode(Chunk(model="a", epoch=EPOCH, version=1, index=0, crc=crc32c(DATA)))
    lease = bench.machine.place([b"a/dat", header], len(DATA))
    assert lease is not None
    assert bench.machine.place([b"a/dat", header], len(DATA)) is None, "it is on its way"
    lease.view[lease.count :] = DATA
    lease.received(len(DATA))
    effects = bench.machine.receive_published(lease, bench.now)
    bench.tell(End(model="a", epoch=EPOCH, version=1, digest=WHOLE.digest))
    assert bench.machine.followers["a"].versions.in_phase["ready"] is not None
    assert not sent(effects, Fetch)
    assert bench.machine.receive_published(lease, bench.now) == [], "twice is once"
