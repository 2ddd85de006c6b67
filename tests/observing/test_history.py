"""What a publisher remembers for its page: the last quarter of an hour, and no more of it."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from weightbus.bus.messages import Applied
from weightbus.python_client.observing import history
from weightbus.python_client.observing.diagnosis import TROUBLES_SHOWN, troubles
from weightbus.python_client.observing.history import MOMENT_SECONDS, MOMENTS_MAX, History, Moment
from weightbus.python_client.observing.view import Standing, View
from weightbus.tests.publisher.test_observing import Watched
from weightbus.tests.publisher.test_publisher_machine import EPOCH, hello
from weightbus.types import Receipt, WorkerReceipt

STANDING = Standing(
    model="a", worker="w", verdict="current", epoch=1, version=1, newest=1, lag=0, lag_s=None,
    phase="", rate=0.0, took_s=0.0, error="", language="", client="", host="", pid=1,
    road="pulled", encoding="raw", silent_s=0.0,
)  # fmt: skip


def receipt(model: str = "a", version: int = 1, seconds: float | None = 0.5) -> Receipt:
    workers = {"w": WorkerReceipt("w", "applied", seconds)}
    return Receipt(model, EPOCH, version, 10, 1.0, "", workers)


def moments(kept: History, now: float, since: int = -1, model: str = "a") -> list[Moment]:
    return kept.moments(since, now)[1].get(model, [])


def test_publishes_of_the_last_minutes_are_kept_and_no_others() -> None:
    kept, now = History(), 1000.0
    for number in range(2 * MOMENTS_MAX):
        now += MOMENT_SECONDS
        kept.published(receipt(version=number + 1), "", now)
    found = moments(kept, now)
    assert [m.version for m in found] == [*range(MOMENTS_MAX + 1, 2 * MOMENTS_MAX + 1)]
    assert {(m.publishes, m.short, m.applied_s) for m in found} == {(1, 0, 0.5)}
    later = now + MOMENTS_MAX * MOMENT_SECONDS
    assert not moments(kept, later), "they have become old though nothing new came"
    assert len(moments(kept, later - MOMENT_SECONDS)) == 1


def test_many_publishes_of_a_moment_take_no_more_memory() -> None:
    kept = History()
    for number in range(1000):
        kept.published(receipt(version=number + 1, seconds=number / 1000), "too few", 1.0)
    (moment,) = moments(kept, 1.0)
    assert (moment.publishes, moment.short, moment.applied_s) == (1000, 1000, 0.999)
    ((last, count),) = kept.short(1.0)
    assert (last.model, last.text, count) == ("a", "too few", 1000)
    assert not kept.short(1.0 + MOMENTS_MAX * MOMENT_SECONDS)


def test_of_many_models_those_are_kept_that_were_heard_of_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "MODELS_MAX", 3)
    kept = History()
    for name in ("a", "b", "c", "a", "d", "e"):
        kept.published(receipt(name), "no", 1.0)
    assert set(kept.moments(-1, 1.0)[1]) == {"a", "d", "e"}
    assert {last.model for last, _ in kept.short(1.0)} == {"a", "d", "e"}


def test_a_model_that_is_forgotten_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MODELS_MAX", 1)
    kept = History()
    kept.published(receipt("a"), "no", 1.0)
    lock = Preempted(lambda: kept.published(receipt("b"), "no", 1.0))
    monkeypatch.setattr(kept, "_lock", lock)
    assert [last.model for last, _ in kept.short(1.0)] == ["a"]
    assert [last.model for last, _ in kept.short(1.0)] == ["b"]


class Preempted:
    """A lock; when it is released for the first time, another thread gets it before others."""

    def __init__(self, other: Callable[[], None]) -> None:
        self._lock, self._others = threading.Lock(), [other]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        while self._others:
            self._others.pop()()


def test_words_of_others_are_kept_printable_and_short() -> None:
    kept = History()
    kept.published(receipt(), "one\n\x1b[2J" + "x" * 10_000, 1.0)
    ((last, _),) = kept.short(1.0)
    assert last.text.startswith("one \\x1b[2Jxxx")
    assert len(last.text) == history.TEXT_MAX


def test_lag_is_kept_by_moment_with_whose_it_was_and_only_news_are_told() -> None:
    bench, view, kept = Watched(), View(), History()
    for name in ("quick", "slow"):
        bench.say(name, hello(name))
    version, _ = bench.publish()
    digest = version.digest

    def applied(name: str) -> None:
        number = bench.machine.state.versions("a").latest
        assert number is not None
        bench.say(name, Applied(model="a", epoch=EPOCH, version=number.version, digest=digest))

    def look() -> None:
        bench.look(view)
        kept.looked(view, view.standings(bench.now), bench.now)

    bench.now = 10 * MOMENT_SECONDS
    applied("quick")
    look()
    (first,) = moments(kept, bench.now)
    assert (first.late, first.bad, first.lag, first.who) == (1, 0, 1, "slow")
    told = kept.changes
    bench.now += MOMENT_SECONDS
    applied("slow")
    look()
    found = moments(kept, bench.now)
    assert [(m.late, m.lag, m.who) for m in found] == [(1, 1, "slow"), (0, 0, "")]
    assert moments(kept, bench.now, told) == found[1:], "only what has changed since"


def test_a_version_that_is_applied_late_counts_where_it_was_published() -> None:
    bench, view, kept = Watched(), View(), History()
    bench.say("w", hello("w"))
    bench.now = 10.4 * MOMENT_SECONDS
    version, _ = bench.publish()
    bench.look(view)
    kept.looked(view, view.standings(bench.now), bench.now)
    told, published = kept.changes, bench.now
    bench.now += 3 * MOMENT_SECONDS
    bench.say("w", Applied(model="a", epoch=EPOCH, version=1, digest=version.digest))
    bench.look(view)
    kept.looked(view, view.standings(bench.now), bench.now)
    first, last = moments(kept, bench.now, told)
    assert first.at == history.moment_index(published)
    assert first.applied_s == pytest.approx(3 * MOMENT_SECONDS, rel=0.1)
    assert last.applied_s == 0.0


# What is wrong, in a few lines.


def lines(*standings: Standing) -> list[str]:
    return [trouble.text for trouble in troubles(View(), standings, 0.0)]


def test_what_is_wrong_with_many_is_said_once() -> None:
    lost = [replace(STANDING, worker=f"w{n}", verdict="lost") for n in range(250)]
    assert lines(*lost, STANDING) == ["w0, w1, w2 and 247 more are lost"]
    twice = [replace(STANDING, model=model, verdict="lost") for model in ("a", "b")]
    assert lines(*twice) == ["w is lost"], "with all of its models"


def test_what_is_wrong_has_its_reason_and_passing_lag_is_not_wrong() -> None:
    assert lines(
        replace(STANDING, verdict="failed", error="layout-mismatch: w: shape [3]"),
        replace(STANDING, worker="v", verdict="failed", error="layout-mismatch: w: shape [4]"),
        replace(STANDING, verdict="failed", error="apply: no"),
        replace(STANDING, verdict="stuck", phase="receiving 7, 12 %"),
        replace(STANDING, verdict="behind", lag=1, lag_s=60.0),
        replace(STANDING, verdict="behind", lag=1, lag_s=0.5),
        replace(STANDING, verdict="behind", lag=1),
    ) == [
        "w, v failed a: layout-mismatch: w: shape [3]",
        "w failed a: apply: no",
        "w is stuck with a, receiving",
        "w is behind with a",
    ]


def test_what_is_wrong_is_never_more_than_a_person_reads() -> None:
    many = [
        replace(STANDING, model=f"m{n}", verdict="failed", error="apply: no") for n in range(100)
    ]
    said = lines(*many)
    assert len(said) == TROUBLES_SHOWN
    assert said[-1] == f"and {100 - TROUBLES_SHOWN + 1} more things are wrong"


def test_nobody_is_there_or_nobody_takes_a_model() -> None:
    assert lines() == ["no worker is connected"]
    bench, view = Watched(), View()
    bench.say("w", hello("w", models={"b": None}))
    bench.publish()
    bench.look(view)
    found = troubles(view, view.standings(bench.now), bench.now)
    assert [t.text for t in found] == ["no worker subscribes to a"]
