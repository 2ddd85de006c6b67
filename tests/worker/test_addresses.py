"""A worker of several addresses: in which order it tries them, when it waits, when it returns."""

import math
import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest

from weightbus.bus.effects import Effect, Joined, Notice, Probe, Ready, Redial, Refused, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import Bye, Fetch, Hello, Ping, Pong, Refuse, Welcome
from weightbus.bus.publisher import offers
from weightbus.bus.publisher.offers import chunk_of
from weightbus.bus.publisher.version import Version
from weightbus.bus.structs import Message
from weightbus.bus.worker.addresses import RETURN_SECONDS_MAX
from weightbus.bus.worker.events import Probed, Report
from weightbus.bus.worker.machine import WorkerMachine
from weightbus.tests.simulation.performing import done
from weightbus.tests.simulation.virtual_shell import version_of

TIMING = Timing()
SEEDS = 40
TICK = 0.1
Answer = Literal["dead", "mute", "refuses", "closes", "welcomes"]
ANSWERS: tuple[Answer, ...] = ("dead", "mute", "refuses", "closes", "welcomes", "welcomes")


def names(count: int) -> list[str]:
    return [f"tcp://host-{i}:1" for i in range(count)]


class World:
    """A worker, and what answers at each of its addresses."""

    def __init__(self, answers: Sequence[Answer], timing: Timing = TIMING) -> None:
        identity = Hello(name="w", instance="a" * 32, models={}, client="c", host="h", pid=5)
        self.answers: list[Answer] = list(answers)
        self.machine = WorkerMachine(
            identity, ["a"], lambda _m, _l: "", 2**30, timing, None, None, names(len(answers))
        )
        self.now, self.dial_at = 100.0, 100.0
        self.at, self.open = 0, False
        self.epochs = [7] * len(answers)
        self.log: list[tuple[float, Any]] = []  # effects and messages, and when
        self.inbox: list[Message] = []

    @property
    def answer(self) -> Answer:
        return self.answers[self.at]

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in done(self.machine, list(effects), self.now):
            self.log.append((self.now, effect.message if isinstance(effect, Send) else effect))
            match effect:
                case Redial(at, pause, same):
                    assert not same, "these are several"
                    self.at, self.dial_at, self.open = at, self.now + pause, False
                    self.inbox.clear()
                case Probe(at):
                    reached = self.answers[at] != "dead"
                    self.perform(self.machine.happened(Probed(reached), self.now))
                case Send(Hello()) if self.answer == "refuses":
                    self.inbox.append(Refuse(code="name-taken", text="another has the name"))
                case Send(Hello()) if self.answer in ("closes", "welcomes"):
                    self.inbox.append(welcome(self.epochs[self.at]))
                case Send(Ping(token=token)) if self.answer == "welcomes":
                    self.inbox.append(Pong(token=token, epoch=self.epochs[self.at], models={}))
                case _:
                    pass

    def step(self) -> None:
        """A turn of the shell: what its connection does, what has come, and a tick."""
        self.now += TICK
        if not self.open and self.now >= self.dial_at:
            self.open = self.answer != "dead"
            self.machine.changed(self.now)
        if self.now >= self.dial_at and self.answer == "dead":
            self.perform(self.machine.disconnected(self.now))
        elif self.open:
            self.perform(self.machine.connected(self.now))
        while self.inbox:
            self.perform(self.machine.receive([encode(self.inbox.pop(0))], self.now))
            if self.answer == "closes" and self.machine.in_session:
                self.perform(self.machine.disconnected(self.now))
        self.perform(self.machine.tick(self.now))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.step()

    def of(self, *kinds: type) -> list[tuple[float, Any]]:
        return [(now, each) for now, each in self.log if isinstance(each, kinds)]


def welcome(epoch: int = 7) -> Welcome:
    return Welcome(epoch=epoch, data="tcp://d:1", ping_ms=1000, lost_ms=5000, models={})


def test_it_goes_on_in_order_and_waits_after_each_round() -> None:
    world = World(["dead", "dead", "dead"])
    world.run(20)
    dials = [(redial.at, redial.pause) for _, redial in world.of(Redial)]
    assert dials[:6] == [(1, 0), (2, 0), (0, 0.25), (1, 0), (2, 0), (0, 0.25)]
    assert 3 * 20 / (TIMING.hello_retry + 4 * TICK) <= len(dials) <= 3 * 20 / TIMING.hello_retry
    told = [notice.text for _, notice in world.of(Notice)]
    assert len(told) == 3, "later rounds are not logged"
    assert told[0].startswith("from tcp://host-0:1 to tcp://host-1:1, since its connection")


@pytest.mark.parametrize("first", ["dead", "refuses", "mute"])
def test_it_joins_the_next_one(first: Answer) -> None:
    world = World([first, "welcomes"])
    world.run(TIMING.lost_after + 1)
    assert world.machine.in_session
    assert (world.machine.addresses.index, world.machine.addresses.name) == (1, "tcp://host-1:1")
    assert not world.of(Refused), "another address took it"


def test_a_key_that_is_wrong_at_one_address_leads_to_the_next_one() -> None:
    world = World(["mute", "welcomes"])
    world.run(1)
    world.perform(world.machine.handshake_refused("another key", world.now))
    assert world.at == 1
    world.run(1)
    assert world.machine.in_session


def test_a_refusal_is_reported_once_no_address_is_left_and_names_all() -> None:
    world = World(["refuses", "dead"])
    world.run(1)
    refused = [effect for _, effect in world.of(Refused)]
    assert {effect.code for effect in refused} == {"name-taken"}
    assert refused[0].text == (
        "tcp://host-0:1: another has the name; "
        "tcp://host-1:1: its connection closed or cannot be opened"
    )
    world.answers[1] = "welcomes"
    world.run(1)
    before = len(world.of(Refused))
    world.run(1)
    assert len(world.of(Refused)) == before


def version(epoch: int = 7, number: int = 1) -> Version:
    return version_of(number, np.arange(12, dtype=np.uint8), 4, epoch)  # three chunks


def arrive(world: World, of: Version, indices: Sequence[int]) -> list[Effect]:
    """Have chunks of a version arrive on the data channel, and its end after the last one."""
    machine, effects = world.machine, list[Effect]()
    messages: list[tuple[Message, bytes]] = [(offers.announcement(of), of.layout.header)]
    messages += [(message, bytes(data)) for message, data in map(partial(chunk_of, of), indices)]
    for message, payload in messages:
        effects += machine.receive_published([b"a/ctl", encode(message), payload], world.now)
        effects = done(machine, effects, world.now)
    if len(indices) == 3:
        effects += machine.receive_published([b"a/ctl", encode(offers.end_of(of))], world.now)
    return effects


def test_an_older_epoch_turns_it_away_to_the_next_address() -> None:
    world = World(["welcomes", "welcomes", "welcomes"])
    world.run(1)
    (ready,) = [e for e in arrive(world, version(), [0, 1, 2]) if isinstance(e, Ready)]
    for what in ("taken", "applied"):
        world.machine.happened(Report("a", ready.staged.key, what), world.now)
    world.epochs = [7, 6, 7]
    world.answers[0] = "dead"
    world.perform(world.machine.disconnected(world.now))
    world.run(1)
    assert (world.at, world.machine.in_session) == (2, True)
    assert [redial.at for _, redial in world.of(Redial)] == [1, 2]
    assert "later epoch 7" in [notice.text for _, notice in world.of(Notice)][-1]


@pytest.mark.parametrize("epoch", [7, 8])
def test_chunks_that_arrived_are_kept_for_another_publisher_of_the_epoch(epoch: int) -> None:
    world = World(["welcomes", "welcomes"])
    world.epochs[1] = epoch
    world.run(1)
    arrive(world, version(), [0, 1])
    world.answers[0] = "dead"
    world.perform(world.machine.disconnected(world.now))
    world.log.clear()
    world.run(1)
    assert world.machine.in_session
    fetches = [(f.version, f.first, f.count) for _, f in world.of(Fetch) if f.count]
    assert fetches == ([(1, 2, 1)] if epoch == 7 else [])
    arriving = world.machine.followers["a"].versions.find((7, 1), "arriving")
    assert (arriving is not None) == (epoch == 7)


def test_with_one_address_a_connection_that_closes_changes_nothing() -> None:
    world = World(["welcomes"])
    world.run(1)
    assert world.machine.disconnected(world.now) == []
    assert world.machine.in_session


def test_it_probes_the_first_address_and_returns_with_a_goodbye() -> None:
    world = World(["dead", "welcomes"])
    world.run(20)
    joined = world.of(Joined)[0][0]
    probes = [at for at, _ in world.of(Probe)]
    assert len(probes) == 3, "every `lost_after` of a session"
    for i, at in enumerate(probes, 1):
        assert at - joined == pytest.approx(i * TIMING.lost_after, abs=i * 2 * TICK)
    world.answers[0] = "welcomes"
    world.log.clear()
    world.run(TIMING.lost_after + 1)
    kinds = [type(each) for _, each in world.of(Bye, Redial, Joined)]
    assert kinds == [Bye, Redial, Joined], "in this order"
    assert (world.at, world.machine.in_session) == (0, True)
    world.run(60)
    assert world.at == 0
    assert len(world.of(Probe)) == 1, "it is with the first one"


def returns(world: World) -> list[float]:
    """Return the times between two returns."""
    at = [now for now, notice in world.of(Notice) if "answers again" in notice.text]
    return [after - before for before, after in pairwise(at)]


@pytest.mark.parametrize("first", ["mute", "closes"])
def test_a_first_address_that_answers_a_probe_and_no_more_is_tried_less_and_less(
    first: Answer,
) -> None:
    world = World([first, "welcomes"])
    world.run(600)
    pauses = returns(world)
    away = TIMING.lost_after if first == "mute" else 0.0  # until the return has failed
    expected = [min(RETURN_SECONDS_MAX, 2**i * TIMING.lost_after) + away for i in range(1, 8)]
    assert pauses[:6] == pytest.approx(expected[:6], abs=1.0)
    world.answers[0] = "welcomes"
    world.run(RETURN_SECONDS_MAX + TIMING.lost_after + 1)
    assert (world.at, world.machine.in_session) == (0, True)
    world.run(TIMING.lost_after + 1)
    world.answers[0] = "dead"  # after a session that was long enough
    world.perform(world.machine.disconnected(world.now))
    world.log.clear()
    world.run(TIMING.lost_after + 1)
    assert len(world.of(Probe)) == 1, "it waits as little as at first"


def test_a_probe_that_ends_once_the_worker_has_no_session_leads_nowhere() -> None:
    world = World(["dead", "welcomes", "dead"])
    world.run(1)
    assert world.at == 1
    world.answers[1] = "dead"
    world.perform(world.machine.disconnected(world.now))
    assert world.at == 2
    assert world.machine.happened(Probed(reached=True), world.now) == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_the_addresses_do_it_keeps_order_and_pauses(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([2, 2, 3, 5])
    timing = Timing(ping=rng.choice([0.1, 1.0]), lost_after=rng.choice([2.0, 5.0, 70.0]))
    world = World([rng.choice(ANSWERS) for _ in range(count)], timing)
    for _ in range(40):
        world.answers[rng.randrange(count)] = rng.choice(ANSWERS)
        if world.answer == "dead":
            world.open = False
        world.run(rng.choice([0.3, 3.0, 30.0]))
    check_order(world, timing)
    well: Answer = "welcomes"
    world.answers = [well for _ in world.answers]
    world.run(4 * timing.lost_after + 3 * RETURN_SECONDS_MAX)
    assert world.machine.in_session, "all answer, so it is with one"
    assert world.at == 0, "which is the first"


def check_order(world: World, timing: Timing) -> None:
    """Compare what a worker has done with the rule, as it can be read from its log alone."""
    count, least = len(world.answers), max(1.0, timing.lost_after)
    at, entered, joined, tries, pause = 0, 100.0, None, 0, least
    returned, said_bye, probed = False, False, -math.inf
    hellos: dict[int, float] = {}
    for now, each in world.log:
        match each:
            case Hello():
                assert now - hellos.get(at, -math.inf) >= timing.hello_retry - 1e-9
                hellos[at] = now
            case Joined():
                joined, probed = (now if joined is None else joined), now
            case Probe():
                assert at > 0, "it is with the first one"
                assert joined is not None
                assert now - probed >= pause - 1e-9
                assert now - probed < pause + 2.5 * TICK, "it is due"
                probed = now
            case Bye():
                said_bye = True
            case Redial():
                if at == 0 and joined is not None and now - entered > least:
                    pause = least
                elif at == 0 and returned:
                    pause = min(2 * pause, max(RETURN_SECONDS_MAX, least))
                if said_bye:
                    assert (each.at, each.pause, joined is not None) == (0, 0, True)
                    tries = 0
                else:
                    soon = joined is None or now - joined < timing.hello_retry
                    tries = tries + 1 if soon else 0
                    over = tries > 0 and tries % count == 0
                    assert each.at == (at + 1) % count
                    assert each.pause == (timing.hello_retry if over else 0)
                at, entered, joined = each.at, now, None
                returned, said_bye = said_bye, False
            case _:
                pass
