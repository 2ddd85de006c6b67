"""Workers behind relays: what the relays report, and what the publisher makes of the reports."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.bus.effects import Notice, Send
from weightbus.bus.headers import encode
from weightbus.bus.limits import Timing
from weightbus.bus.messages import (
    RELAY,
    Abort,
    Announce,
    Applied,
    Below,
    Bye,
    Commit,
    Doing,
    Failed,
    Fetch,
    Hello,
    Ping,
    Progress,
    Refuse,
    Running,
    Staged,
    Welcome,
    WorkerRow,
)
from weightbus.bus.protocol_limits import NAMED_MAX, RELAYS_MAX
from weightbus.bus.publisher import reporting
from weightbus.bus.publisher.effects import Effect, Resolve
from weightbus.bus.publisher.machine import PublisherMachine
from weightbus.bus.publisher.publication import PublishTerms
from weightbus.bus.publisher.reporting import COMPARED_MAX, BelowReports
from weightbus.bus.publisher.state import PublisherState
from weightbus.bus.publisher.version import VersionOffer
from weightbus.bus.structs import Message
from weightbus.codecs.layout import Layout
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, hash_all, perform

EPOCH, NBYTES = 7, 40
REPORT_SECONDS = 1.01 * reporting.REPORT_SECONDS
LAYOUT = Layout.plan([("w", "U8", (NBYTES,))])
numbers = itertools.count()


def instance(name: str) -> str:
    return name.encode().hex().rjust(32, "0")[-32:]


class Node:
    """A publisher's machine; with a name, the one of a relay."""

    def __init__(self, name: str = "") -> None:
        self.name, self.now = name, 100.0
        state = PublisherState(EPOCH, "tcp://d:1", Timing(), origin=not name)
        self.machine = PublisherMachine(state)
        self.reports = BelowReports(self.machine) if name else None
        self.notices: list[Notice] = []
        self.sent = 0  # messages of reports so far

    def say(self, name: str, message: Message) -> list[Effect]:
        effects = self.machine.receive(name.encode(), [encode(message)], self.now)
        return self.perform(effects)

    def perform(self, effects: list[Effect]) -> list[Effect]:
        done = perform(self.machine, effects, self.now)
        for each in done:
            if isinstance(each, Notice):
                self.machine.observers.happened(each, self.now)
                self.notices.append(each)
        return done

    def joins(self, name: str, *, of: str = "") -> list[Effect]:
        hello = Hello(name=name, instance=instance(of or name), models={"a": None})
        return self.say(name, hello)

    def offers(
        self, number: int, *, together: bool = False, only: Sequence[str] = ()
    ) -> list[Effect]:
        """Pass on the version of this number."""
        terms = PublishTerms(commit="together" if together else "auto")
        offer = replace_key(offer_of(number), (EPOCH, number))
        offer.terms = offer.terms._replace(commit=terms.commit)
        offer.only = frozenset(only) or None
        return self.perform(self.machine.pass_on(offer, self.now)[1])

    def applies(self, name: str, number: int) -> None:
        version = self.machine.state.store["a"].find(number)
        assert version is not None
        digest = version.chunks.digest
        self.say(name, Applied(model="a", epoch=EPOCH, version=number, digest=digest))

    def stages(self, name: str, number: int) -> None:
        version = self.machine.state.store["a"].find(number)
        assert version is not None
        digest = version.chunks.digest
        self.say(name, Staged(model="a", epoch=EPOCH, version=number, digest=digest))

    def publishes(self, **terms: Any) -> list[Effect]:
        offer = offer_of(self.machine.state.versions("a")._count + 1)  # noqa: SLF001 # pyright: ignore
        call, effects = self.machine.publish(
            next(numbers), offer, PublishTerms(**terms), self.now, self.now
        )
        self.call = call
        return self.perform(effects)

    def rows(self) -> dict[str, tuple[bool, tuple[str, ...], tuple[int, int]]]:
        """Return what this node knows of each worker: lost, relays and running version."""
        return {p.name: (p.lost, p.through, p.runs("a")) for p in self.machine.state.roster}


def offer_of(number: int) -> VersionOffer:
    data = np.full(NBYTES, number, np.uint8)
    offer = VersionOffer.of("a", LAYOUT, 16, PlainSnapshot(data))
    hash_all(offer)
    return offer


def replace_key(offer: VersionOffer, key: tuple[int, int]) -> VersionOffer:
    offer.key = key
    return offer


@dataclass
class Link:
    """The session of a relay with the node above."""

    above: Node
    below: Node

    def opens(self) -> None:
        """Begin a session, with a whole report."""
        hello = Hello(
            name=self.below.name,
            instance=instance(self.below.name),
            models={"a": None},
            features=[RELAY],
        )
        sent = self.above.say(self.below.name, hello)
        welcome = next(
            e.message for e in sent if isinstance(e, Send) and isinstance(e.message, Welcome)
        )
        assert RELAY in welcome.features
        assert self.below.reports is not None
        self.below.reports.begin()
        self.passes()

    def passes(self, seconds: float = 0.0) -> list[Effect]:
        """Let time pass, and pass on what is due."""
        assert self.below.reports is not None
        found = list[Effect]()
        for later in (0.0, seconds):
            self.below.now += later
            self.above.now = max(self.above.now, self.below.now)
            for message in self.below.reports.due(EPOCH, self.below.now):
                self.below.sent += 1
                found += self.above.say(self.below.name, message)
        return found


def tree(*names: str) -> tuple[Node, Node, Link]:
    """Return an origin, a relay with workers of these names, and the link between both."""
    origin, relay = Node(), Node("r")
    link = Link(origin, relay)
    link.opens()
    for name in names:
        relay.joins(name)
    link.passes(REPORT_SECONDS)
    return origin, relay, link


def behind(relay: Node, link: Link, name: str) -> tuple[Node, Link]:
    """Return relay s behind a relay, with a worker of this name, and the link between both."""
    inner = Node("s")
    inner_link = Link(relay, inner)
    inner.now = relay.now
    inner_link.opens()
    inner.joins(name)
    inner_link.passes()
    link.passes(REPORT_SECONDS)
    return inner, inner_link


def announcements(effects: Iterable[Effect]) -> list[Any]:
    return [e for e in effects if isinstance(e, Send) and isinstance(e.message, Announce)]


def resolved(effects: Iterable[Effect]) -> Resolve:
    return next(effect for effect in effects if isinstance(effect, Resolve))


def test_a_call_waits_for_the_workers_behind_a_relay_and_not_for_the_relay() -> None:
    origin, relay, link = tree("x", "y")
    assert origin.machine.count_workers("a") == 2
    assert not [e for e in origin.publishes() if isinstance(e, Resolve)]
    relay.offers(1)
    relay.applies("x", 1)
    assert not [e for e in link.passes(REPORT_SECONDS) if isinstance(e, Resolve)]
    relay.applies("y", 1)
    result = resolved(link.passes())
    assert result.achieved
    states = {name: (w.state, w.through) for name, w in result.receipt.workers.items()}
    assert states == {"x": ("applied", ("r",)), "y": ("applied", ("r",))}


def test_a_worker_that_fails_behind_a_relay_fails_the_call() -> None:
    origin, relay, link = tree("x")
    origin.publishes()
    relay.offers(1)
    relay.say("x", Failed(model="a", epoch=EPOCH, version=1, code="apply", text="no such tensor"))
    result = resolved(link.passes())
    assert not result.achieved
    assert "apply: no such tensor" in result.receipt.workers["x"].detail


def test_a_commit_waits_for_the_workers_behind_a_relay() -> None:
    origin, relay, link = tree("x", "y")
    origin.publishes(commit="together", require=2, wait="staged")
    relay.offers(1, together=True)
    digest = origin.call.version.chunks.digest
    origin.say("r", Staged(model="a", epoch=EPOCH, version=1, digest=digest))
    relay.stages("x", 1)
    assert origin.call.decision == "open"
    link.passes(REPORT_SECONDS)
    assert origin.call.decision == "open", "one of two"
    relay.stages("y", 1)
    commits = [e for e in link.passes() if isinstance(e, Send) and isinstance(e.message, Commit)]
    assert [commit.to for commit in commits] == [b"r"]
    decision: str = origin.call.decision
    assert decision == "commit"


@pytest.mark.parametrize("together", [False, True])
def test_a_named_worker_that_moves_gets_its_version_at_its_new_relay(*, together: bool) -> None:
    origin, relay, _ = tree("x")
    other = Node("t")
    other_link = Link(origin, other)
    other_link.opens()
    terms: dict[str, Any] = {"commit": "together", "require": 1} if together else {}
    (announce,) = announcements(origin.publishes(workers=("x",), **terms))
    assert announce.to == b"r"
    other.now = relay.now + 1.0
    other.joins("x")
    other_link.passes(REPORT_SECONDS)
    assert origin.rows()["x"] == (False, ("t",), (0, 0))
    ping = Ping(token=1)
    (announce,) = announcements(origin.say("t", ping))
    assert (announce.to, announce.message.workers) == (b"t", ["x"])
    assert not announcements(origin.say("r", ping)), "it is not behind that one any more"
    origin.say("t", Progress(model="a", epoch=EPOCH, version=1, phase="receiving", chunks=1))
    assert not announcements(origin.say("t", ping)), "it arrives there"
    origin.now += Timing().lost_after
    assert announcements(origin.say("t", ping)), "the relay may have dropped it"
    other.offers(1, only=["x"], together=together)
    digest = origin.call.version.chunks.digest
    if together:
        origin.say("t", Staged(model="a", epoch=EPOCH, version=1, digest=digest))
        assert not announcements(origin.say("t", ping))
        other.stages("x", 1)
        other_link.passes(REPORT_SECONDS)
        assert origin.call.decision == "commit"
    origin.say("t", Applied(model="a", epoch=EPOCH, version=1, digest=digest))
    other.applies("x", 1)
    receipt = resolved(other_link.passes(REPORT_SECONDS)).receipt
    assert (receipt.workers["x"].state, receipt.workers["x"].through) == ("applied", ("t",))
    assert not announcements(origin.say("t", ping))


def test_a_relay_gets_the_versions_that_its_named_workers_lack_one_after_the_other() -> None:
    origin, _, _ = tree("x", "y", "z")
    (announce,) = announcements(origin.publishes(workers=("x",)))
    assert announce.message.version == 1
    assert not announcements(origin.publishes(workers=("y",))), "the relay would drop the first"
    assert not announcements(origin.publishes(workers=("z",)))
    (announce,) = announcements(origin.say("r", Ping(token=1)))
    assert announce.message.version == 1
    digest = origin.machine.state.store["a"].known_digest(1)
    assert digest is not None
    applied = origin.say("r", Applied(model="a", epoch=EPOCH, version=1, digest=digest))
    (announce,) = announcements(applied)
    assert announce.message.version == 2
    origin.say("r", Failed(model="a", epoch=EPOCH, version=2, code="too-large", text="no room"))
    (announce,) = announcements(origin.say("r", Ping(token=2)))
    assert announce.message.version == 3, "the relay cannot take the second"


def test_a_version_for_named_workers_reaches_those_behind_relays_and_no_others() -> None:
    origin, relay, link = tree("x", "y")
    inner, inner_link = behind(relay, link, "z")
    origin.publishes()
    relay.offers(1)
    inner.offers(1)
    (announce,) = announcements(origin.publishes(workers=("x", "z")))
    assert (announce.to, announce.message.workers) == (b"r", ["x", "z"])
    fetched = origin.say("r", Fetch(model="a", epoch=EPOCH, version=2, layout=True))
    assert [a.message.workers for a in announcements(fetched)] == [["x", "z"]]
    below = relay.offers(2, only=announce.message.workers)
    found = {a.to: a.message.workers for a in announcements(below)}
    assert found == {b"x": [], b"s": ["z", "x"]}, "those behind it first"
    assert {a.to for a in announcements(inner.offers(2, only=["z"]))} == {b"z"}
    relay.applies("x", 2)
    inner.applies("z", 2)
    inner_link.passes()
    receipt = resolved(link.passes(REPORT_SECONDS)).receipt  # y has an older version
    assert receipt.in_state("applied") == ["x", "z"]
    assert [*receipt.workers] == ["x", "z"]


def test_too_many_named_workers_behind_a_relay_are_refused() -> None:
    names = tuple(f"w{n}" for n in range(NAMED_MAX + 1))
    origin, _relay, _link = tree(*names)
    with pytest.raises(ValueError, match="behind relay r: name at most"):
        origin.publishes(workers=names)


def test_an_abort_reaches_the_relay() -> None:
    origin, _relay, _link = tree("x")
    origin.publishes(commit="together", timeout=1.0)
    origin.now += 2
    effects = origin.perform(origin.machine.tick(origin.now))
    aborts = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Abort)]
    assert [abort.to for abort in aborts] == [b"r"]


def test_the_workers_of_a_lost_relay_are_lost_until_they_come_through_another() -> None:
    origin, relay, _link = tree("x")
    other = Node("s")
    link = Link(origin, other)
    link.opens()
    origin.publishes(grace=10.0)
    origin.perform(origin.machine.unreachable(b"r", origin.now, "killed"))
    assert origin.rows()["x"] == (True, ("r",), (0, 0))
    other.now = relay.now + 1
    other.joins("x")
    link.passes()
    assert origin.rows()["x"] == (False, ("s",), (0, 0))
    other.offers(1)
    other.applies("x", 1)
    assert resolved(link.passes()).receipt.workers["x"].through == ("s",)


def test_a_worker_that_changes_its_relay_is_counted_once_and_late_reports_do_not_move_it() -> None:
    origin, relay, link = tree("x")
    other = Node("s")
    second = Link(origin, other)
    second.opens()
    relay.say("x", Ping(subscribed=True))  # reported later, when x has gone
    other.now = relay.now + 0.05
    other.joins("x")
    second.passes()
    assert origin.rows()["x"][1] == ("s",)
    relay.now = other.now
    link.passes(10.0)  # the ping's report of r
    assert origin.rows()["x"][:2] == (False, ("s",))
    relay.perform(relay.machine.unreachable(b"x", relay.now, "killed"))
    link.passes(REPORT_SECONDS)
    assert origin.rows()["x"][:2] == (False, ("s",)), "r has lost it, and s has it"
    assert origin.machine.count_workers("a") == 1


def test_two_processes_of_one_name_are_logged_and_the_first_one_counts() -> None:
    origin, _relay, _link = tree("x")
    other = Node("s")
    second = Link(origin, other)
    second.opens()
    other.joins("x", of="another")
    second.passes(REPORT_SECONDS)
    assert origin.rows()["x"][1] == ("r",)
    (notice,) = [n for n in origin.notices if n.kind == "name-taken"]
    assert "behind relay r and behind relay s" in notice.text


def test_a_direct_worker_of_the_name_is_refused_unless_it_is_the_same_process() -> None:
    origin, _relay, _link = tree("x")
    sent = origin.joins("x", of="another")
    (refuse,) = [e.message for e in sent if isinstance(e, Send) and isinstance(e.message, Refuse)]
    assert (refuse.code, "behind relay r" in refuse.text) == ("name-taken", True)
    origin.joins("x")
    assert origin.rows()["x"] == (False, (), (0, 0))


def test_a_relay_behind_a_relay_reports_through_both() -> None:
    origin, relay, link = tree("x")
    inner, inner_link = behind(relay, link, "y")
    assert origin.rows()["y"][1] == ("r", "s")
    origin.publishes()
    for node in (relay, inner):
        node.offers(1)
    relay.applies("x", 1)
    inner.applies("y", 1)
    inner_link.passes()
    result = resolved(link.passes())
    assert {n: w.through for n, w in result.receipt.workers.items()} == {
        "x": ("r",),
        "y": ("r", "s"),
    }


@pytest.mark.parametrize("through", [["y", "x"], ["n"] * RELAYS_MAX])
def test_a_loop_is_logged_and_has_no_effect(through: list[str]) -> None:
    origin, _relay, _link = tree()
    row = WorkerRow(
        name="x", state="live", road="pulled", heard_ms=0, models={"a": Doing()}, through=through
    )
    origin.say("r", Below(epoch=EPOCH, rows=[row]))
    assert "x" not in origin.rows()
    assert [notice.kind for notice in origin.notices][-1:] == ["loop"]


def test_a_worker_that_is_no_relay_reports_no_others() -> None:
    origin = Node()
    origin.joins("w")
    row = WorkerRow(name="x", state="live", road="pulled", heard_ms=0, models={"a": Doing()})
    origin.say("w", Below(epoch=EPOCH, rows=[row]))
    assert [*origin.rows()] == ["w"]


def test_a_relay_that_was_lost_joins_again_and_reports_from_the_beginning() -> None:
    origin, relay, link = tree("x", "y")
    origin.perform(origin.machine.unreachable(b"r", origin.now, "killed"))
    relay.say("y", Bye())
    sent = origin.say("r", Ping())
    assert [
        e.message.code for e in sent if isinstance(e, Send) and isinstance(e.message, Refuse)
    ] == ["unknown-worker"]
    link.opens()
    assert origin.rows()["x"] == (False, ("r",), (0, 0))
    assert "y" not in origin.rows(), "it has left meanwhile"


@pytest.mark.parametrize("count", [100, COMPARED_MAX + 1])
def test_the_messages_of_a_version_do_not_grow_with_the_workers(count: int) -> None:
    names = [f"w{n}" for n in range(count)]
    origin, relay, link = tree(*names)
    origin.publishes()
    relay.offers(1)
    before = relay.sent
    for at, name in enumerate(names):
        relay.applies(name, 1)
        link.passes(0.001 if at % 5 else 0.0)
    link.passes(REPORT_SECONDS)
    assert {row[2] for name, row in origin.rows().items() if name != "r"} == {(EPOCH, 1)}
    seconds = count * 0.001
    pages = 1 + count // 200  # of at most 64 KiB
    assert relay.sent - before <= pages * (seconds / REPORT_SECONDS + 2)


Step = tuple[str, str]
NAMES = ["u", "v", "w"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "kill", "apply", "offer", "cut", "wait"]),
            st.sampled_from(NAMES),
        ),
        max_size=30,
    )
)
def test_the_publisher_ends_with_what_the_relay_knows(steps: Sequence[Step]) -> None:
    origin, relay, link = tree()
    newest, here = 0, set[str]()
    for what, name in steps:
        match what:
            case "join":
                relay.joins(name)
                here.add(name)
            case "leave" if name in here:
                relay.say(name, Bye())
                here.discard(name)
            case "kill" if name in here:
                relay.perform(relay.machine.unreachable(name.encode(), relay.now, "killed"))
                here.discard(name)
            case "apply" if newest and name in here:
                relay.applies(name, newest)
            case "offer":
                origin.publishes()
                newest = origin.call.version.version
                relay.offers(newest)
            case "cut":  # the relay's session ends, and what is not reported yet is lost
                origin.perform(origin.machine.unreachable(b"r", origin.now, "killed"))
                assert relay.reports is not None
                relay.reports.due(EPOCH, relay.now + REPORT_SECONDS)
                link.opens()
            case "wait":
                link.passes(0.03)
            case _:
                pass
    link.passes(REPORT_SECONDS)
    known = {name: row for name, row in origin.rows().items() if name != "r"}
    expected = {n: (lost, ("r", *t), runs) for n, (lost, t, runs) in relay.rows().items()}
    gone = known.keys() - expected.keys()
    assert all(known[name][0] for name in gone), "lost, since it left while the session was cut"
    assert {name: known[name] for name in expected} == expected


def test_relays_are_none_of_the_workers_that_a_call_expects() -> None:
    origin, relay, inner = Node(), Node("r"), Node("s")
    origin.publishes(expect=2)
    link, inner_link = Link(origin, relay), Link(relay, inner)
    link.opens()
    inner.now = relay.now
    inner_link.opens()
    inner.joins("x")
    for each in (inner_link, link):
        each.passes(REPORT_SECONDS)
    assert origin.rows().keys() == {"r", "s", "x"}
    assert [*origin.call.targets] == ["x"]
    assert origin.call.missing == 1


def test_a_relay_that_joins_late_is_announced_what_its_workers_have_to_stage() -> None:
    origin, _, _ = tree("x")
    origin.publishes(commit="together", grace=60.0)
    hello = Hello(name="r", instance="9" * 32, models={"a": None}, features=[RELAY])
    origin.say("r", Bye())
    (announce,) = announcements(origin.say("r", hello))
    assert (announce.message.version, announce.message.commit) == (1, "together")


def test_the_loss_of_a_relay_is_an_event_of_each_worker_behind_it() -> None:
    origin, relay, link = tree("x", "y")
    origin.publishes()
    relay.offers(1)
    relay.say("x", Progress(model="a", epoch=EPOCH, version=1, chunks=1, phase="receiving"))
    link.passes(1.0)
    origin.perform(origin.machine.unreachable(b"r", origin.now, "killed"))
    assert {n.worker for n in origin.notices if n.kind == "lost"} == {"r", "x", "y"}
    assert not [s.name for s in origin.machine.status(origin.now) if s.phase], "they do nothing"


def test_a_version_that_waits_for_its_user_behind_a_relay_is_not_staged_for_an_auto_call() -> None:
    origin, relay, link = tree("x")
    origin.publishes(timeout=1.0)
    relay.offers(1)
    relay.say("x", Progress(model="a", epoch=EPOCH, version=1, chunks=0, phase="staged"))
    link.passes(10.0)
    result = resolved(origin.perform(origin.machine.tick(origin.now)))
    assert result.receipt.workers["x"].state == "behind"


def test_a_worker_that_restarts_behind_another_relay_is_known_once_the_old_one_is_lost() -> None:
    origin, relay, link = tree("x")
    other = Node("s")
    second = Link(origin, other)
    second.opens()
    other.now = relay.now
    other.joins("x", of="another")
    second.passes(REPORT_SECONDS)
    relay.perform(relay.machine.unreachable(b"x", relay.now, "killed"))
    link.passes(REPORT_SECONDS)
    origin.perform(origin.machine.tick(origin.now))
    assert origin.rows()["x"] == (False, ("s",), (0, 0))


@pytest.mark.parametrize("leaves", ["bye", "relay lost", "reported anew"])
def test_a_row_that_had_no_effect_is_dropped_with_its_worker(leaves: str) -> None:
    origin, relay, link = tree("x")
    other = Node("s")
    second = Link(origin, other)
    second.opens()
    other.joins("x", of="another")
    second.passes(REPORT_SECONDS)
    match leaves:
        case "bye":
            other.say("x", Bye())
            second.passes(REPORT_SECONDS)
        case "relay lost":
            origin.perform(origin.machine.unreachable(b"s", origin.now, "killed"))
            origin.perform(origin.machine.tick(origin.now))
        case _:
            other.say("x", Bye())
            second.opens()
    relay.perform(relay.machine.unreachable(b"x", relay.now, "killed"))
    link.passes(REPORT_SECONDS)
    origin.perform(origin.machine.tick(origin.now))
    assert origin.rows()["x"] == (True, ("r",), (0, 0))
    assert not origin.machine.state.contested


def test_of_two_relays_rows_without_effect_that_of_the_one_that_heard_last_is_kept() -> None:
    origin, relay, link = tree("x")
    before, after = Node("t"), Node("s")
    before.joins("x", of="one before")
    for node in (before, after):
        node.now = origin.now
    before.now += 0.5
    late, soon = Link(origin, before), Link(origin, after)
    soon.opens()
    after.joins("x", of="the last one")
    soon.passes(REPORT_SECONDS)
    late.opens()  # whose relay has not noticed yet that its worker is gone
    relay.perform(relay.machine.unreachable(b"x", relay.now, "killed"))
    link.passes(REPORT_SECONDS)
    origin.perform(origin.machine.tick(origin.now))
    assert origin.rows()["x"] == (False, ("s",), (0, 0))


def test_the_workers_of_a_relay_that_moves_behind_another_are_lost_until_it_reports_them() -> None:
    origin, relay, _link = tree("x", "y")
    other = Node("s")
    second, third = Link(origin, other), Link(other, relay)
    other.now = relay.now
    second.opens()
    relay.say("y", Bye())  # not reported before the relay moves
    relay.now += 1
    third.opens()
    second.passes(REPORT_SECONDS)
    assert origin.rows()["r"] == (False, ("s",), (0, 0))
    assert origin.rows()["x"] == (False, ("s", "r"), (0, 0))
    assert origin.rows()["y"][0], "it has left"
    sent = [effect for effect in origin.publishes(workers=("y",)) if isinstance(effect, Send)]
    assert not sent, "the way to it is over"


def test_a_relay_keeps_no_version_for_a_worker_that_has_it_from_elsewhere() -> None:
    relay = Node("r")
    digest = offer_of(2).chunks.digest
    runs: dict[str, Running | None] = {"a": Running(EPOCH, 2, digest)}
    relay.offers(1)
    relay.say("x", Hello(name="x", instance=instance("x"), models=runs, epoch=EPOCH))
    relay.joins("y")
    relay.offers(2)
    assert [*relay.rows()] == ["x", "y"]
    assert relay.machine.state.store["a"].find(2).receivers == {"y"}  # type: ignore[union-attr] # pyright: ignore


def test_a_relay_knows_what_a_worker_runs_that_read_it_elsewhere_in_shared_memory() -> None:
    relay = Node("r")
    relay.offers(1)
    runs: dict[str, Running | None] = {"a": Running(EPOCH, 1, "")}
    relay.say("x", Hello(name="x", instance=instance("x"), models=runs, epoch=EPOCH))
    assert relay.rows()["x"][2] == (EPOCH, 1)
    relay.joins("y")
    relay.say("y", Applied(model="a", epoch=EPOCH, version=1, digest=""))
    assert relay.rows()["y"][2] == (EPOCH, 1)


def test_a_relay_offers_an_older_version_after_one_that_was_aborted() -> None:
    relay = Node("r")
    relay.offers(1)
    relay.offers(4, together=True)
    versions = relay.machine.state.store["a"]
    assert versions.pending is not None
    relay.perform(relay.machine.decide(versions.pending, commit=False, why="no"))
    relay.offers(3)
    assert versions.latest is not None
    assert versions.latest.version == 3
    relay.offers(4)
    assert [version.version for version in versions] == [4]
    with pytest.raises(ValueError, match="version 4 of a comes after version 4"):
        relay.offers(4)


def test_a_failure_in_an_older_epoch_is_none_of_the_versions_of_the_next() -> None:
    relay = Node("r")
    relay.joins("x")
    relay.offers(1)
    relay.say("x", Failed(model="a", epoch=EPOCH, version=1, code="apply", text="no such tensor"))
    relay.perform(relay.machine.pass_on(replace_key(offer_of(1), (EPOCH + 1, 1)), relay.now)[1])
    assert relay.reports is not None
    (report,) = relay.reports.due(EPOCH + 1, relay.now)
    assert [row.models["a"].failed for row in report.rows] == [0]


def test_a_relay_knows_what_a_worker_runs_of_a_model_that_it_has_never_had() -> None:
    relay = Node("r")
    digest = offer_of(1).chunks.digest
    runs: dict[str, Running | None] = {"a": Running(EPOCH, 1, digest)}
    relay.say("x", Hello(name="x", instance=instance("x"), models=runs, epoch=EPOCH))
    relay.joins("y")
    relay.say("y", Applied(model="a", epoch=EPOCH, version=1, digest=digest))
    assert [row[2] for row in relay.rows().values()] == [(EPOCH, 1)] * 2


@pytest.mark.parametrize("looks", [True, False])
def test_a_worker_that_leaves_after_its_report_has_applied_the_version(*, looks: bool) -> None:
    origin, relay, link = tree("w", "other")
    origin.publishes(expect=2)
    relay.offers(1)
    relay.applies("other", 1)
    link.passes(REPORT_SECONDS)
    relay.applies("w", 1)
    relay.joins("late")  # so that not all are done, and the report waits for others
    if looks:
        link.passes()
    relay.say("w", Bye())
    link.passes(REPORT_SECONDS)
    states = {name: target.state for name, target in origin.call.targets.items()}
    assert states == {"w": "applied", "other": "applied"}
    assert "w" not in origin.rows()


def test_the_last_report_of_a_relay_waits_for_nothing() -> None:
    _, relay, link = tree("w", "other")
    link.passes(REPORT_SECONDS)
    relay.offers(1)
    relay.applies("w", 1)
    assert relay.reports is not None
    assert relay.reports.due(EPOCH, relay.now) == []
    (last,) = relay.reports.due(EPOCH, relay.now, closing=True)
    assert [row.name for row in last.rows] == ["w"]
