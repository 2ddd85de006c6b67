"""Companions are ready at once: a worker holds each of them back until all are here. (C2)"""

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from weightbus.bus.effects import Effect, Ready
from weightbus.bus.headers import encode
from weightbus.bus.messages import Abort, Commit, Failed, Progress, Staged
from weightbus.bus.publisher import offers
from weightbus.bus.staged import StagedVersion
from weightbus.bus.worker.events import Outcome, Report
from weightbus.tests.simulation.virtual_shell import version_of
from weightbus.tests.worker.test_worker_machine import EPOCH, Bench, sent, welcome


class Two(Bench):
    """A worker of models a and b, to which versions come whole."""

    def version(
        self, model: str, number: int, *, commit: str = "together", **beside: int
    ) -> list[Effect]:
        """Deliver a version; `beside`: its companions."""
        version = version_of(number, np.full(4, number, np.uint8), 4, EPOCH)
        about: dict[str, Any] = {"model": model, "commit": commit, "companions": beside}
        about["acknowledge"] = "staged" if commit == "together" else "applied"
        frames = [b"x", encode(structs.replace(offers.announcement(version), **about))]
        effects = self.publish_frames([*frames, bytes(version.layout.header)])
        chunk, payload = offers.chunk_of(version, 0)
        effects += self.publish_frames(
            [b"x", encode(structs.replace(chunk, model=model)), bytes(payload)]
        )
        end = structs.replace(offers.end_of(version), model=model)
        return effects + self.publish_frames([b"x", encode(end)])

    def publish_frames(self, frames: list[bytes]) -> list[Effect]:
        return self.done(self.machine.receive_published(frames, self.now))

    def commit(self, model: str, number: int) -> list[Effect]:
        version = version_of(number, np.full(4, number, np.uint8), 4, EPOCH)
        digest = version.digest
        return self.tell(Commit(model=model, epoch=EPOCH, version=number, digest=digest))

    def outcome(self, model: str, number: int, *what: Outcome) -> list[Effect]:
        effects: list[Effect] = []
        for each in what:
            report = Report(model, (EPOCH, number), each, "no")
            effects += self.done(self.machine.happened(report, self.now))
        return effects

    def runs(self, model: str) -> int:
        running = self.machine.followers[model].running
        return running.version if running is not None else 0


def ready(effects: list[Effect]) -> list[list[tuple[str, int]]]:
    """Return what becomes ready at once, each time."""

    def named(each: tuple[StagedVersion, ...]) -> list[tuple[str, int]]:
        return sorted((staged.model, staged.version) for staged in each)

    return [named((e.staged, *e.others)) for e in effects if isinstance(e, Ready)]


def both_staged() -> Two:
    two = Two()
    assert sent(two.version("a", 1, b=1), Staged)
    assert sent(two.version("b", 1, a=1), Staged)
    return two


def test_companions_are_ready_at_once_when_the_last_is_committed() -> None:
    two = both_staged()
    assert ready(two.commit("a", 1)) == []
    assert ready(two.commit("a", 1)) == [], "the answer to `staged`"
    assert ready(two.commit("b", 1)) == [[("a", 1), ("b", 1)]]


def test_a_committed_version_waits_until_its_companion_has_arrived() -> None:
    two = Two()
    two.version("a", 1, b=1)
    assert ready(two.commit("a", 1)) == []
    assert ready(two.version("b", 1, commit="auto", a=1)) == [[("a", 1), ("b", 1)]]


def test_late_companions_come_committed_and_wait_all_the_same() -> None:
    two = Two()
    assert ready(two.version("b", 3, commit="auto", a=2)) == []
    assert ready(two.version("a", 2, commit="auto", b=3)) == [[("a", 2), ("b", 3)]]


def test_companions_of_models_that_the_worker_does_not_want_do_not_matter() -> None:
    two = Two()
    assert ready(two.version("a", 1, commit="auto", z=1)) == [[("a", 1)]]


def test_a_newer_version_of_the_other_model_will_do_once_it_runs() -> None:
    two = Two()
    two.version("a", 1, commit="auto", b=1)
    assert ready(two.version("b", 2, commit="auto")) == [[("b", 2)]]
    assert ready(two.outcome("b", 2, "taken")) == []
    assert ready(two.outcome("b", 2, "applied")) == [[("a", 1)]]


def test_versions_of_two_groups_do_not_mix() -> None:
    two = both_staged()
    two.commit("a", 1)
    two.version("b", 2, commit="auto", a=2)  # instead of version 1 of b
    assert ready(two.commit("b", 1)) == []
    assert ready(two.version("a", 2, commit="auto", b=2)) == [[("a", 2), ("b", 2)]]


def test_an_older_version_of_the_other_model_that_runs_will_not_do() -> None:
    two = Two()
    two.version("b", 1, commit="auto")
    two.outcome("b", 1, "taken", "applied")
    assert ready(two.version("a", 1, commit="auto", b=2)) == []


def test_what_is_held_back_is_dropped_when_another_publisher_begins() -> None:
    two = both_staged()
    two.commit("a", 1)
    two.tell(welcome(EPOCH + 1))
    assert not two.machine.followers["a"].versions.all("staged", "ready")
    assert (two.runs("a"), two.runs("b")) == (0, 0), "the old versions of both"


def test_an_abort_drops_both() -> None:
    two = both_staged()
    for model in "ab":
        two.tell(Abort(model=model, epoch=EPOCH, version=1))
        assert ready(two.commit(model, 1)) == []


def test_the_publisher_hears_why_a_version_is_held_back() -> None:
    two = both_staged()
    two.commit("a", 1)
    two.now += 2.0
    effects = two.done(two.machine.tick(two.now))
    [waits] = [m.waits for m in sent(effects, Progress) if m.model == "a"]
    assert waits == "version 1 of b, which is published as one with it"


@pytest.mark.parametrize("what", ["failed", "declined"])
def test_a_companion_that_fails_is_held_back_again_with_the_other(what: Outcome) -> None:
    two = both_staged()
    two.commit("a", 1)
    two.commit("b", 1)
    effects = two.outcome("a", 1, "taken", what) + two.outcome("b", 1, "taken", "failed")
    assert {m.model for m in sent(effects, Failed)} == {"a", "b"}
    again = two.version("b", 1, commit="auto", a=1)
    assert ready(again) == []
    if what == "failed":
        assert ready(two.version("a", 1, commit="auto", b=1)) == [[("a", 1), ("b", 1)]]


def test_an_exception_puts_ready_companions_back_at_once() -> None:
    two = both_staged()
    two.commit("a", 1)
    two.commit("b", 1)
    assert ready(two.machine.broken("a defect", two.now)) == [[("a", 1), ("b", 1)]]
