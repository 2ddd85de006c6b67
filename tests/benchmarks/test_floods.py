"""Floods do what they say, and whatever breaks a bound is found."""

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from weightbus.benchmarks import floods
from weightbus.benchmarks.attacks import ATTACKS, MIB, Flood, Inside, Strangers
from weightbus.benchmarks.flooded import Setup
from weightbus.benchmarks.floods import Outcome
from weightbus.benchmarks.insiders import Insider
from weightbus.benchmarks.probes import Pongs, joins
from weightbus.benchmarks.victim import Victim
from weightbus.tests.compose.waiting import wait_for

SECONDS = 30.0
STOPPED_SECONDS = 0.4
OPEN = {name: a for name, a in ATTACKS.items() if isinstance(a, Strangers) and not a.keyed}
INSIDE = {name: attack for name, attack in ATTACKS.items() if isinstance(attack, Inside)}
FINE = [0.01] * 200
DEFAULT = Setup()


@pytest.fixture(name="victim", scope="module")
def _victim() -> Iterator[Victim]:
    with Victim(Setup(shape="64KiB/4", workers=1, page=True)) as victim:
        yield victim


@pytest.mark.parametrize("name", OPEN)
def test_strangers_dial_and_say_something(victim: Victim, name: str) -> None:
    attack = OPEN[name]
    assert victim.addresses[attack.channel]
    flood = Flood(attack, victim.addresses[attack.channel])
    deadline = time.monotonic() + SECONDS
    silent = attack.opening is not None and not attack.opening(1)
    try:
        while flood.dialled < min(20, attack.connections) or not (silent or flood.told()["sent"]):
            assert time.monotonic() < deadline, flood.told()
            flood.turn()
        assert not silent or not flood.told()["sent"]
    finally:
        flood.close()


def test_a_flood_is_measured(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floods, "LATER_SECONDS", 0.1)
    outcome = floods.flood(victim, "malformed", 0.3, 1.0, 0)
    assert outcome.wrong == []
    assert outcome.calm
    assert outcome.flooded
    assert outcome.dialled >= ATTACKS["malformed"].connections
    assert outcome.sent > 0
    assert outcome.cpu > 0
    assert outcome.pong > 0
    assert 0 <= outcome.waited <= 1


def test_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floods, "LATER_SECONDS", 0.1)
    with Victim(Setup(shape="64KiB/4", workers=1)) as victim:
        killer = threading.Timer(1.0, os.kill, (victim.pid, signal.SIGKILL))
        killer.start()
        outcome = floods.flood(victim, "idle", 0.1, SECONDS, 0)
    assert len(outcome.wrong) == 1
    assert outcome.wrong[0].endswith("ended with status -9; its last words are above")


def test_a_late_pong_is_found(victim: Victim) -> None:
    with Pongs(victim.addresses["control"]) as pongs:
        wait_for(lambda: pongs.longest, "it is answered", SECONDS)
        os.kill(victim.pid, signal.SIGSTOP)
        threading.Event().wait(STOPPED_SECONDS)
        os.kill(victim.pid, signal.SIGCONT)
        wait_for(lambda: pongs.longest >= STOPPED_SECONDS / 2, "it is late", SECONDS)


def test_who_is_in_has_joined_and_who_is_not_has_not(victim: Victim) -> None:
    assert joins(victim.addresses["control"], "late-0", SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not joins(f"tcp://127.0.0.1:{silent.getsockname()[1]}", "late-1", 0.1)


BROKEN: dict[str, tuple[str, Outcome]] = {
    "peak": ("peak above 64 MiB", Outcome("hellos", DEFAULT, peak=65 * MIB)),
    "large peak": ("peak above 128 MiB", Outcome("chunks", DEFAULT, peak=129 * MIB)),
    "later": ("more than 16 MiB stay", Outcome("hellos", DEFAULT, later=17 * MIB)),
    "pong": ("a pong takes more than 50 ms", Outcome("own-pid", DEFAULT, pong=0.051)),
    "joins": ("1 of 2 joined in 1 s", Outcome("unfinished", DEFAULT, joined=[True, False])),
    "wrong": ("it is wrong", Outcome("hellos", DEFAULT, wrong=["it is wrong"])),
    "waited": (
        "no flood: it waited for a processor 81% of the time",
        Outcome("hellos", DEFAULT, waited=0.81),
    ),
}


@pytest.mark.parametrize(("text", "outcome"), BROKEN.values(), ids=BROKEN)
def test_a_broken_bound_is_named(text: str, outcome: Outcome) -> None:
    outcome.flooded = FINE
    assert floods.misses(outcome, FINE) == [text]


def test_what_keeps_within_its_bounds_has_held() -> None:
    at_most = Outcome("own-pid", DEFAULT, flooded=FINE, peak=64 * MIB, later=16 * MIB, pong=0.05)
    assert floods.misses(at_most, FINE) == []
    hellos = Outcome("hellos", DEFAULT, flooded=FINE, pong=9.0)
    assert floods.misses(hellos, FINE) == [], "of others no pong is bounded"


def test_slow_publishes_and_none_at_all_are_named() -> None:
    slow = Outcome("hellos", DEFAULT, flooded=[0.031] * 200)
    assert floods.misses(slow, FINE) == ["p99 above 3 times calm"]
    assert floods.misses(Outcome("hellos", DEFAULT), FINE) == ["nothing was published"]


def test_a_worker_that_the_log_does_not_tell_of_is_named() -> None:
    unheard = vars(floods)["_unheard"]
    lines = ["worker late-0 joined", "worker late-1 is lost", *itertools.repeat("x", 3)]
    assert unheard(lines, 1) == []
    assert unheard(lines, 2) == ["no word of late-1 in a log of 5 lines"]


@pytest.mark.parametrize("name", INSIDE)
def test_insiders_come_in_and_say_something(victim: Victim, name: str) -> None:
    """It comes last, as what they do may break a publisher for all others."""
    attack, insider = INSIDE[name], Insider(victim.addresses)
    deadline = time.monotonic() + SECONDS
    with closing(insider), closing(attack.act(insider)) as steps:
        for seconds in steps:
            if insider.dialled >= attack.connections and insider.sent > 0:
                break
            assert time.monotonic() < deadline, (insider.dialled, insider.sent)
            threading.Event().wait(min(seconds, 0.2))  # the pace of the attack
