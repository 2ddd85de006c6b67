"""The report that a worker sends on its data connection: `applied`, with a token. (W34, P22)"""

import contextlib
import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest

import weightbus
from weightbus.bus.headers import TOKEN_BYTES, encode, token_of
from weightbus.bus.limits import SUBSCRIPTIONS, Timing
from weightbus.bus.messages import (
    UPSTREAM,
    Applied,
    Bye,
    Failed,
    Hello,
    Ping,
    Progress,
    Refuse,
    Staged,
    Welcome,
)
from weightbus.bus.net.sub import Subscription
from weightbus.bus.net.zmtp import REPORT, Stream, message_parts
from weightbus.bus.publisher.effects import Effect, Resolve
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.structs import Message
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.tests.client.settling import settled
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.net.test_pub_socket import Bench
from weightbus.tests.publisher.test_publisher_machine import Bench as Publishing
from weightbus.tests.publisher.test_publisher_machine import hello, sent
from weightbus.tests.simulation.virtual_shell import perform, version_of

SECONDS = 30.0
VERSION = version_of(1, np.arange(40, dtype=np.uint8), 16, 7)
DONE = Applied(model="a", epoch=7, version=1, digest=VERSION.digest)


class Workers(Publishing):
    """A publisher with some workers, one version of model a, and a clock that stands still."""

    def __init__(self, *names: str, secret: bool = True) -> None:
        super().__init__()
        tokens = (f"{i:0{TOKEN_BYTES}x}" for i in itertools.count(1))
        draw = (lambda: next(tokens)) if secret else None
        self.machine = PublisherMachine(PublisherState(7, "tcp://d:1", Timing(), secret=draw))
        self.tokens = {name: self.join(name) for name in names}
        for name in names:
            self.say(name, Ping(subscribed=True))

    def join(
        self, name: str, instance: str = "0" * 32, features: tuple[str, ...] = (UPSTREAM,)
    ) -> str:
        [welcome] = sent(self.say(name, hello(name, instance, features=[*features])), Welcome)
        return token_of(welcome, UPSTREAM)

    def word(self, token: str, message: Message) -> list[Effect] | None:
        effects = self.machine.receive_report(token.encode() + encode(message), 0.0)
        return None if effects is None else perform(self.machine, effects, 0.0)

    def resolved(self, effects: list[Effect] | None) -> bool:
        return any(isinstance(effect, Resolve) for effect in effects or ())


def test_each_worker_that_can_gets_a_token_of_its_own() -> None:
    workers = Workers("w0", "w1")
    first, second = workers.tokens.values()
    assert first != second
    assert len(first) == len(second) == TOKEN_BYTES
    assert workers.join("w0") == first, "its session goes on, though it says hello again"
    assert workers.join("old", features=()) == ""
    assert Workers("w0", secret=False).tokens == {"w0": ""}


def test_a_word_counts_as_the_same_said_on_the_control_channel() -> None:
    workers = Workers("w0", "w1")
    workers.publish()
    first, second = workers.tokens.values()
    assert not workers.resolved(workers.word(first, DONE))
    assert workers.word(first, DONE) == [], "it says nothing new"
    assert workers.resolved(workers.word(second, DONE))


def test_nobody_else_can_say_it() -> None:
    workers = Workers("w0")
    workers.publish()
    [token] = workers.tokens.values()
    other = f"{int(token, 16) ^ 1:0{TOKEN_BYTES}x}"
    for invalid_frames in (other, "", token[:-1], token.replace("0", "\0"), "g" * TOKEN_BYTES):
        assert workers.word(invalid_frames, DONE) is None
    for message in (Bye(), Ping(), Hello(name="w0", instance="0" * 32, models={})):
        assert workers.word(token, message) is None, "this belongs to the control channel"
    assert workers.machine.receive_report(token.encode() + b"{}", 0.0) is None
    assert workers.machine.receive_report(b"", 0.0) is None
    wrong = Applied(model="a", epoch=7, version=1, digest="0" * 64)
    assert not workers.resolved(workers.word(token, wrong)), "its digest is not the version's"
    assert workers.resolved(workers.word(token, DONE))


def test_a_token_ends_with_who_has_it() -> None:
    workers = Workers("w0")
    workers.publish()
    [token] = workers.tokens.values()
    workers.say("w0", Bye())
    assert workers.word(token, DONE) is None
    assert workers.join("w0", "1" * 32) != token


def test_words_that_come_after_news_of_a_torn_model_have_no_effect() -> None:
    """The two connections have no common order: an earlier report must not count again."""
    workers = Workers("w0")
    workers.publish()
    torn = Failed(model="a", epoch=7, version=1, code="apply", text="no", intact=False)
    workers.say("w0", torn)
    assert workers.word(workers.tokens["w0"], DONE) == []
    assert [status.running for status in workers.machine.status(0.0)] == [{}]
    workers.say("w0", DONE)
    assert [status.running for status in workers.machine.status(0.0)] == [{"a": (7, 1)}]


def test_a_lost_worker_comes_back_by_the_control_channel_alone() -> None:
    workers = Workers("w0")
    workers.publish()
    [token] = workers.tokens.values()
    workers.machine.tick(Timing().lost_after)
    assert workers.word(token, DONE) == []
    [status] = workers.machine.status(Timing().lost_after)
    assert (status.state, status.running) == ("lost", {})


@pytest.mark.parametrize(
    "late",
    [
        Progress(model="a", epoch=7, version=1, chunks=2),
        Staged(model="a", epoch=7, version=1, digest=VERSION.digest),
    ],
)
def test_what_it_overtakes_on_the_way_says_nothing_new(late: Progress | Staged) -> None:
    """Otherwise the worker would seem to work on that version for ever, and to be stuck."""
    workers = Workers("w0")
    workers.publish()
    workers.word(workers.tokens["w0"], DONE)
    workers.say("w0", late)
    [status] = workers.machine.status(0.0)
    assert (status.phase, status.running) == ({}, {"a": (7, 1)})


def test_a_worker_says_what_is_new_upstream_and_repeats_it_on_the_control_channel() -> None:
    machine = WorkerMachine(
        Hello(name="w", instance="0" * 32, models={}), ["a"], lambda _model, _layout: ""
    )
    token = "5" * TOKEN_BYTES

    def welcomed(*features: str) -> str:
        welcome = Welcome(
            epoch=7, data="tcp://d:1", ping_ms=1000, lost_ms=5000, models={}, features=[*features]
        )
        machine.receive([encode(welcome)], 0.0)
        return machine.session.terms.upstream

    assert welcomed() == ""
    assert welcomed("other", f"{UPSTREAM}.{token}") == token
    assert welcomed(UPSTREAM) == ""
    assert welcomed(f"{UPSTREAM}.{token}0") == "", "no token has so many digits"
    assert welcomed(f"{UPSTREAM}.{token}") == token
    unknown = Refuse(code="unknown-worker", text="say hello first")
    machine.receive([encode(unknown)], 0.0)
    assert machine.session.terms.upstream == "", "it was good for that session"


def word(body: bytes) -> bytes:
    return b"".join(map(bytes, message_parts([REPORT + body])))


def test_words_are_taken_in_turns_and_cost_who_forges_them() -> None:
    bench, count = Bench(), 3 * int(SUBSCRIPTIONS.burst)
    told: list[bytes] = []

    def until(done: Callable[[], bool], *, invalid_frames: bool) -> None:
        deadline, pending = time.monotonic() + SECONDS, word(b"t" * 64) * count
        while not done():
            assert time.monotonic() < deadline, "it never came true"
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                pending = pending[connection.send(pending) :] if pending else b""
            bench.process_events()
            while (found := bench.pub_socket.receive_input()) is not None:
                assert len(found.reports) < 64, "no more than one look brings"
                told.extend(found.reports)
                found.subscriber.invalid_frames += len(found.reports) * invalid_frames

    with contextlib.closing(bench):
        connection = bench.knock(b"a/ctl")
        until(lambda: len(told) == count, invalid_frames=False)
        assert set(told) == {b"t" * 64}
        assert bench.wanted(b"a/ctl"), "it has said what is true"
        told.clear()
        until(lambda: not bench.wanted(b"a/ctl"), invalid_frames=True)
        assert len(told) < count


def test_a_publish_ends_by_words_alone_and_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports on the control connection come later; they end a publish if the others are lost."""
    source, copy = np.ones(4, np.float32), np.zeros(4, np.float32)
    quick = weightbus.Settings(ping=0.2)
    with (
        weightbus.Publisher(settings=quick) as publisher,
        weightbus.Subscriber(publisher.address, {"a": {"w": copy}}).start() as subscriber,
    ):
        publisher.wait_for_workers(1, SECONDS)
        taken: list[bytes] = []
        receive = PublisherMachine.receive_report

        def note(self: PublisherMachine, word: bytes, now: float) -> list[Effect] | None:
            taken.append(word)
            return receive(self, word, now)

        def published() -> bool:
            publisher.publish("a", {"w": source}, timeout=SECONDS)
            return bool(taken)

        monkeypatch.setattr(PublisherMachine, "receive_report", note)
        wait_for(published, "a word, once the data connection is open", SECONDS)
        monkeypatch.setattr(Subscription, "send", lambda _self, _body: True)
        receipt = publisher.publish("a", {"w": source}, timeout=SECONDS)
        assert receipt.workers.keys() == {subscriber.name}
        assert not any(b'"version":%d,' % receipt.version in word for word in taken)


def test_who_leaves_has_said_on_the_control_channel_what_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The goodbye may overtake a report on the data connection, which is then ignored."""
    monkeypatch.setattr(Subscription, "send", lambda _self, _body: True)
    slow = weightbus.Settings(
        ping=SECONDS, lost_after=10 * SECONDS
    )  # nothing is repeated meanwhile
    with weightbus.Publisher(settings=slow) as publisher:
        with weightbus.Subscriber(publisher.address, {"a": {"w": np.zeros(4)}}) as subscriber:
            publisher.wait_for_workers(1, SECONDS)
            options = {"require": 1, "timeout": SECONDS}
            future = publisher.publish_async("a", {"w": np.ones(4)}, **settled(options))
            assert subscriber.receive(SECONDS) is not None
        assert future.result(SECONDS).workers[subscriber.name].state == "applied"


def test_what_waits_to_be_sent_is_not_added_to() -> None:
    """A publisher that does not read costs a worker no memory: reports then go by control."""
    subscription = Subscription(lambda _frames, _size: None, lambda: None)
    assert not subscription.send(b"word"), "there is no connection"
    stream = Stream(lambda _frames, _size: None)
    assert not stream.send_if_idle(b"word"), "it has not greeted"
    stream.outgoing.clear()
    stream.state = "open"
    assert stream.send_if_idle(b"word" * 100)
    before = len(stream.outgoing)
    assert not stream.send_if_idle(b"word")
    assert len(stream.outgoing) == before
