"""A publisher and a relay of it, as one process of a small world: workers are at the relay.

What is on its way between the two is part of the process, and arrives in order. `Relay`'s own code
couples the relay's machines; its threads take turns here.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from weightbus.bus.effects import Connect, Effect, Notice, Ready, Send, Subscribe
from weightbus.bus.headers import encode
from weightbus.bus.messages import RELAY, Hello
from weightbus.bus.net.publisher_loop import PublisherLoop
from weightbus.bus.net.ready_queue import ReadyQueue
from weightbus.bus.publisher.effects import Broadcast, Hash, Settled
from weightbus.bus.publisher.effects import Effect as PublisherEffect
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.reporting import BelowReports
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.staged import StagedVersion
from weightbus.bus.worker.events import Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.python_client.relay import (
    FIRST_EPOCH,
    _Forwarder,  # pyright: ignore[reportPrivateUsage]
    _Reports,  # pyright: ignore[reportPrivateUsage]
)
from weightbus.tests.exploring.sides import (
    MODEL,
    TIMING,
    Did,
    Event,
    PublisherSide,
    Unlimited,
    label_of,
    takes_all,
)
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import perform

NAME, IDENTITY = "r", b"r"
TURNS_MAX = 20  # turns of both threads of a relay after which they must be at rest


class Queue:
    """The queue between a relay's worker and what takes its versions."""

    def __init__(self) -> None:
        self.versions: list[StagedVersion] = []

    @property
    def filled(self) -> bool:
        return bool(self.versions)

    def take(self, _timeout: float) -> StagedVersion | None:
        return self.versions.pop(0) if self.versions else None


class Uncounted:
    """Counts nothing."""

    def __getitem__(self, _model: str) -> int:
        return 0

    def __setitem__(self, _model: str, _count: int) -> None:
        pass


class Always:
    """A token bucket that is never empty."""

    def take(self, _units: float, _now: float) -> bool:
        return True


def _nothing(*_: object) -> None:
    pass


class RelayedSide(PublisherSide):
    """A publisher, a relay, and the connection between both."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch, patched=False)
        self.now, self.instance = 0.0, 0
        self.restart()

    def restart(self) -> None:
        """Start the relay anew, without versions."""
        self.instance += 1
        self.up: list[bytes] = []  # on its way to the publisher
        self.down: list[tuple[Any, ...]] = []  # on its way to the relay
        identity = Hello(name=NAME, instance=f"{self.instance:032x}", models={}, features=[RELAY])
        self.above = WorkerMachine(identity, [MODEL], takes_all, timing=TIMING)
        self.above._whole = bytearray()  # noqa: SLF001 # pyright: ignore - for leases alone
        self.topics: frozenset[bytes] = frozenset()
        state = PublisherState(FIRST_EPOCH, "tcp://r:1", TIMING, origin=False)
        self.below = PublisherMachine(state)
        observers: Any = self.below.observers
        observers._rows = Always()  # noqa: SLF001
        self.below._limits = Unlimited()  # type: ignore[assignment]  # noqa: SLF001 # pyright: ignore
        self.queue, self.outcomes = Queue(), list[Report]()
        self.decisions: list[Callable[[PublisherMachine, float], list[PublisherEffect]]] = []
        loop = cast("PublisherLoop", self)
        ready = cast("ReadyQueue", self.queue)
        self.passes_on = _Forwarder(self.above, ready, loop, lambda: "", clock=self.clock)
        self.passes_on.report_by(self.reported)
        passes_on: Any = self.passes_on
        passes_on._notify_of_session, passes_on._lost_at = _nothing, None  # noqa: SLF001
        passes_on._received = Uncounted()  # noqa: SLF001
        self.reports = _Reports(self.above, loop, _nothing, self.clock)
        reports: Any = BelowReports(self.below)
        reports._at_once = Always()  # noqa: SLF001
        self.reports._reports = reports  # noqa: SLF001 # pyright: ignore

    def clock(self) -> float:
        """Return the time of the world."""
        return self.now

    def decide(self, how: Callable[[PublisherMachine, float], list[PublisherEffect]]) -> None:
        """Do as `PublisherLoop`."""
        self.decisions.append(how)

    def reported(self, report: Report) -> None:
        """Do as `WorkerLoop.tell`."""
        self.outcomes.append(report)

    @property
    def on_way(self) -> str:
        """What arrives next between the publisher and the relay."""
        return "down" if self.down else "up" if self.up else ""

    def act(self, event: Event, now: float) -> list[Did]:
        """Take an event: workers are at the relay, the trainer is at the publisher."""
        self.now, did = now, list[Did]()
        match event:
            case ("hear", identity, frames):
                self.tells(self.below.receive(identity, frames, now), did)
            case ("unreachable", identity):
                self.tells(self.below.unreachable(identity, now), did)
            case ("subscribed", topic):
                beacon = self.below.subscribed(topic)
                did += [("greet", topic, encode(beacon))] if beacon is not None else []
            case ("carry", "up"):
                did += self.origin(("hear", IDENTITY, (self.up.pop(0),)), now)
            case ("carry", _):
                published, *frames = self.down.pop(0)
                hear = self.above.receive_published if published else self.above.receive
                self.does(hear(frames, now))
            case ("cut",):
                self.up, self.down, self.topics = [], [], frozenset()
                self.above.changed(now)
                did += self.origin(("unreachable", IDENTITY), now)
            case ("restart relay",):
                self.restart()
                did += self.origin(("unreachable", IDENTITY), now)
            case ("tick",):
                did += self.origin(event, now)
                self.does(self.above.tick(now))
                self.does(self.above.connected(now))
                self.tells(self.below.tick(now), did)
            case _:
                did += self.origin(event, now)
        self.turn(did)
        return did

    def origin(self, event: Event, now: float) -> list[Did]:
        """Take an event at the publisher; put on its way what it says to the relay."""
        left = list[Did]()
        for each in super().act(event, now):
            match each:
                case ("tell", _, frames):
                    self.down.append((False, *frames))
                case ("tell-all", topic, frames):
                    if topic in self.topics:
                        self.down.append((True, *frames))
                case _:
                    left.append(each)
        return left

    def does(self, effects: list[Effect]) -> None:
        """Do what the relay's worker wants."""
        for effect in done(self.above, effects, self.now, takes=lambda n: np.zeros(n, np.uint8)):
            match effect:
                case Send(message):
                    self.up.append(encode(message))
                case Connect():
                    self.topics = frozenset()
                case Subscribe(topic, on):
                    self.topics = self.topics | {topic} if on else self.topics - {topic}
                case Ready(staged):
                    assert label_of(staged.data) > 0, f"{staged.key} is torn"
                    self.queue.versions.append(staged)
                case _:
                    pass

    def tells(self, effects: list[PublisherEffect], did: list[Did]) -> None:
        """Do what the relay's publisher wants."""
        for effect in effects:
            for each in perform(self.below, [effect], self.now):
                match each:
                    case Send() | Broadcast():
                        self.say(each, did)
                    case Notice():
                        observers: Any = self.below.observers
                        observers.happened(each, self.now)
                        observers._events.clear()  # noqa: SLF001
                    case Settled() | Hash():
                        raise AssertionError(f"a relay does {each}")
                    case _:
                        pass

    def turn(self, did: list[Did]) -> None:
        """Let both threads of the relay have turns, until they are at rest."""
        for _ in range(TURNS_MAX):
            self.does([*self.passes_on(), *self.reports.send()])
            work, self.outcomes[:] = [*self.outcomes], []
            for report in work:
                self.does(self.above.happened(report, self.now))
            decisions, self.decisions[:] = [*self.decisions], []
            for how in decisions:
                self.tells(how(self.below, self.now), did)
            while self.below.ready:
                self.tells(self.below.push(self.now), did)
            self.reports.collect(self.below, self.now)
            if not (work or decisions or self.reports._outgoing):  # noqa: SLF001 # pyright: ignore
                return
        raise AssertionError("the relay's threads give each other work for ever")
