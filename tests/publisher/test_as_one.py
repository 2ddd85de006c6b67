"""Versions of several models that are published as one: one decision, for all or for none."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weightbus.bus.messages import (
    COMPANIONS,
    Abort,
    Announce,
    Applied,
    Commit,
    Failed,
    Fetch,
    Staged,
)
from weightbus.bus.publisher.effects import Effect, Resolve, Settled
from weightbus.bus.publisher.publication import Publication, PublishTerms
from weightbus.bus.publisher.version import VersionOffer
from weightbus.bus.structs import Message
from weightbus.codecs.layout import Layout
from weightbus.tests.publisher.test_publisher_machine import (
    CHUNK,
    EPOCH,
    Bench,
    digest,
    hello,
    sent,
)
from weightbus.tests.simulation.virtual_shell import PlainSnapshot, perform

ids = itertools.count(1000)


class Pair(Bench):
    """A publisher of models a and b: `both` takes both, `one` only a."""

    def __init__(self) -> None:
        super().__init__()
        self.joins("both", "a", "b")
        self.joins("one", "a")

    def joins(self, name: str, *models: str, features: tuple[str, ...] = (COMPANIONS,)) -> None:
        said = hello(name, models=dict.fromkeys(models), features=[*features])
        self.say(name, said)

    def publish_as_one(self, **terms: Any) -> list[Effect]:
        self.parts: list[Publication] = []
        layout = Layout.plan([("w", "U8", (40,))])
        bytes_of = [PlainSnapshot(np.arange(40, dtype=np.uint8)) for _ in "ab"]
        offers = [VersionOffer.of(m, layout, CHUNK, b) for m, b in zip("ab", bytes_of, strict=True)]
        named = dict(zip(ids, offers, strict=False))
        about = PublishTerms(commit="together", **terms)
        self.parts, effects = self.machine.publish_as_one(named, about, self.now, self.now)
        return perform(self.machine, effects, self.now)

    def reports(
        self, name: str, kind: Callable[..., Message], model: str, **fields: Any
    ) -> list[Effect]:
        version = self.parts["ab".index(model)].version
        if kind in (Staged, Applied):
            fields["digest"] = digest(version)
        said = kind(model=model, epoch=version.epoch, version=version.version, **fields)
        return self.say(name, said)


def decided(effects: list[Effect], kind: type[Commit] | type[Abort]) -> list[tuple[str, str]]:
    """Return which workers were told of a decision, and of which model."""
    told = [(m.model, n) for n in ("both", "one") for m in sent(effects, kind, n)]
    return sorted(set(told))  # twice, in answer to `staged` too


def answers(effects: list[Effect]) -> dict[str, Resolve]:
    return {e.receipt.model: e for e in effects if isinstance(e, Resolve)}


def test_nothing_is_committed_before_each_worker_has_staged_all_that_it_takes() -> None:
    pair = Pair()
    announced = sent(pair.publish_as_one(), Announce, "both")
    assert {a.model: (a.commit, a.companions) for a in announced} == {
        "a": ("together", {"b": 1}),
        "b": ("together", {"a": 1}),
    }
    assert decided(pair.reports("both", Staged, "a"), Commit) == []
    assert decided(pair.reports("one", Staged, "a"), Commit) == []
    effects = pair.reports("both", Staged, "b")
    assert decided(effects, Commit) == [("a", "both"), ("a", "one"), ("b", "both")]
    assert [e.version.model for e in effects if isinstance(e, Settled)] == ["a", "b"]
    assert not answers(pair.reports("both", Applied, "a") + pair.reports("one", Applied, "a"))
    found = answers(pair.reports("both", Applied, "b"))
    assert [found[m].achieved for m in "ab"] == [True, True]
    assert found["a"].receipt.in_state("applied") == ["both", "one"]
    assert found["b"].receipt.in_state("applied") == ["both"]
    assert not pair.machine.state.calls


def test_a_worker_that_fails_one_version_has_all_dropped() -> None:
    pair = Pair()
    pair.publish_as_one()
    pair.reports("both", Staged, "a")
    pair.reports("one", Staged, "a")
    effects = pair.reports("both", Failed, "b", code="layout-mismatch", text="no")
    assert decided(effects, Abort) == [("a", "both"), ("a", "one"), ("b", "both")]
    found = answers(effects)
    assert [found[m].achieved for m in "ab"] == [False, False]
    assert all(versions.latest is None for versions in pair.machine.state.store.values())


def test_the_end_of_one_call_and_a_newer_version_of_one_model_abort_all() -> None:
    for newer in (False, True):
        pair = Pair()
        pair.publish_as_one(timeout=60.0)
        if newer:
            _, effects = pair.publish()
        else:
            effects = pair.machine.end(pair.parts[1], "enough of it", pair.now)
        assert decided(effects, Abort) == [("a", "both"), ("a", "one"), ("b", "both")]
        assert set(answers(effects)) == {"a", "b"}


def test_the_deadline_aborts_all() -> None:
    pair = Pair()
    pair.publish_as_one(timeout=1.0)
    pair.reports("both", Staged, "a")
    pair.reports("one", Staged, "a")
    effects = pair.pass_time(1.1)
    assert decided(effects, Abort) == [("a", "both"), ("a", "one"), ("b", "both")]


def test_a_number_of_workers_counts_those_that_are_done_with_all_that_they_take() -> None:
    pair = Pair()
    pair.publish_as_one(require=2, grace=60.0)
    pair.joins("late", "a", "b")
    pair.reports("one", Staged, "a")
    assert decided(pair.reports("both", Staged, "a"), Commit) == [], "b is not staged"
    effects = pair.reports("both", Staged, "b")
    assert len(decided(effects, Commit)) == 3


def test_workers_that_are_expected_may_take_one_model_or_both() -> None:
    pair = Pair()
    pair.publish_as_one(expect=4, grace=60.0)
    for name in ("both", "one"):
        pair.reports(name, Staged, "a")
    assert decided(pair.reports("both", Staged, "b"), Commit) == []
    pair.joins("third", "b")
    pair.joins("fourth", "a", "b")
    for name, model in (("third", "b"), ("fourth", "a")):
        assert not sent(pair.reports(name, Staged, model), Commit)
    effects = pair.reports("fourth", Staged, "b")
    assert {m.model for m in sent(effects, Commit, "fourth")} == {"a", "b"}


def test_named_workers_take_what_they_want_of_it() -> None:
    pair = Pair()
    announced = pair.publish_as_one(workers=("one", "both"))
    assert [a.model for a in sent(announced, Announce, "one")] == ["a"]
    assert sorted(pair.parts[0].targets) == ["both", "one"]
    assert sorted(pair.parts[1].targets) == ["both"]


def test_the_receipt_says_which_worker_applies_models_one_after_another() -> None:
    pair = Pair()
    pair.joins("plain", "a", "b", features=())
    pair.publish_as_one()
    for name, model in (("both", "a"), ("both", "b"), ("one", "a"), ("plain", "a"), ("plain", "b")):
        pair.reports(name, Staged, model)
    found = dict[str, Resolve]()
    for name, model in (("both", "a"), ("both", "b"), ("one", "a"), ("plain", "a"), ("plain", "b")):
        found |= answers(pair.reports(name, Applied, model))
    details = {n: w.detail for n, w in found["a"].receipt.workers.items()}
    assert details == {"both": "", "one": "", "plain": "it applies models one after another"}


@pytest.mark.parametrize("late", [False, True])
def test_every_announcement_names_the_companions(late: bool) -> None:
    pair = Pair()
    pair.publish_as_one()
    if late:  # after the commit
        for name, model in (("both", "a"), ("both", "b"), ("one", "a")):
            pair.reports(name, Staged, model)
    pair.joins("new", "a", "b")

    version = 1
    asked = Fetch(model="b", epoch=EPOCH, version=version, layout=True)
    [announced] = sent(pair.say("new", asked), Announce)
    assert announced.companions == {"a": 1}
    assert announced.commit == ("auto" if late else "together")
