"""A worker that a relay refuses for its later epoch: the publisher above takes one later still."""

from typing import cast

from weightbus.bus.effects import Effect, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import RELAY, Hello, Ping, Pong, Refuse, Running, Welcome
from weightbus.bus.net.publisher_loop import PublisherLoop
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.structs import Message
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.python_client.relay import (
    FIRST_EPOCH,
    _Reports,  # pyright: ignore[reportPrivateUsage]
)
from weightbus.tests.simulation.performing import done

LATER, EPOCH, STARTED_MS, TIMING = 2_000_000, 1_000_000, 1_000_000.0, Timing()


class Line:
    """A publisher whose clock went back, a relay, and a worker that runs a later epoch."""

    def __init__(self, *, age: float) -> None:
        self.now, self.hellos = 1000.0, 0
        self.origin = PublisherMachine(
            PublisherState(EPOCH, "tcp://p:1", age=lambda: age + self.now - 1000.0)
        )
        self.below = PublisherMachine(PublisherState(FIRST_EPOCH, "tcp://r:1", origin=False))
        self.below.follow(EPOCH)
        identity = Hello(name="r", instance="a" * 32, models={}, features=[RELAY])
        self.above = WorkerMachine(identity, ["a"], lambda _m, _l: "", 2**20)
        loop = cast("PublisherLoop", self)
        self.reports = _Reports(self.above, loop, lambda: None, lambda: self.now)
        self.above_does(self.above.connected(self.now))
        self.turn()
        assert self.above.in_session

    def decide(self, how: object) -> None:
        """Have nothing done in the publisher's thread: `turn` follows anyway."""

    def above_does(self, effects: list[Effect]) -> None:
        for effect in done(self.above, effects, self.now):
            if isinstance(effect, Send):
                self.hellos += isinstance(effect.message, Hello)
                for answer in self.hears(self.origin, b"r", effect.message):
                    self.above_does(self.above.receive([encode(answer)], self.now))

    def hears(self, machine: PublisherMachine, who: bytes, message: Message) -> list[Message]:
        sent: list[PublisherEffect] = machine.receive(who, [encode(message)], self.now)
        return [each.message for each in sent if isinstance(each, Send) and each.to == who]

    def worker_says_hello(self) -> Message:
        """Say hello as a worker that runs weights of a publisher which started a minute ago."""
        running = Running(LATER, 3, "0" * 64)
        age_ms = round(60_000 + 1000 * (self.now - 1000.0))
        hello = Hello(
            name="w", instance="b" * 32, models={"a": running}, epoch=LATER, age_ms=age_ms
        )
        answer, *_ = self.hears(self.below, b"w", hello)
        return answer

    def turn(self) -> None:
        """Let both threads of the relay have a turn, and go on for a second."""
        self.above_does(self.reports.send())
        self.reports.collect(self.below, self.now)
        self.above_does(self.reports.send())
        self.now += 1.0


def test_the_publisher_takes_an_epoch_after_that_of_a_worker_behind_a_relay() -> None:
    line = Line(age=10.0)
    answer = line.worker_says_hello()
    assert isinstance(answer, Refuse)
    assert answer.code == "stale-epoch"
    line.turn()
    assert line.origin.state.epoch > LATER
    assert line.above.session.terms.epoch == line.origin.state.epoch
    line.below.follow(line.origin.state.epoch)
    assert isinstance(line.worker_says_hello(), Welcome)


def test_a_publisher_that_is_older_keeps_its_epoch_and_the_relay() -> None:
    line = Line(age=3600.0)
    before = line.hellos
    for _ in range(60):  # the pauses become longer, so a minute has few hellos
        line.worker_says_hello()
        line.turn()
        assert line.above.in_session
    assert line.origin.state.epoch == EPOCH
    assert 2 <= line.hellos - before <= 5
    answers = line.hears(line.origin, b"r", Ping(token=1))
    assert [type(answer) for answer in answers] == [Pong]


def test_a_claim_ends_with_the_worker_that_makes_it() -> None:
    line = Line(age=3600.0)
    line.worker_says_hello()
    line.turn()
    for _ in range(10):
        line.turn()
    before = line.hellos
    for _ in range(60):
        line.turn()
    assert line.hellos == before


def test_a_relay_that_runs_a_later_epoch_itself_is_refused() -> None:
    line = Line(age=3600.0)
    running = Running(LATER, 3, "0" * 64)
    hello = Hello(name="q", instance="c" * 32, models={"a": running}, epoch=LATER, features=[RELAY])
    (answer,) = line.hears(line.origin, b"q", hello)
    assert isinstance(answer, Refuse)
    assert answer.code == "stale-epoch"
