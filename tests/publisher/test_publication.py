"""When a call of publish is over, and whether it achieved what it required."""

from typing import Literal

import pytest

from weightbus.bus.publisher.publication import Publication, PublishTerms
from weightbus.bus.publisher.tables import TARGETS, TargetEvent
from weightbus.bus.publisher.version import Version, VersionOffer
from weightbus.bus.receipt import State
from weightbus.codecs.layout import Layout
from weightbus.tests.simulation.virtual_shell import PlainSnapshot

LETTERS: dict[str, TargetEvent] = {
    "s": "staged",
    "a": "applied",
    "k": "skipped",
    "f": "failed",
    "l": "lost",
    "g": "left",
}
EVENTS: list[TargetEvent] = [*LETTERS.values(), "returned"]


def publication(
    states: str,
    *,
    require: int | None = None,
    wait: Literal["applied", "staged", "none"] = "applied",
    commit: Literal["auto", "together"] = "auto",
    expect: int = 0,
    grace: float = 0.0,
    named: frozenset[str] | None = None,
) -> Publication:
    """Return a publish that began at 0 and ends at 10, its targets in these states."""
    layout = Layout.plan([("w", "U8", (1,))])
    version = Version(VersionOffer.of("a", layout, 1, PlainSnapshot(bytes(1))), 1, 1)
    terms = PublishTerms(
        require=require, wait=wait, commit=commit, expect=expect, grace=grace, named=named
    )
    names = [f"w{i}" for i in range(len(states))]
    made = Publication(1, version, terms, 0.0, names)
    for i, letter in enumerate(states):
        if letter != "b":  # as it begins: behind
            made.move(f"w{i}", LETTERS[letter], 0.0)
    return made


# States of the targets, what is required, what is waited for: verdict in time, and at the deadline.
VERDICTS: list[tuple[str, int | None, Literal["applied", "staged", "none"], bool | None, bool]] = [
    ("", None, "applied", True, True),
    ("", 0, "applied", True, True),
    ("", 1, "applied", False, False),
    ("a", None, "applied", True, True),
    ("k", None, "applied", True, True),
    ("ak", None, "applied", True, True),
    ("ab", None, "applied", None, False),
    ("as", None, "applied", None, False),
    ("as", None, "staged", True, True),
    ("bs", None, "staged", None, False),
    ("af", None, "applied", False, False),
    ("bf", None, "applied", None, False),  # the others are still waited for
    ("al", None, "applied", False, False),
    ("aab", 2, "applied", True, True),
    ("abb", 2, "applied", None, False),
    ("afb", 2, "applied", None, False),
    ("aff", 2, "applied", False, False),
    ("ffl", 2, "applied", False, False),
    ("ag", 2, "applied", False, False),
    ("ss", 2, "staged", True, True),
    ("sa", 3, "staged", False, False),
    ("b", 0, "applied", None, True),
    ("s", 0, "applied", None, True),
    ("f", 0, "applied", True, True),
    ("b", None, "none", True, True),
    ("fl", None, "none", True, True),
]


@pytest.mark.parametrize(("states", "require", "wait", "early", "late"), VERDICTS)
def test_verdicts(
    states: str,
    require: int | None,
    wait: Literal["applied", "staged", "none"],
    early: bool | None,
    late: bool,
) -> None:
    made = publication(states, require=require, wait=wait)
    assert made.verdict(9.99) is early
    assert made.verdict(10.0) is late
    assert made.decide(10.0) == "open", "an auto publish has nothing to decide"


# States, what is required: decision in time, and at the deadline.
DECISIONS = [
    ("ss", None, "commit", "commit"),
    ("sb", None, "open", "abort"),
    ("sf", None, "abort", "abort"),
    ("sl", None, "abort", "abort"),
    ("sbb", 1, "commit", "commit"),
    ("sbf", 2, "open", "abort"),
    ("sff", 2, "abort", "abort"),
    ("sk", None, "commit", "commit"),
    ("bb", 0, "commit", "commit"),
    ("", None, "commit", "commit"),
    ("", 1, "abort", "abort"),
]


@pytest.mark.parametrize(("states", "require", "early", "late"), DECISIONS)
def test_decisions(states: str, require: int | None, early: str, late: str) -> None:
    assert publication(states, require=require, commit="together").decide(9.99) == early
    made = publication(states, require=require, commit="together")
    assert made.decide(10.0) == late
    assert made.decide(0.0) == late, "a decision stands"


# Of w0, w1 and so on, those that are named: verdict, and decision, in time.
NAMED: list[tuple[str, list[str], bool | None, str]] = [
    ("ab", ["w0"], True, "commit"),
    ("ba", ["w0"], None, "open"),
    ("fa", ["w0"], False, "abort"),
    ("af", ["w0"], True, "commit"),
    ("aab", ["w0", "w2"], None, "open"),
    ("sga", ["w0", "w2"], None, "commit"),
    ("ag", ["w0", "w1"], False, "abort"),
    ("a", ["w0", "w1"], None, "open"),  # one has not joined yet
    ("alb", ["w0", "w2"], None, "open"),
]


@pytest.mark.parametrize(("states", "named", "verdict", "decision"), NAMED)
def test_only_workers_that_are_named_count(
    states: str, named: list[str], verdict: bool | None, decision: str
) -> None:
    terms = {"require": len(named), "named": frozenset(named)}
    made = publication(states, commit="auto", **terms)  # type: ignore[arg-type]
    assert made.verdict(9.99) is verdict
    assert made.verdict(10.0) is bool(verdict)
    together = publication(states, commit="together", **terms)  # type: ignore[arg-type]
    assert together.decide(9.99) == decision


def test_a_worker_that_is_named_and_joins_late_is_a_target_and_no_other_is() -> None:
    made = publication("a", require=2, named=frozenset({"w0", "late"}))
    made.welcome("other")
    made.welcome("late")
    assert [*made.targets] == ["w0", "late"]
    made.move("late", "applied", 1.0)
    assert made.verdict(1.0) is True


def test_an_aborted_publish_achieved_nothing() -> None:
    for wait in ("applied", "staged", "none"):
        made = publication("sb", wait=wait, commit="together")
        assert made.decide(10.0) == "abort"
        assert made.verdict(0.0) is False


def test_a_superseded_commit_is_aborted_unless_it_was_decided() -> None:
    open_, decided = (publication(s, commit="together") for s in ("sb", "ss"))
    decided.decide(0.0)
    open_.ended = decided.ended = "a newer one"
    assert (open_.decide(0.0), decided.decide(0.0)) == ("abort", "commit")


@pytest.mark.parametrize("before", TARGETS)
def test_a_target_moves_along_arrows_only(before: State) -> None:
    for event in EVENTS:
        made = publication("b")
        made.targets["w0"].state = before
        made.move("w0", event, 4.0, "why")
        target, after = made.targets["w0"], TARGETS[before].get(event)
        if after is not None:
            assert (target.state, target.detail) == (after, "why")
            assert target.at == (None if after == "behind" else 4.0)
        else:
            assert (target.state, target.detail, target.at) == (before, "", None)


def test_success_is_final() -> None:
    assert not TARGETS["applied"]
    assert not TARGETS["skipped"]


def test_a_worker_that_is_no_target_changes_nothing() -> None:
    made = publication("b")
    made.move("stranger", "applied", 1.0)
    assert set(made.targets) == {"w0"}


def test_the_receipt_tells_seconds_since_the_call() -> None:
    made = publication("bb")
    made.started = 3.0
    made.move("w0", "applied", 5.0)
    receipt = made.resolve(7.0, "d" * 64)
    assert receipt.seconds == 4.0
    assert receipt.workers["w0"].seconds == 2.0
    assert receipt.workers["w1"].seconds is None
    assert "w0 applied after 2.0 s" in str(receipt)
    assert receipt.in_state("applied", "behind") == ["w0", "w1"]


@pytest.mark.parametrize(
    ("states", "expect", "early", "late"),
    [
        ("", 1, None, False),
        ("a", 1, True, True),
        ("a", 2, None, False),
        ("ab", 2, None, False),
        ("al", 2, False, False),
        ("ag", 2, None, False),  # it left: another may come in its place
        ("ag", 1, True, True),
        ("g", 0, True, True),
    ],
)
def test_all_are_at_least_as_many_as_expected(
    states: str, expect: int, early: bool | None, late: bool
) -> None:
    made = publication(states, expect=expect)
    assert (made.verdict(9.99), made.verdict(10.0)) == (early, late)


def test_the_lost_are_waited_for_as_long_as_their_grace_lasts() -> None:
    made = publication("ab", grace=3.0)
    made.lose("w1", 4.0, "silent")
    assert made.verdict(6.99) is None
    assert made.verdict(7.0) is False
    made.move("w1", "returned", 6.0)
    assert made.verdict(7.0) is None, "it is back"


def test_a_version_of_another_number_is_had_by_nobody() -> None:
    made = publication("abslg", require=1, wait="staged")
    made.lose("w1", 4.0, "silent")
    made.renew()
    assert [t.state for t in made.targets.values()] == ["behind", "lost", "behind", "lost", "left"]
    assert made.targets["w1"].detail == "silent"
    assert made.verdict(5.0) is None
