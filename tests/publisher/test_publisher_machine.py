"""What a publisher believes of what workers say, and how it answers."""

import itertools
import re
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import numpy as np
import pytest

from weightbus.bus.effects import Notice, Send
from weightbus.bus.errors import UnknownWorkerError
from weightbus.bus.headers import data_topic, encode
from weightbus.bus.limits import ABSENT_MAX, CALLS_MAX, Timing
from weightbus.bus.memory.snapshots import Pool, Snapshot
from weightbus.bus.messages import (
    MAPPING,
    RENAMING,
    Abort,
    Announce,
    Applied,
    Beacon,
    Bye,
    Chunk,
    Commit,
    End,
    Failed,
    Fetch,
    Hello,
    Ping,
    Pong,
    Prepare,
    Progress,
    Refuse,
    Rename,
    Running,
    Shared,
    Staged,
    Welcome,
)
from weightbus.bus.protocol_limits import EPOCH_LEAP_MAX_MS, WHOLE_BYTES_MAX
from weightbus.bus.publisher import absent, sessions
from weightbus.bus.publisher.effects import (
    Broadcast,
    Effect,
    Hash,
    MakeReclaimable,
    Release,
    Resolve,
    Settled,
)
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.phases import GRACED
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.state import PersistentCondition, PublisherState
from weightbus.bus.publisher.tables import WORKERS, WorkerEvent, WorkerPhase
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.bus.structs import Message
from weightbus.codecs.checksum import digest_of
from weightbus.codecs.layout import Layout
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform

EPOCH, CHUNK = 7, 16
M = TypeVar("M", bound=Message)
ids = itertools.count()


class Bench:
    """A publisher with some workers that have said hello."""

    def __init__(self, *names: str, listening: bool = True) -> None:
        self.now = 0.0
        self.machine = PublisherMachine(
            PublisherState(EPOCH, "tcp://d:1", Timing(), age=lambda: self.now)
        )
        self.pool, self.chunk_bytes, self.model = Pool("a"), CHUNK, "a"
        self.where: Shared | None = None  # where workers on its host find versions
        for name in names:
            self.say(name, hello(name))
            if listening:
                self.say(name, Ping(subscribed=True))

    def say(self, name: str, message: Message) -> list[Effect]:
        effects = self.machine.receive(name.encode(), [encode(message)], self.now)
        return perform(self.machine, effects, self.now)

    def publish(
        self,
        nbytes: int = 40,
        *,
        workers: tuple[str, ...] | None = None,
        require: int | None = None,
        wait: Literal["applied", "staged", "none"] = "applied",
        commit: Literal["auto", "together"] = "auto",
        seconds: float = 10.0,
        grace: float = 0.0,
        grace_of_gone: float = 0.0,
        expect: int = 0,
        alive: bool = False,
    ) -> tuple[Version, list[Effect]]:
        layout = Layout.plan([("w", "U8", (nbytes,))])
        fresh = workers is None and commit == "auto"
        offer = self.offer(layout, replaces_latest=fresh)
        terms = PublishTerms(
            workers=workers,
            require=require,
            wait=wait,
            commit=commit,
            timeout=seconds,
            grace=grace,
            grace_of_gone=grace_of_gone,
            expect=expect,
            alive=alive,
        )
        call, effects = self.machine.publish(next(ids), offer, terms, self.now, self.now)
        return call.version, perform(self.machine, effects, self.now)

    def offer(self, layout: Layout, *, replaces_latest: bool) -> VersionOffer:
        """Take memory for a version and fill it."""
        nbytes = layout.nbytes
        snapshot = self.pool.take(nbytes, self.make_room, replaces_latest=replaces_latest)
        snapshot.data[:] = np.arange(nbytes, dtype=np.uint8)
        return VersionOffer.of(self.model, layout, self.chunk_bytes, snapshot, self.where)

    def make_room(self, among: Collection[Snapshot], replaces_latest: bool, _left: float) -> bool:
        effects = self.machine.make_room("a", among, replaces_latest=replaces_latest)
        perform(self.machine, effects, self.now)
        return bool(effects)

    def push(self) -> list[Effect]:
        return perform(self.machine, self.machine.push(self.now), self.now)

    def pass_time(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return perform(self.machine, self.machine.tick(self.now), self.now)


def hello(name: str, instance: str = "0" * 32, **fields: Any) -> Hello:
    told: dict[str, Any] = {"name": name, "instance": instance, "models": {"a": None}}
    told |= fields
    runs: list[Running] = [running for running in told["models"].values() if running is not None]
    told.setdefault("epoch", max((r.epoch for r in runs), default=0))
    return Hello(**told)


def digest(version: Version | VersionOffer) -> str:
    """Return what the bytes of a version hash to, which are the same in all of one size."""
    data = np.arange(version.layout.nbytes, dtype=np.uint8)
    return digest_of(version.layout.id, data, version.chunks.plan.chunk_bytes)


def report(kind: Callable[..., Message], version: Version, /, **fields: Any) -> Message:
    told: dict[str, Any] = {"model": "a", "epoch": version.epoch, "version": version.version}
    if kind in (Staged, Applied) and "digest" not in fields:
        told["digest"] = digest(version)
    return kind(**told | fields)


def sent(effects: list[Effect], kind: type[M], to: str | None = None) -> list[M]:
    """Return the messages of one type, sent to one worker or (None) to anybody."""
    return [
        e.message
        for e in effects
        if isinstance(e, Send | Broadcast) and isinstance(e.message, kind)
        if to is None or (isinstance(e, Send) and e.to == to.encode())
    ]


def notices(effects: list[Effect], kind: str) -> list[Notice]:
    return [e for e in effects if isinstance(e, Notice) and e.kind == kind]


def resolved(effects: list[Effect]) -> Resolve | None:
    return next((e for e in effects if isinstance(e, Resolve)), None)


def answered(effects: list[Effect]) -> Resolve:
    """Return how the first call that is over has ended."""
    return next(e for e in effects if isinstance(e, Resolve))


def test_workers_hear_of_memory_that_is_prepared_until_something_lies_in_it() -> None:
    bench, where = Bench("w0"), Shared("/proc/1/fd/3", "a" * 32)
    for name, model, features in (
        ("here", "a", [MAPPING]),
        ("other", "b", [MAPPING]),
        ("simple", "a", []),
        ("far", "a", [MAPPING]),
    ):
        bench.say(name, hello(name, models={model: None}, features=features))
        bench.say(name, Ping(shared=name != "far"))
    told = Prepare(model="a", epoch=EPOCH, nbytes=40, shared=where)
    assert bench.machine.prepare("a", where, 40) == [Send(told, to=b"here")]
    late = hello("late", "1" * 32, features=[MAPPING])
    assert sent(bench.say("late", late), Prepare, "late") == [told]
    bench.say("old", stale(age=30.0))
    later = hello("later", "3" * 32, features=[MAPPING])
    assert [m.epoch for m in sent(bench.say("later", later), Prepare)] == [
        bench.machine.state.epoch
    ]
    assert bench.machine.state.epoch > EPOCH
    bench.publish()
    late = hello("latest", "2" * 32, features=[MAPPING])
    assert sent(bench.say("latest", late), Prepare) == []


# What an earlier publisher has left.


def offered(*names: tuple[int, int]) -> tuple[Bench, Version]:
    """Return a publisher that offers a version which had these names before."""
    bench = Bench()
    offer = bench.offer(Layout.plan([("w", "U8", (40,))]), replaces_latest=True)
    offer.chunks.fill(digest(offer))
    offer.names = frozenset(names)
    version, effects = bench.machine.offer(offer)
    perform(bench.machine, effects, bench.now)
    return bench, version


OLD = (EPOCH - 2, 40)


@pytest.mark.parametrize(
    ("running", "features", "told"),
    [
        (Running(*OLD, "right"), [RENAMING], True),
        (Running(EPOCH - 1, 3, "right"), [RENAMING], True),
        (Running(*OLD, ""), [RENAMING], True),
        (Running(EPOCH - 2, 39, ""), [RENAMING], False),
        (Running(*OLD, "0" * 64), [RENAMING], False),
        (Running(*OLD, "right"), [], False),
        (None, [RENAMING], False),
    ],
)
def test_who_runs_the_bytes_is_told_their_name(
    running: Running | None, features: list[str], told: bool
) -> None:
    bench, version = offered(OLD)
    if running is not None and running.digest == "right":
        running = Running(running.epoch, running.version, digest(version))
    said = hello("w0", models={"a": running}, features=features)
    effects = bench.say("w0", said)
    assert next(type(e.message) for e in effects if isinstance(e, Send)) is Welcome
    renames = sent(effects, Rename, "w0")
    if not told or running is None:
        assert renames == []
        return
    assert renames == [Rename(model="a", epoch=EPOCH, version=1, was=running)]
    bench.say("w0", report(Applied, version, digest=running.digest))
    assert bench.machine.status(0.0)[0].running == {"a": version.key}
    again = hello("w0", models={"a": Running(*version.key, running.digest)}, features=features)
    assert sent(bench.say("w0", again), Rename) == [], "it has the name already"


def test_the_bytes_have_a_name_only_until_others_are_published() -> None:
    bench, version = offered(OLD)
    bench.publish()
    said = hello("w0", models={"a": Running(*OLD, digest(version))}, features=[RENAMING])
    assert sent(bench.say("w0", said), Rename) == []


def test_what_is_settled_for_all_is_told_once() -> None:
    bench = Bench("w0", "w1")
    version, effects = bench.publish()
    assert [e.version for e in effects if isinstance(e, Settled)] == [version]
    _, effects = bench.publish(workers=("w0",))
    assert not any(isinstance(e, Settled) for e in effects)
    together, effects = bench.publish(commit="together")
    assert not any(isinstance(e, Settled) for e in effects)
    effects = bench.say("w0", report(Staged, together))
    effects += bench.say("w1", report(Staged, together))
    assert [e.version for e in effects if isinstance(e, Settled)] == [together]


# Which of two publishers is the later one.


def stale(name: str = "old", *, age: float, epoch: int = 50) -> Hello:
    """Return the hello of a worker that runs weights of a publisher of that age, in seconds."""
    running = Running(epoch, 3, "e" * 64)
    return hello(name, models={"a": running}, epoch=epoch, age_ms=round(age * 1000))


class Started:
    """A publisher that has just started, at a time in seconds since 1970."""

    def __init__(self, at: float) -> None:
        self.age = 0.0
        self.state = PublisherState(
            int(at * 1000), "tcp://d:1", age=lambda: self.age, clock=lambda: at + self.age
        )
        self.machine = PublisherMachine(self.state)

    def hears(self, said: Hello) -> list[Effect]:
        return self.machine.receive(said.name.encode(), [encode(said)], self.age)


def test_who_comes_after_a_leap_takes_over_and_its_order_is_that_of_the_starts() -> None:
    epochs = [0]
    for at in (1_795_000_000, 1_795_000_060, 1_795_000_120):  # by right clocks
        publisher = Started(at)
        publisher.age = 10.0
        if epochs[-1]:
            honest = stale("honest", age=69.9, epoch=epochs[-1])
            assert sent(publisher.hears(honest), Welcome)
        publisher.age = 30.0
        publisher.hears(stale("liar", age=1e12, epoch=publisher.state.epoch + 1))
        epochs.append(publisher.state.epoch)
        assert epochs[-1] == at * 1000 + EPOCH_LEAP_MAX_MS
    assert epochs == sorted(set(epochs))


def test_a_clock_that_was_set_after_the_start_counts_as_it_is_now() -> None:
    clock = [5.0]  # of a host without a battery
    state = PublisherState(5000, "tcp://d:1", age=lambda: 2.0, clock=lambda: clock[0])
    machine = PublisherMachine(state)
    said = encode(stale(age=30.0, epoch=1_795_000_000_000))
    [refuse] = sent(machine.receive(b"old", [said], 2.0), Refuse)
    assert "set that clock" in refuse.text
    clock[0] = 1_795_000_030.0
    assert sent(machine.receive(b"old", [said], 3.0), Welcome)
    assert state.epoch > 1_795_000_000_000


def test_a_refusal_is_told_once_and_says_who_why_and_what_to_do() -> None:
    bench = Bench()
    bench.publish()
    bench.now = 60.0
    [notice] = notices(bench.say("old", stale(age=30.0)), "refused")
    assert notice.warning
    assert notice.worker == "old"
    assert "old runs weights of epoch 50" in notice.text
    assert "restart this one" in notice.text
    bench.now = 61.0
    effects = bench.say("old", stale(age=31.0))
    assert sent(effects, Refuse, "old")
    assert not notices(effects, "refused"), "once is enough, for a while"
    bench.now = 130.0
    assert notices(bench.say("old", stale(age=31.0)), "refused")


def test_the_latest_reason_of_a_refusal_is_kept_and_logged_no_more_often() -> None:
    bench = Bench()
    bench.publish()
    bench.now = 60.0
    bench.say("old", stale(age=30.0))
    bench.now = 119.0
    running = {"b": Running(70, 3, "e" * 64)}
    later = hello("old", models=running, epoch=70, age_ms=89_000)
    assert not notices(bench.say("old", later), "refused")
    [text] = absent.reasons(bench.machine.state, "b")
    assert "old runs weights of epoch 70" in text
    assert not absent.reasons(bench.machine.state, "a")
    bench.now = 120.0
    assert notices(bench.say("old", stale(age=90.0)), "refused"), "a minute after the first"


def test_any_number_of_refused_names_is_a_bounded_number_of_warnings() -> None:
    bench = Bench()
    bench.now = 60.0
    told = [e for i in range(200) for e in bench.say(f"{i}", stale(f"w{i}", age=1.0))]
    assert len(notices(told, "refused")) == ABSENT_MAX


def test_a_call_that_is_overtaken_is_skipped_across_epochs() -> None:
    bench = Bench("w0")
    bench.publish(seconds=60)
    newer, _ = bench.publish(seconds=60)
    bench.say("old", stale(age=30.0))
    claim = Running(EPOCH, 1, "f" * 64)
    assert resolved(bench.say("w0", hello("w0", models={"a": claim}))) is None, "of other bytes"
    effects = bench.say("w0", report(Applied, newer))
    answers = [e.receipt for e in effects if isinstance(e, Resolve)]
    assert [(r.epoch, r.workers["w0"].state) for r in answers] == [
        (EPOCH, "skipped"),
        (bench.machine.state.epoch, "applied"),
    ]


def test_what_was_gone_before_the_epoch_changed_never_was_of_it() -> None:
    bench = Bench("w0")
    for _ in range(2):
        bench.say("w0", report(Applied, bench.publish()[0]))
    latest, _ = bench.publish()
    bench.say("w0", report(Applied, latest))
    bench.say("old", stale(age=30.0))
    claim = report(Applied, latest, version=1, digest="f" * 64)
    assert notices(bench.say("w0", claim), "wrong-digest")


def test_of_a_worker_that_is_at_a_version_no_later_one_is_kept_until_it_asks() -> None:
    bench = Bench("slow", "fast")
    first, _ = bench.publish()
    bench.say("slow", Fetch(model="a", epoch=EPOCH, version=1, first=0, count=1))
    bench.say("fast", report(Applied, first))
    version = first
    for number in range(2, 10):
        version, _ = bench.publish()
        assert version.receivers == {"fast"}
        bench.say("fast", report(Applied, version))
        bench.pass_time(0.3)
        bench.say("slow", Ping(subscribed=True))  # it was silent for a while
        bench.say("slow", Fetch(model="a", epoch=EPOCH, version=99, first=0, count=1))
        assert (first.receivers, first.phase) == ({"slow"}, "old")
        assert (version.receivers, version.reclaimable) == (set(), True)
        assert version.version == number
    assert len(bench.pool) == 2, "the one that it is at, and one for all that come"
    bench.say("slow", Fetch(model="a", epoch=EPOCH, version=0))
    assert (version.receivers, first.phase) == ({"slow"}, "gone"), "it goes on to the newest"


# Who is there.


def test_a_shortfall_says_who_is_missing() -> None:
    bench = Bench("w0", "w1", "w2")
    bench.say("w1", Bye())
    bench.pass_time(5.0)
    bench.say("old", stale(age=1.0))
    bench.publish(expect=3, seconds=1)
    answer = answered(bench.pass_time(1.0))
    assert not answer.achieved
    assert "a version 1 is applied by 0 of 3 workers after 1.0 s" in answer.shortfall
    assert "3 of 3 workers are missing (" in answer.shortfall, "nobody says that they never came"
    lost = ("w0 is lost: silent for 5.0 s", "w2 is lost: silent for 5.0 s")
    for part in (*lost, "w1 has left", "old is refused (stale-epoch)"):
        assert part in answer.shortfall


def test_a_shortfall_counts_who_is_required_and_who_never_came() -> None:
    bench = Bench("w0", "w1")
    version, effects = bench.publish(require=3)
    answer = answered(effects)
    assert "by 0 of 2 workers (3 are required) after" in answer.shortfall
    version, _ = bench.publish(expect=3, seconds=1)
    for name in ("w0", "w1"):
        bench.say(name, report(Applied, version))
    answer = answered(bench.pass_time(1.0))
    assert "by 2 of 3 workers after 1.0 s; 1 of 3 workers never came" in answer.shortfall


def test_a_newer_publish_aborts_an_open_commit_and_says_so() -> None:
    bench = Bench("w0")
    bench.publish(commit="together")
    effects = bench.publish()[1]
    assert [m.text for m in sent(effects, Abort, "w0")] == ["superseded by a newer publish"]
    assert answered(effects).shortfall.endswith("superseded by a newer publish")


def gone(bench: Bench, name: str, ended: str = "") -> list[Effect]:
    effects = bench.machine.unreachable(name.encode(), bench.now, ended)
    return perform(bench.machine, effects, bench.now)


ENDED = "its process, 42, has ended"


def test_whose_process_has_ended_is_lost_at_once_and_not_waited_for() -> None:
    bench = Bench("w0", "w1")
    version, _ = bench.publish(seconds=60, grace=5.0)
    bench.say("w0", report(Applied, version))
    effects = gone(bench, "w1", ENDED)
    [notice] = notices(effects, "lost")
    assert notice.warning
    assert notice.text == f"worker w1 is lost: {ENDED}"
    answer = answered(effects)
    assert not answer.achieved
    assert answer.receipt.workers["w1"].detail == ENDED
    assert not gone(bench, "w1", ENDED), "it is known"


def test_who_was_silent_before_its_process_ended_is_waited_for_no_longer() -> None:
    bench = Bench("w0")
    bench.publish(seconds=60, grace=5.0)
    assert notices(effects := bench.pass_time(5.0), "lost")
    assert resolved(effects) is None, "it is waited for"
    effects = gone(bench, "w0", ENDED)
    assert not notices(effects, "lost"), "it is known to be"
    assert resolved(effects) is not None


LOSSES = [
    (p, event) for p, arrows in WORKERS.items() for event in arrows if arrows[event] == "lost"
]


@pytest.mark.parametrize(("phase", "event"), LOSSES)
def test_calls_wait_for_a_lost_worker_as_the_coupling_says(
    phase: WorkerPhase, event: WorkerEvent
) -> None:
    bench = Bench("w0")
    bench.publish(seconds=60, grace=5.0)
    state = bench.machine.state
    peer = state.roster.by_name("w0")
    assert peer is not None
    if phase == "away":
        gone(bench, "w0")
    [call] = state.calls.values()
    effects = sessions.lose(state, peer, bench.now, event, "why")
    assert peer.lost
    assert call.targets["w0"].state == "lost"
    assert (resolved(effects) is None) == (event in GRACED)


def test_whose_connection_is_closed_and_makes_no_other_is_lost_and_may_return() -> None:
    bench = Bench("w0")
    bench.publish(seconds=60, grace=5.0)
    gone(bench, "w0")
    effects = bench.pass_time(bench.machine.state.timing.gone_after)
    [notice] = notices(effects, "lost")
    assert "its connection is closed, and it opened no other in 2 s" in notice.text
    assert resolved(effects) is not None, "it was waited for"
    assert notices(bench.say("w0", Ping(subscribed=True)), "back")
    assert not notices(bench.pass_time(0.1), "lost"), (
        "it is here, and not as if it had no connection"
    )


def test_what_is_heard_of_a_closed_connection_keeps_nobody_from_being_lost_of_silence() -> None:
    bench = Bench("w0")
    gone(bench, "w0")
    bench.say("w0", Ping())
    assert not notices(bench.pass_time(bench.machine.state.timing.gone_after), "lost")
    assert notices(bench.pass_time(bench.machine.state.timing.lost_after), "lost")


def test_a_caller_may_have_the_dead_waited_for() -> None:
    bench = Bench("w0")
    version, _ = bench.publish(seconds=60, grace_of_gone=5.0)
    assert resolved(gone(bench, "w0", ENDED)) is None
    bench.say("w0", hello("w0", "1" * 32))
    assert answered(bench.say("w0", report(Applied, version))).achieved


@pytest.mark.parametrize("commit", ["auto", "together"])
def test_where_the_living_are_required_the_dead_are_told_of(
    commit: Literal["auto", "together"],
) -> None:
    bench = Bench("w0", "w1")
    version, _ = bench.publish(seconds=60, alive=True, commit=commit)
    bench.say("w0", report(Staged, version))
    effects = gone(bench, "w1", ENDED)
    if commit == "auto":
        assert resolved(effects) is None, "one that lives is behind"
    else:
        assert sent(effects, Commit, "w0")
    answer = answered(bench.say("w0", report(Applied, version)))
    assert answer.achieved
    assert answer.receipt.in_state("lost") == ["w1"]


def test_where_the_living_are_required_one_that_fails_is_an_error() -> None:
    bench = Bench("w0")
    version, _ = bench.publish(seconds=60, alive=True)
    answer = answered(bench.say("w0", report(Failed, version, code="apply", text="does not fit")))
    assert not answer.achieved


def test_where_the_living_are_required_the_silent_are_waited_for_first() -> None:
    bench = Bench("w0")
    bench.publish(seconds=60, grace=1.0, alive=True)
    assert resolved(bench.pass_time(5.0)) is None
    answer = answered(effects := bench.pass_time(1.0))
    assert answer.achieved
    assert notices(effects, "nobody")


def test_a_publish_to_nobody_is_a_warning_once() -> None:
    bench = Bench()
    [notice] = notices(bench.publish()[1], "nobody")
    assert notice.warning
    assert "no worker has joined" in notice.text
    assert not notices(bench.publish()[1], "nobody")
    bench.say("w0", hello("w0"))
    bench.say("w1", hello("w1"))
    version, _ = bench.publish()
    bench.say("w1", Bye())
    effects = bench.say("w0", Bye())
    [notice] = notices(effects, "nobody")
    assert notice.warning
    assert "w0 has left" in notice.text
    assert "w1 has left" in notice.text
    assert version.version == 3
    assert not notices(bench.publish()[1], "nobody")
    bench.say("w0", hello("w0", "1" * 32))
    bench.pass_time(5.0)
    [notice] = notices(bench.publish()[1], "nobody")
    assert "w0 is lost" in notice.text


def test_what_listeners_hear_is_how_things_stand() -> None:
    bench = Bench("w0")
    version, _ = bench.publish(seconds=60)
    bench.say("w0", report(Progress, version, chunks=1))
    for _ in range(4):
        assert not notices(bench.pass_time(1.0), "stuck")
        bench.say("w0", Ping())
    [stuck] = notices(bench.pass_time(1.0), "stuck")
    bench.say("w0", report(Progress, version, chunks=1))
    assert "no progress for 5.0 s" in stuck.text
    [status] = bench.machine.status(bench.now)
    where = "receiving version 1, 1 of 3 chunks here, no progress for 5.0 s"
    assert (status.state, status.phase["a"]) == ("stuck", where)
    bench.say("w0", report(Progress, version, chunks=2))
    assert notices(bench.pass_time(0.1), "back")
    assert notices(bench.pass_time(5.0), "lost")
    assert [n.kind for n in bench.say("w0", Ping()) if isinstance(n, Notice)] == ["back"]
    bench.pass_time(5.0)
    said = [n.kind for n in bench.say("w0", Bye()) if isinstance(n, Notice)]
    assert said == ["left"], "it was lost, and is not back in between"


# What workers claim.


def test_memory_is_not_kept_for_who_is_told_of_versions_and_says_nothing() -> None:
    """It may have been stopped. Until it is lost it is waited for, but holds no memory."""
    bench = Bench("w0", "mute")
    bench.pass_time(1.0)
    for name in ("w0", "mute"):
        bench.say(name, Ping(subscribed=True))
    for _ in range(20):
        bench.pass_time(0.05)
        version, _ = bench.publish()
        bench.say("w0", report(Applied, version))
    version, _ = bench.publish()
    assert version.receivers == {"w0"}
    bench.say("w0", report(Applied, version))
    blocks = len(bench.pool)
    for _ in range(10):
        bench.pass_time(0.2)
        version, effects = bench.publish(require=2)
        answer = resolved(bench.say("w0", report(Applied, version)))
        assert (resolved(effects), answer) == (None, None), "it is waited for"
        assert len(bench.pool) == blocks
    bench.say("mute", Ping(subscribed=True))
    version, _ = bench.publish()
    assert version.receivers == {"w0", "mute"}
    bench.pass_time(1.0)
    bench.say("mute", hello("mute"))
    version, _ = bench.publish()
    assert version.receivers == {"mute"}


def test_a_small_version_does_not_go_whole_to_those_who_say_nothing() -> None:
    """It would wait at their connections. As a chunk it is pushed where there is room."""
    bench = Bench("mute")
    small = min(CHUNK, WHOLE_BYTES_MAX)
    bench.publish(small)
    _, whole = bench.publish(small)
    assert [m.whole is None for m in sent(whole, Announce)] == [False]
    bench.pass_time(0.5)
    version, effects = bench.publish(small)
    assert [m.whole is None for m in sent(effects, Announce)] == [True]
    assert bench.machine.ready == [data_topic("a")]
    assert sent(bench.push(), Chunk)
    assert answered(bench.say("mute", report(Applied, version))).achieved


def test_a_failure_names_the_worker_and_why() -> None:
    bench = Bench("w0", "w1")
    version, _ = bench.publish()
    assert resolved(bench.say("w0", report(Failed, version, code="apply", text="no room"))) is None
    answer = answered(bench.say("w1", report(Applied, version)))
    assert not answer.achieved
    assert answer.receipt.workers["w0"].state == "failed"
    assert answer.receipt.workers["w0"].detail == "apply: no room"


def test_a_failure_is_a_warning_at_once_and_once_though_a_publish_waits_for_more() -> None:
    bench = Bench("w0")

    def fails(text: str) -> Notice:
        version, _ = bench.publish(expect=2, seconds=60)
        failed = report(Failed, version, code="layout-mismatch", text=text)
        [notice] = notices(effects := bench.say("w0", failed), "failed")
        assert resolved(effects) is None, "it waits for another worker"
        return notice

    first, second, other = fails("shape [2]"), fails("shape [2]"), fails("shape [3]")
    assert first.text == "worker w0 failed version 1 of a: layout-mismatch: shape [2]"
    assert [each.warning for each in (first, second, other)] == [True, False, True]
    [left] = notices(bench.say("w0", Bye()), "left")
    said = "worker w0 has left: it sent goodbye; it had failed version 3 of a: layout-mismatch: "
    assert left.text == said + "shape [3]"


def test_a_worker_that_runs_a_version_after_all_has_failed_none() -> None:
    bench = Bench("w0")
    version, _ = bench.publish(seconds=60)
    bench.say("w0", report(Failed, version, code="apply", text="no room"))
    newer, _ = bench.publish(seconds=60)
    bench.say("w0", report(Applied, newer))
    [left] = notices(bench.say("w0", Bye()), "left")
    assert left.text == "worker w0 has left: it sent goodbye"


# Fetching.


@pytest.mark.parametrize(
    "fetch",
    [
        Fetch(model="b", epoch=EPOCH, version=1, count=1),
        Fetch(model="a", epoch=EPOCH, version=2, count=1),
        Fetch(model="a", epoch=EPOCH - 1, version=1, count=1),
        Fetch(model="a", epoch=EPOCH - 1, version=0),
    ],
    ids=["model", "version", "epoch", "latest of an older epoch"],
)
def test_what_is_not_there_is_gone(fetch: Fetch) -> None:
    bench = Bench("w0")
    bench.publish()
    effects = bench.say("w0", fetch)
    assert [m.code for m in sent(effects, Refuse)] == ["gone"]
    assert "b" not in [versions.model for versions in bench.machine.state.store.values()], (
        "nothing is remembered"
    )


# Publishing.


def test_whether_a_version_will_be_sent_is_known_before_it_is_copied() -> None:
    bench = Bench("w0", "w1", listening=False)
    known = bench.machine.view
    assert not known().sends("a", None, shared=False), "nobody hears of it: they fetch"
    bench.say("w0", Ping(subscribed=True, shared=True))
    assert known().sends("a", None, shared=False)
    assert not known().sends("a", None, shared=True), "it is read where it lies"
    bench.say("w1", Ping(subscribed=True))
    assert known().sends("a", None, shared=True)
    assert known().sends("a", ("w1",), shared=True)
    assert not known().sends("a", ("w0",), shared=True), "it is for another worker alone"
    assert not known().sends("b", None, shared=True)
    bench.say("w1", Bye())
    assert not known().sends("a", None, shared=True)


def test_nothing_is_kept_of_a_failure_with_models_that_a_worker_never_named() -> None:
    bench = Bench("w0")
    for model in ("a", "x", "y"):
        bench.say(
            "w0",
            Failed(model=model, epoch=EPOCH, version=1, code="apply", text="", intact=False),
        )
    [peer] = bench.machine.state.roster
    assert peer.torn == {"a"}


def test_no_more_is_pushed_at_a_time_than_may_wait_for_a_subscriber() -> None:
    bench = Bench("w0")
    bench.machine.state.queue = 3
    bench.publish(CHUNK * 10)
    steps: list[list[int]] = []
    while bench.machine.ready:
        steps.append([m.index for m in sent(bench.push(), Chunk)])
    assert steps == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9], []], "the end comes last"


def test_an_unknown_name_publishes_nothing() -> None:
    bench = Bench("w0")
    with pytest.raises(UnknownWorkerError, match="no worker named w1 has joined; known are w0"):
        bench.publish(workers=("w0", "w1"))
    assert not list(bench.machine.state.store)


def test_a_worker_that_has_left_is_known_and_counts_as_left() -> None:
    """It may leave between a look at the workers and the publish."""
    bench = Bench("w0", "w1")
    bench.say("w1", Bye())
    version, effects = bench.publish(workers=("w0", "w1"))
    assert sent(effects, Announce, "w0")
    [call] = bench.machine.state.calls.values()
    assert {name: target.state for name, target in call.targets.items()} == {
        "w0": "behind",
        "w1": "left",
    }
    assert call.targets["w1"].detail == "it left before the publish"
    assert "w1" not in version.receivers


def test_workers_that_apply_nothing_keep_few_publishes_open() -> None:
    bench, effects = Bench("w0"), list[Effect]()
    for _ in range(CALLS_MAX):
        _, effects = bench.publish()
        assert resolved(effects) is None
    first = next(iter(bench.machine.state.calls))
    _, effects = bench.publish()
    ended = answered(effects)
    assert (ended.publication, ended.achieved) == (first, False)
    assert "no worker applies them" in ended.why
    assert ended.receipt.workers["w0"].state == "behind"
    assert len(bench.machine.state.calls) == CALLS_MAX


def test_publishes_of_many_models_end_one_another_in_no_case() -> None:
    bench = Bench("w0")
    for number in range(CALLS_MAX + 1):
        bench.model = f"m{number}"
        _, effects = bench.publish(expect=1)
        assert resolved(effects) is None
    assert len(bench.machine.state.calls) == CALLS_MAX + 1


# Memory.


def reclaimable(*, thief: bool) -> tuple[Bench, Version]:
    """Return a publisher whose latest version nobody is receiving, and its version."""
    bench, layout = Bench("w0"), Layout.plan([("w", "U8", (40,))])
    data = np.arange(40, dtype=np.uint8)
    offer, now = VersionOffer.of("a", layout, CHUNK, PlainSnapshot(data, thief=thief)), bench.now
    call, effects = bench.machine.publish(next(ids), offer, PublishTerms(), now, now)
    version = call.version
    perform(bench.machine, effects, now)
    bench.say("w0", report(Failed, version, code="no", text="not this one"))
    assert version.reclaimable
    return bench, version


def test_a_version_that_was_lent_is_taken_back_to_be_given_out() -> None:
    bench, version = reclaimable(thief=False)
    for fetch in (
        Fetch(model="a", epoch=EPOCH, version=0),
        Fetch(model="a", epoch=EPOCH, version=1, count=3),
    ):
        told = bench.say("w0", fetch)
        assert sent(told, End if not fetch.count else Chunk, "w0")
        assert version.receivers == {"w0"}
        assert not version.reclaimable
    bench.say("w0", report(Applied, version))
    assert version.reclaimable
    assert version.snapshot.exists


@pytest.mark.parametrize("hashed", [True, False])
def test_who_runs_a_version_is_not_at_it_whatever_it_asked_before(*, hashed: bool) -> None:
    """What it says on its data connection overtakes that. Else the next one took more memory."""
    bench = Bench("w0")
    bench.where = None if hashed else Shared("/proc/1/fd/3", "0" * 32)
    version, _ = bench.publish()
    bench.say("w0", report(Applied, version) if hashed else report(Applied, version, digest=""))
    assert (version.reclaimable, bool(version.digest)) == (True, hashed)
    peer = bench.machine.state.roster.by_name("w0")
    assert peer is not None
    for count in (0, 3):
        fetch = Fetch(model="a", epoch=EPOCH, version=1 if count else 0, count=count)
        told = bench.say("w0", fetch)
        assert sent(told, Chunk if count else End, "w0"), "it is answered all the same"
        assert (version.receivers, peer.incoming, version.reclaimable) == (set(), {}, True)
        if hashed and not count:
            assert MakeReclaimable(version) not in told, "it was not even held for a moment"


def test_a_version_whose_memory_was_taken_is_gone() -> None:
    bench, version = reclaimable(thief=True)
    assert sent(bench.pass_time(1.0), Beacon) == []
    [pong] = sent(bench.say("w0", Ping(subscribed=True)), Pong)
    assert not pong.models
    [welcome] = sent(bench.say("w1", hello("w1")), Welcome)
    assert not welcome.models
    for number in (1, 0):
        [refuse] = sent(bench.say("w1", Fetch(model="a", epoch=EPOCH, version=number)), Refuse)
        assert refuse.code == "gone"
    assert sent(bench.say("w0", report(Staged, version)), Abort)
    claim = report(Applied, version, digest="f" * 64)
    assert notices(bench.say("w0", claim), "wrong-digest"), "nobody was told what it hashes to"
    assert bench.say("w0", report(Progress, version, chunks=1)) == []
    assert list(bench.machine.state.versions("a")) == []
    assert bench.publish()[0].key == (EPOCH, 2)


def test_a_version_whose_memory_was_taken_has_no_name_in_another_epoch() -> None:
    bench, version = reclaimable(thief=True)
    bench.say("old", stale(age=30.0))
    assert bench.machine.state.epoch > EPOCH
    assert version.key == (EPOCH, 1)
    newer, _ = bench.publish()
    assert newer.key == (bench.machine.state.epoch, 2)


def test_memory_is_let_go_before_whoever_waits_is_answered() -> None:
    """A trainer that publishes again at once finds it."""
    bench = Bench("w0")
    version, _ = bench.publish()
    frames = [encode(report(Applied, version))]
    effects = bench.machine.receive(b"w0", frames, bench.now)
    assert [type(e) for e in effects[-2:]] == [Hash]  # nothing was sent: it is hashed first
    hash_all(version)
    *_, reclaim, answer = bench.machine.hashed(version, bench.now)
    assert (type(reclaim), type(answer)) == (MakeReclaimable, Resolve)


def test_no_step_hashes_a_whole_version_and_what_needs_its_digest_comes_later() -> None:
    bench = Bench("w0", listening=False)
    version, _ = bench.publish(CHUNK * 100)
    receive, now = bench.machine.receive, bench.now
    effects = receive(b"w0", [encode(Fetch(model="a", epoch=EPOCH, version=0))], now)
    assert sent(effects, Announce, "w0")
    assert not sent(effects, End), "it is asked for"
    [wanted] = [e for e in effects if isinstance(e, Hash)]
    assert wanted.version is version
    again = receive(b"w0", [encode(Fetch(model="a", epoch=EPOCH, version=0))], now)
    assert not any(isinstance(e, Hash) for e in again), "it is under way"
    applied = [encode(report(Applied, version))]
    assert receive(b"w0", applied, now) == receive(b"w0", applied, now) == []
    hash_all(version)
    effects = bench.machine.hashed(version, now)
    [end] = sent(effects, End, "w0")
    assert end.digest == digest(version)
    answer = answered(effects)
    assert answer.achieved
    assert version.reclaimable


def test_a_version_that_workers_must_hash_is_lent_when_its_digest_is_known() -> None:
    bench, layout = Bench(), Layout.plan([("w", "U8", (40,))])
    offer, terms = bench.offer(layout, replaces_latest=True), PublishTerms(wait="none", hash=True)
    call, effects = bench.machine.publish(next(ids), offer, terms, 0.0, bench.now)
    version = call.version
    assert Hash(version) in effects
    assert not version.reclaimable
    hash_all(version)
    assert bench.machine.hashed(version, bench.now) == [MakeReclaimable(version)]


def test_a_digest_of_shared_memory_that_is_gone_unhashed_is_believed() -> None:
    bench = Bench("w0")
    bench.where = Shared("/proc/1/fd/3", "0" * 32)
    bench.say("w0", Ping(subscribed=True, shared=True))
    version, _ = bench.publish()
    bench.publish()
    assert version.gone
    assert not version.digest
    running = report(Applied, version, digest="f" * 64)
    assert not notices(bench.say("w0", running), "wrong-digest"), "it hashed what it copied"
    peer = bench.machine.state.roster.by_name("w0")
    assert peer is not None
    assert peer.runs("a") == version.key


def test_who_is_lost_is_owed_nothing_when_a_digest_is_known() -> None:
    bench = Bench("w0", "w1", listening=False)
    version, _ = bench.publish(CHUNK * 100)
    for name in ("w0", "w1"):
        said = [encode(Fetch(model="a", epoch=EPOCH, version=0)), encode(report(Applied, version))]
        for frame in said:
            bench.machine.receive(name.encode(), [frame], bench.now)
    bench.say("w0", Bye())
    hash_all(version)
    effects = bench.machine.hashed(version, bench.now)
    assert {e.to for e in effects if isinstance(e, Send)} == {b"w1"}
    assert (version.end_awaiters, version.unchecked_reports) == (set(), {})


def test_a_version_that_was_lent_is_given_up_while_it_is_being_pushed() -> None:
    """The trainer publishes again, and has all memory but this one's in use."""
    bench = Bench("w0")
    version, _ = bench.publish(CHUNK * 100)
    bench.say("w0", report(Failed, version, code="no", text="not this one"))
    assert version.reclaimable
    effects = bench.machine.make_room("a", [version.snapshot], replaces_latest=True)
    assert effects == [Release(version)]
    perform(bench.machine, effects, bench.now)
    assert bench.push() == []
    newer, _ = bench.publish(CHUNK * 100)
    assert list(bench.machine.state.versions("a")) == [newer]


def test_one_version_is_given_up_for_the_next_the_least_needed_first() -> None:
    bench = Bench("w0", "slow")
    versions = [bench.publish()[0]]
    bench.say("slow", report(Progress, versions[0], chunks=1))
    versions.append(bench.publish(workers=("w0",))[0])
    versions.append(bench.publish(commit="together")[0])
    among = [version.snapshot for version in versions]
    phases = [version.phase for version in versions]
    assert phases == ["latest", "targeted", "pending"]

    def evicted(*, replaces_latest: bool) -> list[Version]:
        effects = bench.machine.make_room("a", among, replaces_latest=replaces_latest)
        return [e.version for e in effects if isinstance(e, Release)]

    assert evicted(replaces_latest=False) == [versions[1]]
    assert evicted(replaces_latest=False) == []
    assert evicted(replaces_latest=True) == [versions[0]]
    assert evicted(replaces_latest=True) == [], "an undecided version is kept"
    assert bench.machine.make_room("b", among, replaces_latest=True) == []


@pytest.mark.parametrize(("second", "kept"), [(True, False), (False, True)])
def test_memory_that_is_read_in_place_is_free_once_there_is_a_newer_version(
    second: bool, kept: bool
) -> None:
    """Else a trainer that waits for nobody has to ask for it; who copies from it holds a lock."""
    bench = Bench("w0", "w1")
    bench.where = Shared("/proc/1/fd/3", "0" * 32)
    bench.say("w0", Ping(subscribed=True, shared=True))
    bench.say("w1", Ping(subscribed=True, shared=second))
    first, _ = bench.publish(wait="none")
    some, _ = bench.publish(workers=("w0",), wait="none")
    assert not first.gone, "what is for some does not replace it"
    bench.publish(wait="none")
    assert (first.gone, some.gone) == (not kept, True)


def test_a_model_that_workers_misspell_is_named_to_both_sides_once() -> None:
    bench = Bench("w0")  # which wants a, as what is published first
    bench.publish()
    bench.model = "policy"
    bench.say("right", hello("right", models={"policy": None}))
    bench.publish()
    bench.say("typo", hello("typo", models={"polcy": None}))
    for name, models in (
        ("other", {"critic": None}),  # it may yet be published
        ("second", {"policy-2": None}),  # so may another of many
        ("both", {"policies": None, "policy": None}),  # who wants both knows them apart
    ):
        bench.say(name, hello(name, models=models))

    def told(seconds: float) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(round(seconds / 0.25)):
            for name in ("w0", "right", "typo", "other", "second", "both"):
                bench.say(name, Ping())
            effects += bench.pass_time(0.25)
        return effects

    assert not notices(told(2.5), "misspelt"), "it may come"
    effects = told(2.0)
    [notice] = notices(effects, "misspelt")
    text = "worker typo wants 'polcy', of which nothing is published: is 'policy' meant?"
    assert (notice.text, notice.warning) == (text, True)
    [refuse] = sent(effects, Refuse)
    assert sent(effects, Refuse, to="typo") == [refuse]
    assert refuse == Refuse(code="no-model", text=text, model="polcy")
    again = told(20.0)
    assert not notices(again, "misspelt") + sent(again, Refuse), "it is told once"


def test_a_publish_of_a_model_that_is_misspelt_says_what_is_wanted() -> None:
    bench = Bench()
    bench.say("w0", hello("w0", models={"policy": None}))
    bench.model = "polcy"
    [notice] = notices(bench.publish()[1], "nobody")
    assert "no worker wants 'polcy', and those that are there want 'policy'" in notice.text
    assert "(is 'policy' meant?)" in notice.text
    effects: list[Effect] = []
    for _ in range(20):
        bench.say("w0", Ping())
        effects += bench.pass_time(0.25)
    assert not notices(effects, "misspelt"), "it was told"
    assert sent(effects, Refuse, to="w0"), "but not to the worker"


def test_a_publish_to_nobody_does_not_hide_who_comes_then_and_misspells() -> None:
    bench = Bench()
    bench.model = "policy"
    [notice] = notices(bench.publish()[1], "nobody")
    assert "no worker has joined" in notice.text
    bench.say("w0", hello("w0", models={"polcy": None}))
    effects: list[Effect] = []
    for _ in range(20):
        bench.say("w0", Ping())
        effects += bench.pass_time(0.25)
    [notice] = notices(effects, "misspelt")
    assert "is 'policy' meant?" in notice.text


def test_who_is_expected_and_came_for_another_model_is_named() -> None:
    bench = Bench()
    bench.say("w0", hello("w0", models={"polcy": None}))
    bench.model = "policy"
    bench.publish(expect=1, seconds=1.0)
    answer = answered(bench.pass_time(1.0))
    wanted = "no worker wants 'policy', and those that are there want 'polcy' (is 'polcy' meant?)"
    assert answer.why == f"1 of 1 workers never came ({wanted})"


def test_a_condition_begins_when_other_workers_meet_it() -> None:
    w0, w1 = Bench("w0", "w1").machine.state.roster
    condition = PersistentCondition()
    assert not condition.held_since({"a": [w0]}, -2.0, 0.0)
    assert not condition.held_since({"a": [w1]}, -1.0, 1.0)
    assert not condition.held_since({"a": [w0, w1]}, 0.0, 2.0)
    assert condition.held_since({"a": [w0, w1]}, 1.0, 3.0) == [("a", [w1])]


@pytest.mark.parametrize("commit", ["auto", "together"])
def test_a_version_that_nobody_ever_applies_is_named_once(
    commit: Literal["auto", "together"],
) -> None:
    bench, told = Bench("w0", "w1", "w2"), list[Notice]()
    version, _ = bench.publish(commit=commit, expect=4, seconds=60)
    for _ in range(10):  # seconds, with a new version every one
        if commit == "auto":
            version, _ = bench.publish(expect=4, seconds=60)
        bench.say("w2", report(Applied, version))
        for _ in range(10):
            for name in ("w0", "w1"):
                bench.say(name, report(Progress, version, chunks=0, phase="staged"))
            bench.say("w2", Ping())
            told += notices(bench.pass_time(0.1), "untaken")
            assert bench.now > 3.0 or not told, "it may be about to"
    if commit == "together":
        assert not told, "they wait for its commit"
        return
    [notice] = told
    assert notice.warning
    assert notice.text.startswith("2 workers (w0, w1) have version 5 of a, and nothing there")


@pytest.mark.parametrize(
    ("chunks", "phase", "words"),
    [
        (1, "receiving", "receiving version 1, 1 of 3 chunks here"),
        (0, "staged", r"staged version 1.*waits for start\(\) or receive\(\) there"),
    ],
)
def test_the_deadline_answers_with_what_each_waits_for(chunks: int, phase: str, words: str) -> None:
    bench = Bench("w0")
    version, _ = bench.publish(seconds=2.0)
    bench.say("w0", report(Progress, version, chunks=chunks, phase=phase))
    assert resolved(bench.pass_time(1.99)) is None
    answer = answered(bench.pass_time(0.01))
    assert not answer.achieved
    worker = answer.receipt.workers["w0"]
    assert (worker.state, worker.seconds) == ("behind", None)
    assert re.search(words, worker.detail)
