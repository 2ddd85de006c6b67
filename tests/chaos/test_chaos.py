"""What breaks a real bus: its plans follow from seeds, and its judges find what they must find."""

import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from weightbus.codecs.delta.encoding import encode
from weightbus.codecs.state import state_of
from weightbus.tests.chaos import onlookers, trainer
from weightbus.tests.chaos.cast import Cast, clock
from weightbus.tests.chaos.child import Child
from weightbus.tests.chaos.content import (
    CHUNK_BYTES,
    LARGE,
    MODELS,
    SMALL,
    Kind,
    expected,
    weights,
)
from weightbus.tests.chaos.faults import FAULTS
from weightbus.tests.chaos.judge import BUSY_SECONDS, Judge, overdue
from weightbus.tests.chaos.leaks import Held
from weightbus.tests.chaos.schedule import (
    KEYED,
    LASTING,
    NOT_RANKED,
    RANKED,
    RANKS,
    RELAYED,
    SHARING,
    Step,
    plan,
)
from weightbus.tests.chaos.soak import growth
from weightbus.tests.chaos.story import Story
from weightbus.tests.cli.starting import python
from weightbus.tests.compose.waiting import wait_for
from weightbus.tests.conformance.driver import Fault
from weightbus.tests.conformance.languages import LANGUAGES

ALL = [language.key for language in LANGUAGES]
SEEDS = range(1, 201)


def test_a_seed_is_one_plan_and_many_meet_everything() -> None:
    plans = [plan(seed, ALL, FAULTS) for seed in SEEDS]
    assert plans == [plan(seed, ALL, FAULTS) for seed in SEEDS]
    found = {step.fault for each in plans for step in each.steps}
    assert found == set(FAULTS) - RELAYED - RANKED
    keyed = [each for each in plans if each.keyed]
    assert len(keyed) == len(SEEDS) / 2
    for some in (keyed, [each for each in plans if not each.keyed]):
        assert {part.language for each in some for part in each.parts} == set(ALL)
    assert not any(s.fault in KEYED for each in plans if not each.keyed for s in each.steps)


def test_the_core_publishes_under_every_fault_that_it_can_have() -> None:
    plans = [plan(seed, ALL, FAULTS, "rust") for seed in SEEDS]
    found = {step.fault for each in plans for step in each.steps}
    assert found == set(FAULTS) - SHARING - RELAYED - RANKED
    assert sum(each.keyed for each in plans) == len(SEEDS) / 2
    assert any(each.watched for each in plans)
    assert not any(each.serves for each in plans)


def test_relays_have_every_fault_that_they_can_have() -> None:
    plans = [plan(seed, ALL, FAULTS, relayed=True) for seed in SEEDS]
    assert {step.fault for each in plans for step in each.steps} == set(FAULTS) - RANKED
    assert {(each.relays, each.keyed) for each in plans} == {
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    }


def test_ranks_have_every_fault_that_they_can_have_and_relays_in_some_rounds() -> None:
    plans = [plan(seed, ALL, FAULTS, ranked=True) for seed in SEEDS]
    assert {step.fault for each in plans for step in each.steps} == set(FAULTS) - NOT_RANKED
    ways = {(each.ranks, each.relays > 0, each.keyed) for each in plans}
    assert ways == {*product(RANKS, (False, True), (False, True))}
    assert not any(each.state for each in plans), "no rank has a whole version"


def test_a_call_of_a_rank_ends_in_time_but_for_what_it_was_stopped() -> None:
    call = {"event": "called", "rank": 1, "limit": 4.0, "seconds": 4.0 + BUSY_SECONDS}
    late = call | {"seconds": 4.5 + BUSY_SECONDS}
    assert not [*overdue([call, {"event": "ready"}], 0.0)]
    assert not [*overdue([late], 1.0)]
    assert len([*overdue([call, late], 0.0)]) == 1


def test_every_fault_lasts_and_says_what_it_is() -> None:
    assert FAULTS.keys() == LASTING.keys()
    for name in ("kill-worker", "few-descriptors", "rival"):
        assert FAULTS[name].__doc__


class Told:
    """A worker that told this."""

    def __init__(self, *events: dict[str, Any], shared: bool = False) -> None:
        self.name, self.options, self._events = "w0", self, events
        self.shared = shared

    def those(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["event"] == kind]


def applied(serial: int, version: int, model: str = SMALL, **more: Any) -> dict[str, Any]:
    content = expected(model, serial, "mixed")
    told = {"epoch": 1, "version": version, "digest": content.digest, "tensors": content.crcs}
    return {"event": "applied", "model": model, **told, **more}


def receipt(serial: int, version: int, **more: Any) -> dict[str, Any]:
    digest = expected(SMALL, serial, "mixed").digest
    key = {"model": SMALL, "epoch": 1, "version": version, "digest": digest}
    return {"event": "receipt", "serial": serial, **key, "achieved": True, "together": False} | more


def mixed(one: int, other: int) -> dict[str, int]:
    crcs = dict(expected(SMALL, one, "mixed").crcs)
    return crcs | {"b": expected(SMALL, other, "mixed").crcs["b"]}


UNPATCHED: dict[str, Any] = {"offered": ["w0"], "ways": {"w0": "raw"}}
WHY = {"event": "unpatched", "worker": "w0", "model": SMALL, "version": 1, "why": "no memory"}


@pytest.mark.parametrize(
    ("events", "told", "found"),
    [
        ([receipt(5, 1)], [applied(5, 1), applied(6, 2)], ""),
        ([], [applied(5, 1, digest="")], "digest"),
        ([], [applied(5, 1, tensors=mixed(5, 6))], "not a version that was published"),
        ([], [applied(9, 1)], "not a version that was published"),
        ([receipt(6, 1)], [applied(5, 1)], "others as [6]"),
        ([receipt(5, 1, digest="0" * 64)], [], "the receipt of"),
        ([], [applied(5, 2), applied(6, 1)], "after"),
        ([receipt(5, 1, together=True, states={"w0": "behind"})], [applied(5, 1)], "aborted"),
        ([receipt(5, 1, together=True, states={"w0": "failed"})], [applied(5, 1)], ""),
        ([receipt(5, 1, **UNPATCHED)], [], "though there was a patch"),
        ([WHY, receipt(5, 1, **UNPATCHED)], [], ""),
        ([receipt(5, 1, offered=["w0"], ways={"w0": "delta-1", "w1": "raw"})], [], ""),
    ],
)
def test_the_judge(events: list[Any], told: list[Any], found: str) -> None:
    judge = Judge("mixed")
    serials = [{"event": "serial", "model": SMALL, "serial": serial} for serial in (5, 6)]
    driver: Any = Told(*told)
    faults = "\n".join([*judge.hear([*serials, *events]), *judge.faults(driver)])
    assert (found in faults) if found else not faults


def test_bytes_of_a_reader_count_where_each_version_has_one() -> None:
    torn: Any = Told({"event": "torn", "model": SMALL, "bytes": [1, 2]})
    assert [*Judge("even").faults(torn)]
    assert not [*Judge("mixed").faults(torn)]


def test_what_an_observer_is_told_must_have_run() -> None:
    driver: Any = Told(applied(5, 1))
    claims = {("w0", SMALL, 1, 1), ("w0", SMALL, 1, 2), ("w0", SMALL, 0, 0), ("w1", SMALL, 1, 3)}
    assert len([*Judge("even").claims(claims, {"w1"}, [driver])]) == 1


@pytest.mark.parametrize("kind", ["mixed", "trained"])
def test_no_two_serials_and_no_two_tensors_are_alike(kind: Kind) -> None:
    for model in MODELS:
        one, other = (expected(model, serial, kind).crcs for serial in (1, 2))
        assert not set(one.values()) & set(other.values())


def test_a_patch_is_small_where_few_bytes_change() -> None:
    one, other = (weights(LARGE, serial, "trained") for serial in (1, 2))
    layout = state_of(one).layout()
    old, new = (b"".join(w[s.name].tobytes() for s in layout.tensors) for w in (one, other))
    assert CHUNK_BYTES < len(encode(layout, old, new)) < len(old) / 8


def test_a_source_that_differs_from_the_workers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    truth: onlookers.Runs = {("w0", SMALL): (1, 7), ("w0", LARGE): (1, 8)}
    calm = {"running": {"w0": {SMALL: [1, 7], LARGE: [1, 8]}}}
    states = {"states": {"w0": "applied"}, "epoch": 1}
    receipts = [{"model": SMALL, "version": 7, **states}, {"model": LARGE, "version": 8, **states}]
    for which in ("_roster", "_status", "_page", "_metrics", "of_workers"):
        monkeypatch.setattr(onlookers, which, lambda *_: dict(truth))
    plan_facts = {"watched": True, "serves": True}
    facts = {"plan": type("Plan", (), plan_facts), "workers": {"w0"}}
    cast: Any = type("Cast", (), facts)
    looking: Any = None
    assert not [*onlookers.disagreements(cast, calm, receipts, looking)]
    old: Callable[[Any], onlookers.Runs] = lambda _: truth | {("w0", SMALL): (1, 6)}  # noqa: E731
    monkeypatch.setattr(onlookers, "_metrics", old)
    found = onlookers.disagreements(cast, calm, receipts, looking)
    assert [source.split(",")[0] for source in found] == ["the metrics"]


class Played:
    """A process of a round: it lives, is killed, or has ended by itself with these words."""

    def __init__(self, name: str, *events: dict[str, Any], words: str = "") -> None:
        self.name, self.events, self._words = name, [*events], words
        self.alive = not words

    def those(self, _kind: str) -> list[dict[str, Any]]:
        return [{"address": ""}]

    def wait(self, _: str) -> None: ...

    def order(self, _: str) -> None: ...

    def kill(self) -> None:
        self.alive = False

    def status(self) -> int:
        return -6

    def story(self) -> str:
        return self._words


PUBLISHES = """
import json, sys
told = {"address": "tcp://a", "data_address": "tcp://b", "epoch": 1}
print(json.dumps({"event": "bound"} | told), flush=True)
for line in sys.stdin:
    if "large" in line:
        sys.exit(line)
"""


def a_child(tmp_path: Path, code: str) -> Child:
    told = trainer.Told(
        life=0,
        kind="mixed",
        pace=0.01,
        together=False,
        shared=False,
        queue=1,
        keys="",
        state="",
        advertise="tcp://*:1",
        watched=False,
        publisher=[sys.executable, "-S", "-c", code],
        folder=str(tmp_path),
    )
    return Child(told, Story(), tempfile.TemporaryFile("w+"), {})


def test_a_publisher_in_another_process_is_the_one_that_is_killed(tmp_path: Path) -> None:
    child = a_child(tmp_path, PUBLISHES)
    try:
        publisher = child.wait("ready")["pid"]
        assert b"bound" in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        child.send(signal.SIGSTOP)
        child.kill()
        assert not child.alive
        assert "status -9" in child.story()
        assert not Path(f"/proc/{publisher}").exists()
    finally:
        child.close()


def test_a_publisher_in_another_process_that_ends_is_missed(tmp_path: Path) -> None:
    child = a_child(tmp_path, PUBLISHES)
    try:
        child.wait("ready")
        child.order("go")
        wait_for(lambda: not child.alive, "the end of the trainer", 60)
        assert "ended with status 1" in child.story()
    finally:
        child.close()


def a_cast(tmp_path: Path, *publishers: Played) -> Any:
    quiet = replace(plan(2, ["python"], ["reset"]), kind="mixed")
    wire: Any = None
    cast: Any = Cast(quiet, {}, tmp_path, tmp_path, Path(), wire, threading.Condition())
    cast.publishers = [*publishers]
    cast.publisher = publishers[-1]
    return cast


@pytest.mark.parametrize("fault", ["kill-publisher", "no-segments", "rival", "kill-worker"])
def test_who_ended_by_itself_is_not_killed_as_if_it_lived(tmp_path: Path, fault: str) -> None:
    step = Step(0.0, fault, 0.0, 0, "both", 0.1)
    dead = Played("w0", words="Segmentation fault")
    cast = a_cast(tmp_path, Played("publisher 0") if fault == "kill-worker" else dead)
    cast.workers = {part.name: dead for part in cast.plan.parts}
    cast.drivers = [dead]
    with pytest.raises(Fault, match="ended by itself"):
        FAULTS[fault](cast, step)


def test_what_we_killed_has_not_ended_by_itself(tmp_path: Path) -> None:
    first, step = Played("publisher 0"), Step(0.0, "kill-publisher", 0.0, 0, "both", 0.1)
    cast = a_cast(tmp_path, first)
    FAULTS["kill-publisher"](cast, step)
    FAULTS["kill-publisher"](cast, step)  # while it has not been started again
    assert not cast.fallen


def test_of_two_publishers_the_older_one_may_not_end_by_itself(tmp_path: Path) -> None:
    first = Played("publisher 0")
    cast = a_cast(tmp_path, first)
    cast.wire = type("Wire", (), {"reset": lambda *_: 0})()
    cast.publish = lambda **_: Played("publisher 1")
    end = FAULTS["rival"](cast, Step(0.0, "rival", 0.0, 0, "both", 0.1))
    first.kill()
    with pytest.raises(Fault, match="publisher 0 has ended by itself"):
        end()


def test_whoever_was_started_again_may_not_end_by_itself(tmp_path: Path) -> None:
    cast, step = a_cast(tmp_path, Played("p")), Step(0.0, "kill-worker", 0.0, 0, "both", 0.1)
    name = cast.part(0).name
    cast.drivers = [Played(name), Played(name, words="Segmentation fault")]
    cast.workers = {name: cast.drivers[0]}
    end = FAULTS["kill-worker"](cast, step)
    cast.workers = {name: cast.drivers[1]}
    with pytest.raises(Fault, match="ended by itself"):
        end()


MIXED = applied(5, 1, tensors=mixed(5, 6))


def test_whoever_looks_on_does_not_end_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(onlookers, "observer", broken)
    cast: Any = type("Cast", (), {"publisher": None})
    watcher = onlookers.Watcher(cast)
    with pytest.raises(ZeroDivisionError):
        watcher.end()


def test_what_grows_is_found() -> None:
    flat = [Held(10, 2, 5, 1000 + at % 3) for at in range(100)]
    assert not [*growth("x", flat)]
    for growing in (
        [Held(10 + at // 50, 2, 5, 1000) for at in range(100)],
        [Held(10, 2, 5 + at // 50, 1000) for at in range(100)],
        [Held(10, 2, 5, 1000 + at) for at in range(100)],
    ):
        assert len([*growth("x", growing)]) == 1


@pytest.mark.skipif(
    shutil.which("cc") is None and not os.environ.get("CI"), reason="there is no compiler for C"
)
def test_clocks_jump_while_processes_run(tmp_path: Path) -> None:
    ahead = tmp_path / "ahead"
    ahead.write_bytes(struct.pack("q", 0))
    code = (
        "import time, pathlib, struct; a = time.time(), time.monotonic();"
        f"pathlib.Path({str(ahead)!r}).open('r+b').write(struct.pack('q', 3600));"
        "print(round((time.time() - a[0]) / 3600), time.monotonic() - a[1] < 60)"
    )
    found = {"LD_PRELOAD": str(clock(tmp_path)), "WEIGHTBUS_CHAOS_CLOCK": str(ahead)}
    assert python("-c", code, env=os.environ | found).stdout.split() == ["1", "True"]
